// SPDX-License-Identifier: Apache-2.0
// Messages between this rank and other domains, in both directions at once, by the calling thread:
// each is put as soon as it is packed and handed over as soon as it has come.
#pragma once

#include <algorithm>
#include <chrono>
#include <functional>
#include <span>
#include <vector>

#include "core/check.hpp"
#include "cpu/protocol/call_board.hpp"
#include "cpu/protocol/waiter.hpp"
#include "hosts/message_format.hpp"
#include "transport/transport.hpp"

namespace weft {

// `count` rows to a peer. Message c raises `first_signal` + c there.
struct MessageSend {
  int to = 0;
  int64_t count = 0;
  Target target;
  uint32_t first_signal = 0;
  const std::byte* messages = nullptr;  // c at c * format.stride()
  const uint32_t* done = nullptr;       // [num chunks] is `number` once a message is packed
  uint32_t number = 0;
};

struct MessageReceive {
  int from = 0;
  int64_t count = 0;
  uint32_t first_signal = 0;
};

class MessageTransfer {
 public:
  struct Owner {
    Transport& transport;
    Waiter& waiter;
    std::vector<uint64_t>& settled;  // see CpuRank
    const Context& context;
    std::chrono::milliseconds timeout;
  };

  MessageTransfer(const Owner& owner, const MessageFormat& format, const WaitReason& reason)
      : owner_(owner), format_(format), reason_(reason) {}

  // Until all has passed. `take(i, c)`: message c of receive i is here; in order for each i.
  // `look()` is called now and then during waits and throws what has gone wrong elsewhere. Throws
  // TimeoutError and PeerError.
  void run(
      std::span<const MessageSend> sends,
      std::span<const MessageReceive> receives,
      const std::function<void(size_t, int64_t)>& take,
      const std::function<void()>& look
  );

 private:
  [[nodiscard]] bool is_packed(size_t i) const;
  [[nodiscard]] bool has_come(size_t i) const;
  [[nodiscard]] uint64_t wanted(size_t i) const;
  // Messages of a send or receive, and whether the next one of each is behind the last.
  [[nodiscard]] int64_t num_messages(const auto& one) const {
    return format_.num_chunks(one.count);
  }
  [[nodiscard]] bool is_through(const auto& all, const std::vector<int64_t>& next) const {
    size_t i = 0;
    return std::ranges::all_of(all, [&](const auto& one) {
      return next[i++] == num_messages(one);
    });
  }
  [[nodiscard]] bool is_sent() const { return is_through(sends_, next_send_); }
  [[nodiscard]] bool is_any_packed() const;
  bool send_packed();
  bool take_arrived(const std::function<void(size_t, int64_t)>& take);
  void await_packing(const std::function<void()>& look);
  void await_arrival(const std::function<void()>& look);
  [[nodiscard]] std::vector<Missing> missing() const;

  Owner owner_;
  MessageFormat format_;
  WaitReason reason_;
  std::span<const MessageSend> sends_;
  std::span<const MessageReceive> receives_;
  std::vector<int64_t> next_send_;
  std::vector<int64_t> next_receive_;
  std::chrono::steady_clock::time_point last_move_;
};

}  // namespace weft
