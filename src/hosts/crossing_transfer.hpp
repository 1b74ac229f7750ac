// SPDX-License-Identifier: Apache-2.0
// Messages between this rank and other domains, in both directions at once, by the calling thread:
// each is put as soon as it is packed and handed over as soon as it has come.
#pragma once

#include <chrono>
#include <functional>
#include <span>
#include <vector>

#include "core/check.hpp"
#include "cpu/protocol/call_board.hpp"
#include "cpu/protocol/waiter.hpp"
#include "hosts/crossing_chunk.hpp"
#include "transport/transport.hpp"

namespace weft {

// `count` rows to a peer. Message c raises `first_signal` + c there.
struct CrossingSend {
  int to = 0;
  int64_t count = 0;
  Target target;
  uint32_t first_signal = 0;
  const std::byte* messages = nullptr;  // c at c * chunk.stride()
  const uint32_t* done = nullptr;       // [num chunks] is `number` once a message is packed
  uint32_t number = 0;
};

struct CrossingReceive {
  int from = 0;
  int64_t count = 0;
  uint32_t first_signal = 0;
};

class CrossingTransfer {
 public:
  struct Owner {
    Transport& transport;
    Waiter& waiter;
    std::vector<uint64_t>& settled;  // see CpuRank
    const Context& context;
    std::chrono::milliseconds timeout;
  };

  CrossingTransfer(const Owner& owner, const CrossingChunk& chunk, const WaitReason& reason)
      : owner_(owner), chunk_(chunk), reason_(reason) {}

  // Until all has passed. `take(i, c)`: message c of receive i is here; in order for each i.
  // `look()` is called now and then during waits and throws what has gone wrong elsewhere. Throws
  // TimeoutError and PeerError.
  void run(
      std::span<const CrossingSend> sends,
      std::span<const CrossingReceive> receives,
      const std::function<void(size_t, int64_t)>& take,
      const std::function<void()>& look
  );

 private:
  [[nodiscard]] bool is_packed(size_t i) const;
  [[nodiscard]] bool has_come(size_t i) const;
  [[nodiscard]] uint64_t wanted(size_t i) const;
  [[nodiscard]] bool is_sent() const;
  [[nodiscard]] bool is_received() const;
  bool send_packed();
  bool take_arrived(const std::function<void(size_t, int64_t)>& take);
  void await_packing(const std::function<void()>& look);
  void await_arrival(const std::function<void()>& look);
  [[nodiscard]] std::vector<Missing> missing() const;

  Owner owner_;
  CrossingChunk chunk_;
  WaitReason reason_;
  std::span<const CrossingSend> sends_;
  std::span<const CrossingReceive> receives_;
  std::vector<int64_t> next_send_;
  std::vector<int64_t> next_receive_;
  std::chrono::steady_clock::time_point last_move_;
};

}  // namespace weft
