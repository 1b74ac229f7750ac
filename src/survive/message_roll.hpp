// SPDX-License-Identifier: Apache-2.0
// A roll of ranks that share no memory: they tell each other by messages (links.hpp) that they have
// arrived at a call, and vote on who is a member (ballots.hpp). A thread of each rank hears and
// answers for it, whatever the rank does meanwhile. If that thread fails, for want of memory say,
// this rank leaves the others, and its next beat() or sleep() says why.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <map>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "core/clock.hpp"
#include "survive/ballots.hpp"
#include "survive/links.hpp"
#include "survive/roll.hpp"

namespace weft {

class MessageRoll final : public Roll {
 public:
  // Collective. Throws the same Error on every rank if they cannot connect.
  MessageRoll(const Group& group, std::chrono::milliseconds timeout);
  // Makes the roll of a rank that joins again, no member until the members take it in. Throws Error
  // (kNotAvailable, kTimeout) if no rank answers, or its earlier life is still a member.
  MessageRoll(const Group& group, const Invitation& invitation, std::chrono::milliseconds timeout);
  ~MessageRoll() override;
  MessageRoll(const MessageRoll&) = delete;
  MessageRoll& operator=(const MessageRoll&) = delete;

  [[nodiscard]] uint64_t epoch() const override { return epoch_.load(std::memory_order_acquire); }
  void beat() override;
  [[nodiscard]] uint64_t beats(int rank) const override;
  [[nodiscard]] bool has_ended(int rank) const override;
  [[nodiscard]] bool has_left(int rank) const override;
  [[nodiscard]] uint32_t doorbell() const override {
    return doorbell_.load(std::memory_order_acquire);
  }
  void sleep(uint32_t seen, std::chrono::nanoseconds at_most) override;

  [[nodiscard]] Members members() const override;
  [[nodiscard]] bool is_in(const Members& members) const override;
  void follow(const Members& /*members*/) override {}
  [[nodiscard]] uint64_t committed() const override {
    return committed_.load(std::memory_order_acquire);
  }
  void leave() override;
  void arrive(const Members& with, uint64_t call) override;
  [[nodiscard]] bool has_arrived(int rank, const Members& with, uint64_t call) const override;
  [[nodiscard]] bool is_awaited(int rank, const Members& with, uint64_t call) const override;
  [[nodiscard]] bool commits(const Members& with, uint64_t call) override;
  void propose(const Members& instead_of, uint64_t call, std::span<const int> ranks) override;
  void post(uint64_t epoch, uint64_t round, std::span<const std::byte> block) override;
  [[nodiscard]] std::optional<Bytes> mail(int rank, uint64_t epoch, uint64_t round) const override;

  void invite(Invitation& invitation) const override;
  void be_next(const Members& /*members*/) override {}  // this roll is so from the beginning
  void ask(bool is_asking) override;
  [[nodiscard]] bool is_turned_away() const override;
  [[nodiscard]] bool asks(int rank) const override;

 private:
  using MailNumber = std::pair<uint64_t, uint64_t>;  // epoch, round
  using Said = std::pair<int, std::vector<Frame>>;   // rank, what came from it
  struct Peer {
    uint64_t beats = 0;
    bool has_left = false;
    bool has_died = false;                          // as another rank has proven
    std::optional<Clock::time_point> silent_since;  // since this rank proposed to go on without it
    std::map<MailNumber, Bytes> mail;
    // A later life in the rank's place that wants to be taken in, and its frames until it is.
    uint64_t next_life = 0;
    bool next_asks = false;
    std::vector<Frame> next_frames;
  };

  // State that a roll begins with.
  struct Start {
    Links links;
    uint64_t life = 0;
    Agreed agreed;
  };
  MessageRoll(const Context& context, std::chrono::milliseconds timeout, Start start);
  [[nodiscard]] static Start begin(const Group& group, std::chrono::milliseconds timeout);
  [[nodiscard]] static Start join(
      const Group& group, const Invitation& invitation, std::chrono::milliseconds timeout
  );

  // Runs the thread of this rank's links.
  void run();
  void listen();
  // Throws Error if that thread has failed.
  void check_listens() const;
  void hear(int rank, uint64_t life, const Frame& frame);
  void hear_member(int rank, const Frame& frame);
  void tell_beats();
  // All from here on is called with mutex_ held.
  [[nodiscard]] Peer& peer(int rank) { return peers_[static_cast<size_t>(rank)]; }
  [[nodiscard]] const Peer& peer(int rank) const { return peers_[static_cast<size_t>(rank)]; }
  [[nodiscard]] bool has_ended_here(int rank) const;
  [[nodiscard]] bool asks_here(int rank) const;
  [[nodiscard]] uint64_t set() const;
  void tell_all(FrameKind kind, std::span<const std::byte> payload);
  void tell(const Ballots::News& news);
  // Takes over the members' new lives, and dismisses ranks that are no members. Returns the frames
  // that the new lives have sent before.
  [[nodiscard]] std::vector<Said> take_lives();
  [[nodiscard]] std::vector<Frame> take_life(int rank, uint64_t life);
  // Returns what has been agreed on, and where all ranks can be reached.
  [[nodiscard]] Bytes welcome() const;
  void ring();

  Context context_;
  std::chrono::nanoseconds beat_every_;
  std::atomic<uint64_t> own_beats_ = 0;
  std::atomic<uint32_t> doorbell_ = 0;
  std::atomic<uint64_t> epoch_ = 0;      // of ballots_.agreed()
  std::atomic<uint64_t> committed_ = 0;  // likewise
  std::atomic<bool> is_stopping_ = false;
  std::atomic<bool> has_failed_ = false;
  std::exception_ptr failure_;  // once has_failed_

  uint64_t life_;  // of this rank

  mutable std::mutex mutex_;
  std::condition_variable bell_;
  Links links_;
  Ballots ballots_;
  std::vector<Peer> peers_;      // by rank
  std::vector<uint64_t> lives_;  // by rank, as links_ have them
  bool is_asking_ = false;
  uint64_t told_beats_ = 0;
  Clock::time_point next_beat_;
  std::thread thread_;  // last: it uses all of these
};

}  // namespace weft
