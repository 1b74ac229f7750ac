// SPDX-License-Identifier: Apache-2.0
// Ranks that are threads but meet over TCP on the loopback address.
#pragma once

#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "group/tcp/rendezvous.hpp"
#include "weft/error.hpp"
#include "weft/group.hpp"

namespace weft {

inline const std::string kTestSecret = "a secret of the tests";

// Outcome of one rank: the message of what it threw, empty if nothing.
struct Outcome {
  std::string error;
  ErrorCode code = ErrorCode::kInternal;
};

// A port that is open for rank 0 from the start, so that no other program takes it.
struct TestPort {
  Socket listener = listen_on("127.0.0.1", 0, {});
  int port = port_of(listener);

  [[nodiscard]] std::string place() const { return endpoint_text("127.0.0.1", port); }
};

inline Rendezvous rendezvous_of(
    int rank, int num_ranks, int port, std::chrono::milliseconds timeout = std::chrono::seconds(20)
) {
  Rendezvous rendezvous = {.rank = rank, .num_ranks = num_ranks, .port = port};
  rendezvous.secret = kTestSecret;
  rendezvous.timeout = timeout;
  return rendezvous;
}

// All ranks of a group of `num_ranks`.
inline std::vector<Rendezvous> rendezvous_of_all(
    int num_ranks, int port, std::chrono::milliseconds timeout = std::chrono::seconds(20)
) {
  std::vector<Rendezvous> all;
  for (int rank = 0; rank < num_ranks; ++rank) {
    all.push_back(rendezvous_of(rank, num_ranks, port, timeout));
  }
  return all;
}

// Connects one thread for each entry, of which the first is rank 0, and runs `body` on it.
inline std::vector<Outcome> run_connected(
    TestPort& port,
    const std::vector<Rendezvous>& ranks,
    const std::function<void(Group&)>& body = [](Group&) {}
) {
  std::vector<Outcome> outcomes(ranks.size());
  std::vector<std::jthread> threads;
  for (size_t i = 0; i < ranks.size(); ++i) {
    threads.emplace_back([&, i] {
      try {
        Group group = connect_group(ranks[i], i == 0 ? std::move(port.listener) : Socket());
        body(group);
      } catch (const Error& error) {
        outcomes[i] = {error.what(), error.code()};
      } catch (const std::exception& error) {
        outcomes[i] = {error.what(), ErrorCode::kInternal};
      }
    });
  }
  threads.clear();
  return outcomes;
}

}  // namespace weft
