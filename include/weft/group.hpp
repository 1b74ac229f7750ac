// SPDX-License-Identifier: Apache-2.0
// The ranks that exchange tokens, and how they first find each other.
#pragma once

#include <chrono>
#include <cstddef>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace weft {

using Bytes = std::vector<std::byte>;

// Returns the blocks of all ranks, by rank; all ranks call it in the same order.
using AllGather = std::function<std::vector<Bytes>(std::span<const std::byte>)>;

struct Rendezvous {
  int rank = 0;
  int num_ranks = 1;
  std::string address = "127.0.0.1";  // where rank 0 listens
  int port = 0;
  std::string secret =
      {};  // at least 16 bytes, the same on every rank; proves membership, never sent
  std::chrono::milliseconds timeout = std::chrono::seconds(60);
};

// Ranks grouped by what they can map of each other's memory. Same on every rank.
struct Topology {
  std::vector<int> domain_of;             // [num_ranks]
  std::vector<std::vector<int>> domains;  // ranks of each domain, ascending
  std::vector<std::string> host_of;       // [num_ranks]
  bool one_process = false;               // all ranks are threads of this process
};

struct Invitation;

class Group {
 public:
  // Makes a group per rank, each for one thread. Throws Error: num_ranks < 1.
  [[nodiscard]] static std::vector<Group> local(int num_ranks);
  // Makes a group from variables of torchrun, mpirun or srun (docs/launch.md lists them), of one
  // rank where none are set.
  [[nodiscard]] static Group from_env();
  // True if from_env() would make a group of several ranks.
  [[nodiscard]] static bool is_launched();
  // Connects the ranks over TCP. Throws TimeoutError naming missing ranks; Error for a wrong secret
  // or size, or a rank taken twice.
  [[nodiscard]] static Group connect(const Rendezvous& rendezvous);
  // Collective. Makes a group over a control plane that the caller has (MPI, torch store).
  [[nodiscard]] static Group from_all_gather(int rank, int num_ranks, AllGather all_gather);
  // Makes a group in the place of a rank that was lost (ExchangeConfig::on_peer_loss); `invitation`
  // is from Exchange::invitation() of a rank that is left. One exchange can be made with it, by the
  // same config as there; all_gather() throws. Throws Error: kInvalidArgument for a text that is no
  // invitation, kUnsupported on another host than that of a rank that shared memory with others.
  [[nodiscard]] static Group rejoin(int rank, std::string_view invitation);

  [[nodiscard]] int rank() const;
  [[nodiscard]] int num_ranks() const;
  [[nodiscard]] const Topology& topology() const;

  // Collective, for set-up; blocks until every rank has called, at most `timeout` of the rendezvous
  // (60 s).
  [[nodiscard]] std::vector<Bytes> all_gather(std::span<const std::byte> block) const;
  void barrier() const;

 private:
  struct State;
  explicit Group(std::shared_ptr<State> state) : state_(std::move(state)) {}
  friend Group make_group(int rank, int num_ranks, AllGather all_gather);
  friend Group part_of(const Group& group, const std::vector<int>& members);
  friend std::optional<Invitation> invitation_of(const Group& group);
  friend Group with_control(const Group& group, AllGather all_gather);
  std::shared_ptr<State> state_;
};

// Forks `num_ranks` processes, connects them over loopback with a fresh secret and runs `body` in
// each, rank 0 included. Returns each rank's exit status (128 + signal if killed); a body's
// exception is printed and becomes status 1. When one rank dies the others see PeerError; a rank
// still running some seconds later is terminated. SIGINT and SIGTERM are passed on, the second
// kills. When this process dies, so do the ranks. Call before starting threads.
[[nodiscard]] std::vector<int> run_forked(int num_ranks, const std::function<int(Group&)>& body);

// Runs `body` on one thread per rank. After all have ended, rethrows the first exception by rank, a
// PeerError only if there is nothing else. A rank that ends early leaves the group.
void run_threads(int num_ranks, const std::function<void(Group&)>& body);

}  // namespace weft
