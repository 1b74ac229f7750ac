// SPDX-License-Identifier: Apache-2.0
// Groups over a function of Python that swaps bytes between the ranks; weft/group.py gives it.
#include <memory>
#include <nanobind/stl/vector.h>

#include "bind.hpp"
#include "weft/group.hpp"

namespace weft::py {
namespace {

namespace nb = nanobind;

std::span<const std::byte> span_of(const nb::bytes& bytes) {
  return {static_cast<const std::byte*>(bytes.data()), bytes.size()};
}

nb::bytes bytes_of(std::span<const std::byte> block) {
  return nb::bytes(block.data(), block.size());
}

// `function`: bytes -> list of bytes by rank, called by this thread alone.
AllGather all_gather_of(nb::callable callable) {
  // Whichever thread lets go of it last needs the interpreter for that.
  const auto free = [](nb::callable* one) {
    const nb::gil_scoped_acquire gil;
    delete one;  // NOLINT(cppcoreguidelines-owning-memory): a deleter's way
  };
  const std::shared_ptr<nb::callable> function(new nb::callable(std::move(callable)), free);
  return [function](std::span<const std::byte> block) {
    const nb::gil_scoped_acquire gil;
    const nb::object gathered = (*function)(bytes_of(block));
    std::vector<Bytes> blocks;
    for (const nb::handle one : gathered) {
      const auto span = span_of(nb::cast<nb::bytes>(one));
      blocks.emplace_back(span.begin(), span.end());
    }
    return blocks;
  };
}

}  // namespace

void bind_group(nb::module_& m) {
  nb::class_<Group>(m, "Group", "The ranks that exchange tokens.")
      .def_static(
          "from_all_gather",
          [](int rank, int num_ranks, nb::callable all_gather) {
            AllGather function = all_gather_of(std::move(all_gather));
            const nb::gil_scoped_release no_gil;
            return Group::from_all_gather(rank, num_ranks, std::move(function));
          },
          nb::arg("rank"),
          nb::arg("num_ranks"),
          nb::arg("all_gather"),
          "Collective, over a function that swaps bytes between the ranks."
      )
      .def_prop_ro("rank", &Group::rank)
      .def_prop_ro("num_ranks", &Group::num_ranks)
      .def_prop_ro(
          "domains",
          [](const Group& group) { return group.topology().domains; },
          "Ranks of each domain: those that can map each other's memory."
      )
      .def(
          "all_gather",
          [](const Group& group, const nb::bytes& block) {
            const auto span = span_of(block);
            std::vector<Bytes> blocks;
            {
              const nb::gil_scoped_release no_gil;
              blocks = group.all_gather(span);
            }
            nb::list all;
            for (const Bytes& one : blocks) {
              all.append(bytes_of(one));
            }
            return all;
          },
          nb::arg("block"),
          "Collective, for set-up: the blocks of all ranks, by rank."
      );
}

}  // namespace weft::py
