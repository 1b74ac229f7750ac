// SPDX-License-Identifier: Apache-2.0
#include "cpu/protocol/call_board.hpp"

#include <algorithm>
#include <cstring>
#include <string>

namespace weft {

std::vector<CallWord> CallBoard::swap(
    std::span<const CallWord> words, std::span<const std::byte> payload
) {
  post(words, payload);
  const CallWord& own = words[static_cast<size_t>(context_.rank)];
  std::vector<CallWord> all = collect(own);
  waiter_.check_interrupts({.op = op_name(own.op), .call = call_, .what = "handshake"});
  compare(all);
  return all;
}

void CallBoard::refuse(Op op, const Refusal& reason) {
  CallWord word;
  word.call = call_;
  word.op = op;
  word.is_refused = 1;
  word.refusal = reason;
  const std::vector<CallWord> words(static_cast<size_t>(context_.num_ranks), word);
  post(words, {});
  const std::vector<CallWord> all = collect(word);
  if (reason.is_for_room != 0 && !is_outgrown_) {
    compare(all);
  }
}

void CallBoard::post(std::span<const CallWord> words, std::span<const std::byte> payload) {
  const auto own = static_cast<uint64_t>(context_.rank);
  message_.resize(sizeof(CallWord) + payload.size());
  if (!payload.empty()) {
    std::memcpy(message_.data() + sizeof(CallWord), payload.data(), payload.size());
  }
  const uint64_t offset = map_.call_offset(call_, own);
  for (int step = 0; step < context_.num_ranks; ++step) {
    const int rank = (context_.rank + step) % context_.num_ranks;
    if (is_lost_(rank)) {
      continue;
    }
    std::memcpy(message_.data(), &words[static_cast<size_t>(rank)], sizeof(CallWord));
    if (rank == context_.rank) {  // own word and payload, where payload() looks for them
      std::memcpy(control_ + offset, message_.data(), message_.size());
      continue;
    }
    const Put put = {
        .source = message_.data(),
        .bytes = message_.size(),
        .region = slots_[static_cast<size_t>(rank)],
        .signal = signals_.call(call_, own),
        .offset = offset};
    try {
      transport_.put(rank, {&put, 1});
    } catch (const Error&) {
      // No rank can write to a peer that has left; collect() says so, unless its word is here.
      if (transport_.peer_state(rank) == PeerState::kAlive) {
        throw;
      }
    }
  }
}

std::vector<Missing> CallBoard::words_of_others() const {
  std::vector<Missing> wanted;
  const uint64_t of_parity = (call_ - first_call_ + 1) / 2;  // calls so far
  for (int rank = 0; rank < context_.num_ranks; ++rank) {
    if (rank != context_.rank && !is_lost_(rank)) {
      wanted.push_back({.peer = rank, .signal = signals_.call(call_, rank), .wanted = of_parity});
    }
  }
  return wanted;
}

std::vector<int> CallBoard::late() const {
  std::vector<int> ranks;
  for (const Missing& one : words_of_others()) {
    if (transport_.signal_value(one.signal) < one.wanted) {
      ranks.push_back(one.peer);
    }
  }
  return ranks;
}

std::vector<CallWord> CallBoard::collect(const CallWord& own) {
  waiter_.until_raised(
      {.op = op_name(own.op), .call = call_, .what = "handshake"}, words_of_others()
  );
  std::vector<CallWord> words(static_cast<size_t>(context_.num_ranks));
  for (size_t rank = 0; rank < words.size(); ++rank) {
    if (is_lost_(static_cast<int>(rank))) {
      words[rank].call = own.call;
      words[rank].op = own.op;
      words[rank].signature = own.signature;
    } else {
      std::memcpy(&words[rank], control_ + map_.call_offset(call_, rank), sizeof(CallWord));
    }
  }
  const auto is_refused = [](const CallWord& word) { return word.is_refused != 0; };
  is_outgrown_ = std::ranges::any_of(words, is_refused) &&
                 std::ranges::all_of(words, [&](const CallWord& word) {
                   const bool is_same = word.op == Op::kPlan && word.call == call_;
                   return is_same && (!is_refused(word) || word.refusal.is_for_room != 0);
                 });
  return words;
}

void CallBoard::compare(std::span<const CallWord> words) const {
  const CallWord& own = words[static_cast<size_t>(context_.rank)];
  const auto require = [&](bool is_same, const auto& problem) {
    WEFT_CHECK_ARG(context_, is_same, "{}: {}", op_name(own.op), problem());
  };
  for (size_t rank = 0; rank < words.size(); ++rank) {
    const CallWord& other = words[rank];
    require(other.op == own.op, [&] {
      const std::string_view theirs = op_name(other.op);
      return fmt::format(
          "rank {} calls {} (all ranks make the same calls in the same order; this is call {})",
          rank,
          theirs,
          own.call
      );
    });
    require(other.call == own.call, [&] {
      return fmt::format("rank {} is in call {} (this is call {})", rank, other.call, own.call);
    });
    if (own.is_refused != 0 && (other.is_refused == 0 || other.refusal.is_for_room != 0)) {
      continue;
    }
    require(other.is_refused == 0, [&] {
      return fmt::format("rank {} refused the call: {}", rank, other.refusal.text());
    });
    for (size_t i = 0; i < kSignatureWords; ++i) {
      const int64_t mine = own.signature.words[i];
      const int64_t theirs = other.signature.words[i];
      require(mine == theirs, [&] { return difference_text(own.op, i, mine, theirs, rank); });
    }
  }
}

std::span<const std::byte> CallBoard::payload(int rank) const {
  const uint64_t offset = map_.call_offset(call_, static_cast<uint64_t>(rank)) + sizeof(CallWord);
  return {control_ + offset, map_.payload_bytes};
}

}  // namespace weft
