// SPDX-License-Identifier: Apache-2.0
// weft._core: the C++ API with as little in between as possible. What torch needs is in Python.
// Here are its errors, groups over a function of Python that swaps bytes between the ranks
// (weft/group.py gives it), and orders as tuples (for weft/overlap).
#include <memory>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include "bind.hpp"
#include "core/float_state.hpp"
#include "weft/group.hpp"
#include "weft/overlap.hpp"
#include "weft/version.hpp"

#ifdef WEFT_HAS_PROGRAM
#include "commands.hpp"
#endif

namespace weft::py {

nb::object exception_of(const Error& error) {
  const nb::object made = nb::module_::import_("weft.errors").attr("of_core");
  const std::string_view text = error.what();  // of input, or cut in the middle of a letter
  const auto size = static_cast<Py_ssize_t>(text.size());
  const auto told = nb::steal(PyUnicode_DecodeUTF8(text.data(), size, "backslashreplace"));
  return made(told, error_code_name(error.code()), error.rank());
}

std::shared_ptr<nb::callable> held_of(nb::callable function) {
  const auto free = [](nb::callable* one) {
    const nb::gil_scoped_acquire gil;
    delete one;  // NOLINT(cppcoreguidelines-owning-memory): a deleter's way
  };
  return {new nb::callable(std::move(function)), free};
}

namespace {

using namespace overlap;

void translate(const std::exception_ptr& thrown, void* /*unused*/) {
  try {
    std::rethrow_exception(thrown);
  } catch (const Error& error) {
    if (error.code() == ErrorCode::kInterrupted && PyErr_Occurred() != nullptr) {
      return;  // what a signal's handler raised while the call waited
    }
    const nb::object value = exception_of(error);
    PyErr_SetObject(value.type().ptr(), value.ptr());
  }
}

std::span<const std::byte> span_of(const nb::bytes& bytes) {
  return {static_cast<const std::byte*>(bytes.data()), bytes.size()};
}

nb::bytes bytes_of(std::span<const std::byte> block) {
  return nb::bytes(block.data(), block.size());
}

// `function`: bytes -> list of bytes by rank, called by this thread alone.
AllGather all_gather_of(nb::callable callable) {
  return [function = held_of(std::move(callable))](std::span<const std::byte> block) {
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
      .def_static(
          "rejoin",
          &Group::rejoin,
          nb::arg("rank"),
          nb::arg("invitation"),
          "In the place of a rank that was lost."
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

using Stage = std::optional<std::pair<int, int>>;

Stage tuple_of(const std::optional<VirtualStage>& stage) {
  return stage ? Stage({stage->micro_batch, stage->chunk}) : std::nullopt;
}

void bind_overlap(nb::module_& m) {
  m.def(
      "pair_order",
      [](std::optional<int> forward_layers, std::optional<int> backward_layers, bool early) {
        std::vector<std::tuple<bool, std::string_view, std::string_view, int>> steps;
        for (const PairStep& step : pair_order({forward_layers, backward_layers, early})) {
          const auto action = kActionNames[static_cast<size_t>(step.action)];
          steps.emplace_back(step.is_backward, action, node_name(step.node), step.layer);
        }
        return steps;
      },
      nb::arg("forward_layers").none(),
      nb::arg("backward_layers").none(),
      nb::arg("early_attention_release"),
      "The steps of two micro-batches: is_backward, action, node, layer (-1: of no layer)."
  );
  m.def(
      "pipeline_order",
      [](int rank, int num_ranks, int num_chunks, int num_micro_batches) {
        std::vector<std::pair<Stage, Stage>> pairs;
        for (const auto& [forward, backward] :
             pipeline_order({rank, num_ranks, num_chunks, num_micro_batches})) {
          pairs.emplace_back(tuple_of(forward), tuple_of(backward));
        }
        return pairs;
      },
      nb::arg("rank"),
      nb::arg("num_ranks"),
      nb::arg("num_chunks"),
      nb::arg("num_micro_batches"),
      "Pairs of a forward and a backward: micro-batch and chunk of each, or None."
  );
  nb::dict lanes;  // by node, in the order in which a micro-batch passes them
  for (size_t idx = 0; idx < kNodeNames.size(); ++idx) {
    lanes[nb::cast(kNodeNames[idx])] = lane_name(lane_of(static_cast<NodeKind>(idx)));
  }
  m.attr("NODE_LANES") = lanes;
  m.def(
      "overlapped_sms",
      &overlapped_sms,
      nb::arg("num_gpu_sms"),
      nb::arg("is_copied_dispatch"),
      "Multiprocessors of a call that shares its GPU with computation."
  );
  m.def(
      "overlapped_copies",
      &overlapped_copies,
      nb::arg("hidden"),
      nb::arg("num_ranks"),
      "Whether copy engines carry the rows of a call that shares its GPU with computation."
  );
}

void bind_floats(nb::module_& m) {
  m.def(
      "with_standard_floats",
      [](const nb::callable& function, const nb::args& args, const nb::kwargs& options) {
        const StandardFloats floats;
        return function(*args, **options);
      },
      nb::arg("function"),
      nb::arg("args"),
      nb::arg("kwargs"),
      "function(*args, **kwargs) in this thread, which rounds to nearest and keeps subnormal "
      "numbers meanwhile."
  );
}

void bind_program([[maybe_unused]] nb::module_& m) {
#ifdef WEFT_HAS_PROGRAM
  m.def(
      "run_program",
      [](std::vector<std::string> words) {
        std::vector<char*> argv;
        for (std::string& word : words) {
          argv.push_back(word.data());
        }
        argv.push_back(nullptr);
        const nb::gil_scoped_release no_gil;
        return program::run_weft(static_cast<int>(words.size()), argv.data());
      },
      nb::arg("words"),
      "The program `weft` with this command line, its name first; returns the exit code. It takes "
      "signals and the standard streams for its own, and forks: weft/program.py runs it."
  );
#endif
}

}  // namespace

}  // namespace weft::py

NB_MODULE(_core, m) {
  m.doc() = "The C++ API of Weft.";
  // torch lets go of no autograd function once the interpreter ends, nor of the plan that it holds.
  nanobind::set_leak_warnings(false);
  m.attr("__version__") = weft::version().data();  // a literal: ends with 0
  nanobind::register_exception_translator(weft::py::translate);
  weft::py::bind_group(m);
  weft::py::bind_plan(m);
  weft::py::bind_exchange(m);
  weft::py::bind_checks(m);
  weft::py::bind_placement(m);
  weft::py::bind_routing(m);
  weft::py::bind_overlap(m);
  weft::py::bind_balance(m);
  weft::py::bind_program(m);
  weft::py::bind_floats(m);
}
