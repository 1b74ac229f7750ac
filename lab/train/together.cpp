// SPDX-License-Identifier: Apache-2.0
#include "train/together.hpp"

#include <cstring>
#include <string>
#include <string_view>

#include "core/check.hpp"
#include "group/control_plane.hpp"

namespace weft::moe {
namespace {

struct Outcome {
  uint64_t result = 0;
  ErrorCode code = ErrorCode::kInternal;
  bool has_failed = false;
};

// Without the place, since the error is thrown again elsewhere.
std::string problem_of(const Error& error) {
  const std::string_view message = error.what();
  const std::string place = " at " + error.where();
  const size_t kept = message.size() - (message.ends_with(place) ? place.size() : 0);
  return std::string(message.substr(0, kept));
}

}  // namespace

std::vector<uint64_t> together(const Group& group, const std::function<uint64_t()>& work) {
  Outcome own;
  std::string message;
  try {
    own.result = work();
  } catch (const Error& error) {
    own.code = error.code();
    own.has_failed = true;
    message = problem_of(error);
  }
  Bytes block(sizeof(own) + message.size());
  std::memcpy(block.data(), &own, sizeof(own));
  std::memcpy(block.data() + sizeof(own), message.data(), message.size());

  std::vector<uint64_t> results;
  for (const Bytes& other : group.all_gather(block)) {
    const auto outcome =
        block_value<Outcome>(other, results.size(), {group.rank(), group.num_ranks()});
    if (outcome.has_failed) {
      const auto* text = reinterpret_cast<const char*>(other.data()) + sizeof(outcome);
      std::string problem(text, other.size() - sizeof(outcome));
      if (static_cast<int>(results.size()) != group.rank()) {
        problem += fmt::format(" on rank {}", results.size());
      }
      raise_error(outcome.code, {group.rank(), group.num_ranks()}, problem);
    }
    results.push_back(outcome.result);
  }
  return results;
}

}  // namespace weft::moe
