// SPDX-License-Identifier: Apache-2.0
#include <exception>
#include <thread>
#include <vector>

#include "core/log.hpp"
#include "weft/error.hpp"
#include "weft/group.hpp"

namespace weft {
namespace {

bool is_peer_error(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const PeerError&) {
    return true;
  } catch (...) {
    return false;
  }
}

// The cause rather than its echo on the other ranks.
std::exception_ptr first_cause(const std::vector<std::exception_ptr>& errors) {
  std::exception_ptr first;
  for (const std::exception_ptr& error : errors) {
    if (error && !is_peer_error(error)) {
      return error;
    }
    first = first ? first : error;
  }
  return first;
}

}  // namespace

void run_threads(int num_ranks, const std::function<void(Group&)>& body) {
  std::vector<Group> groups = Group::local(num_ranks);
  std::vector<std::exception_ptr> errors(groups.size());
  {
    std::vector<std::jthread> threads;
    for (size_t i = 0; i < groups.size(); ++i) {
      threads.emplace_back([&body, &error = errors[i], group = std::move(groups[i])]() mutable {
        Group own = std::move(group);  // gone when the body ends, so that no peer waits for it
        set_log_rank(own.rank(), own.num_ranks());
        try {
          body(own);
        } catch (...) {
          error = std::current_exception();
        }
      });
    }
  }
  if (const std::exception_ptr error = first_cause(errors)) {
    std::rethrow_exception(error);
  }
}

}  // namespace weft
