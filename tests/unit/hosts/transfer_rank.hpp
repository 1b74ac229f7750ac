// SPDX-License-Identifier: Apache-2.0
// One rank that moves messages over a real transport. Every rank has an area for each peer in its
// region and signals for the peer's messages; a byte of a message follows from who sends it to
// whom, in which call, and where it lies.
#pragma once

#include <gtest/gtest.h>

#include <atomic>
#include <cstring>
#include <functional>
#include <memory>
#include <thread>
#include <vector>

#include "hosts/message_transfer.hpp"
#include "support/memory.hpp"
#include "weft/group.hpp"

namespace weft::test {

// Messages of three rows of 44 bytes, with a gap between them.
inline constexpr MessageFormat kChunk = {
    .row_bytes = 32, .weight_bytes = 8, .scale_bytes = 4, .rows = 3};
inline constexpr int64_t kMaxMessages = 8;

class TransferRank {
 public:
  TransferRank(
      const Group& group,
      std::string_view transport,
      std::chrono::milliseconds timeout = std::chrono::seconds(60)
  )
      : rank_(group.rank()),
        num_ranks_(group.num_ranks()),
        settled_(static_cast<size_t>(num_ranks_ * kMaxMessages)),
        transport_(make_transport(transport, group, first_signal(2 * num_ranks_))),
        context_{.rank = rank_, .num_ranks = num_ranks_, .transport = transport},
        waiter_(*transport_, context_, timeout, first_signal(num_ranks_)),
        timeout_(timeout),
        region_(transport_->allocate(static_cast<size_t>(num_ranks_) * kAreaBytes)),
        messages_(region_.ref.bytes),
        done_(settled_.size()) {
    clear();
    for (const Bytes& block : group.all_gather(std::as_bytes(std::span(&region_.ref, 1)))) {
      RegionRef ref;
      std::memcpy(&ref, block.data(), sizeof ref);
      transport_->import(static_cast<int>(refs_.size()), ref);
      refs_.push_back(ref);
    }
    group.barrier();
  }

  Transport& transport() { return *transport_; }
  // Forgets what has come.
  void clear() { std::memset(region_.data, static_cast<int>(kCanary), region_.ref.bytes); }

  [[nodiscard]] MessageSend send_to(int peer, int64_t count, uint32_t call) {
    const auto area = static_cast<uint64_t>(peer) * kAreaBytes;
    return {
        .to = peer,
        .count = count,
        .target =
            {.region = refs_[static_cast<size_t>(peer)],
             .offset = static_cast<uint64_t>(rank_) * kAreaBytes},
        .first_signal = first_signal(rank_),
        .messages = messages_.data() + area,
        .done = done_.data() + first_signal(peer),
        .number = call};
  }
  [[nodiscard]] MessageReceive receive_from(int peer, int64_t count) const {
    return {.from = peer, .count = count, .first_signal = first_signal(peer)};
  }

  // Packs message `c` as the GPU does, from another thread.
  void pack_message(const MessageSend& send, int64_t c) {
    const int64_t bytes = kChunk.num_rows(c, send.count) * kChunk.token_bytes();
    for (int64_t i = 0; i < bytes; ++i) {
      const int64_t at = c * kChunk.stride() + i;
      const_cast<std::byte*>(send.messages)[at] = byte_of(rank_, send.to, send.number, at);
    }
    std::atomic_ref(const_cast<uint32_t&>(send.done[c]))
        .store(send.number, std::memory_order_release);
  }
  // All messages, of one peer after the other or of all in turn.
  void pack(std::span<const MessageSend> sends, bool in_turn) {
    for (int64_t step = 0; step < (in_turn ? kMaxMessages : 1); ++step) {
      for (const MessageSend& send : sends) {
        const int64_t last = kChunk.num_chunks(send.count);
        for (int64_t c = in_turn ? step : 0; c < (in_turn ? std::min(step + 1, last) : last); ++c) {
          pack_message(send, c);
          std::this_thread::yield();
        }
      }
    }
  }

  void run(
      std::span<const MessageSend> sends,
      std::span<const MessageReceive> receives,
      const std::function<void(size_t, int64_t)>& take,
      const std::function<void()>& look = [] {}
  ) {
    const MessageTransfer::Owner owner = {*transport_, waiter_, settled_, context_, timeout_};
    MessageTransfer(owner, kChunk, {.op = "dispatch", .call = 7, .what = "rows"})
        .run(sends, receives, take, look);
  }

  void expect_message(const MessageReceive& receive, int64_t c, uint32_t call) const {
    const int64_t first = c * kChunk.stride();
    const int64_t bytes = kChunk.num_rows(c, receive.count) * kChunk.token_bytes();
    for (int64_t at = first; at < first + bytes; ++at) {
      ASSERT_EQ(area(receive.from)[at], byte_of(receive.from, rank_, call, at))
          << "byte " << at << " from rank " << receive.from << " in call " << call;
    }
  }
  // All its messages, and nothing beside them.
  void expect_area(const MessageReceive& receive, uint32_t call) const {
    std::vector<bool> is_message(kAreaBytes);
    for (int64_t c = 0; c < kChunk.num_chunks(receive.count); ++c) {
      expect_message(receive, c, call);
      const int64_t bytes = kChunk.num_rows(c, receive.count) * kChunk.token_bytes();
      std::fill_n(is_message.begin() + c * kChunk.stride(), bytes, true);
    }
    for (size_t at = 0; at < kAreaBytes; ++at) {
      ASSERT_TRUE(is_message[at] || area(receive.from)[at] == kCanary) << "byte " << at;
    }
  }

 private:
  static constexpr uint64_t kAreaBytes = static_cast<uint64_t>(kChunk.stride() * kMaxMessages);

  static uint32_t first_signal(int peer) { return static_cast<uint32_t>(peer * kMaxMessages); }
  static std::byte byte_of(int from, int to, uint32_t call, int64_t at) {
    return static_cast<std::byte>((from * 31 + to * 17 + at * 7 + at / 192 + call) % 151);
  }
  [[nodiscard]] const std::byte* area(int peer) const {
    return region_.data + static_cast<uint64_t>(peer) * kAreaBytes;
  }

  int rank_;
  int num_ranks_;
  std::vector<uint64_t> settled_;
  std::unique_ptr<Transport> transport_;
  Context context_;
  Waiter waiter_;
  std::chrono::milliseconds timeout_;
  Region region_;
  std::vector<RegionRef> refs_;      // [num_ranks]
  std::vector<std::byte> messages_;  // by peer
  std::vector<uint32_t> done_;
};

}  // namespace weft::test
