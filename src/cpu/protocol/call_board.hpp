// SPDX-License-Identifier: Apache-2.0
// Every collective call starts here: each rank tells each other rank what it is about to do and
// where to write, and no rank writes before it has heard from all. That is the barrier, the
// signature check and the address exchange in one message.
//
// A rank that must refuse its caller's arguments still posts its word, marked so, and still hears
// everyone out: call numbers stay equal on all ranks and the exchange stays usable.
//
// Two parities suffice: rank p posts call n + 2 only after it finished n + 1, hence after it read
// my word of n + 1, which I posted after reading all words of n.
#pragma once

#include <cstdint>
#include <span>
#include <string_view>
#include <utility>
#include <vector>

#include "call/signature.hpp"
#include "cpu/protocol/region_map.hpp"
#include "cpu/protocol/waiter.hpp"
#include "plan/without.hpp"
#include "transport/transport.hpp"

namespace weft {

// Place that a peer writes to: offset + row * row bytes, the row by `place`.
struct Target {
  RegionRef region = {};  // generation 0: nothing of this kind travels
  uint64_t offset = 0;
  Place place = Place::kStaging;
};

// Trivially copyable; lies in shared memory.
struct CallWord {
  uint64_t call = 0;
  Op op = Op::kPlan;
  uint32_t is_refused = 0;
  Signature signature;  // must be equal on all ranks
  int64_t num_tokens = 0;
  int64_t row_budget = -1;
  Target rows;            // dispatch: rows; combine: partial sums
  Target scales;          // dispatch
  Target weights;         // both, one float per route
  Target source_weights;  // combine with kSourceWeights, one float per route
  Target own_rows;        // combine: this rank's rows, for the receiver of the word to read itself
  Refusal refusal;
};

class CallBoard {
 public:
  // `control` is this rank's control region, zeroed; every rank's is imported under slots[rank].
  // `num_calls` were made before, whose signals do not count here. Words of ranks that are lost are
  // as those of ranks without tokens.
  CallBoard(
      Transport& transport,
      Waiter& waiter,
      const Context& context,
      const ControlMap& map,
      const SignalMap& signals,
      std::byte* control,
      std::vector<uint32_t> slots,
      uint64_t num_calls = 0,
      IsLost is_lost = none_is_lost
  )
      : transport_(transport),
        waiter_(waiter),
        context_(context),
        map_(map),
        signals_(signals),
        control_(control),
        slots_(std::move(slots)),
        is_lost_(std::move(is_lost)),
        first_call_(num_calls),
        call_(num_calls) {}

  // Number of the call that began last.
  [[nodiscard]] uint64_t last_call() const { return call_; }

  // Number of the call that begins now, from 1.
  uint64_t next_call() {
    is_outgrown_ = false;
    return ++call_;
  }

  // Posts words[r] (and the payload) to each rank r and waits for theirs; returns them by rank,
  // this rank's own included. Throws if any rank refused, does another operation, or has another
  // signature.
  [[nodiscard]] std::vector<CallWord> swap(
      std::span<const CallWord> words, std::span<const std::byte> payload
  );
  // Returns what `rank` sent behind its word of this call. Valid until the next call but one.
  [[nodiscard]] std::span<const std::byte> payload(int rank) const;

  // Posts a refusal, waits for the others as swap() does, and returns; the caller throws its own
  // error. A refusal for want of room throws what else was wrong on others.
  void refuse(Op op, const Refusal& reason);

  // True if the last call was a plan to which all ranks came, at least one refused it, and every
  // refusal was for want of room.
  [[nodiscard]] bool is_outgrown() const { return is_outgrown_; }

  // Ranks that have not begun the call that this one is in, ascending.
  [[nodiscard]] std::vector<int> late() const;

 private:
  friend struct CpuInside;  // for tests

  void post(std::span<const CallWord> words, std::span<const std::byte> payload);
  [[nodiscard]] std::vector<CallWord> collect(const CallWord& own);
  void compare(std::span<const CallWord> words) const;
  // The words of this call that others post here.
  [[nodiscard]] std::vector<Missing> words_of_others() const;

  Transport& transport_;
  Waiter& waiter_;
  Context context_;
  ControlMap map_;
  SignalMap signals_;
  std::byte* control_;
  std::vector<uint32_t> slots_;
  IsLost is_lost_;
  uint64_t first_call_;  // before those that signals of this board count
  uint64_t call_;
  bool is_outgrown_ = false;
  std::vector<std::byte> message_;
};

}  // namespace weft
