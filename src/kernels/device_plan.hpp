// SPDX-License-Identifier: Apache-2.0
// A plan as it lies in device memory: one block of fixed size per exchange, in a region that peers
// map, so that sources write their arrival records straight into the receiver's plan.
//
// Arrivals are numbered in token order per (source, receiver) pair, dropped ones included; an
// arrival all of whose routes are dropped has a record with no rows.
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/hd.hpp"
#include "kernels/device_control.hpp"

namespace weft {

struct PlanHeader {
  uint32_t epoch = 0;  // of the call that made it
  int32_t num_tokens = 0;
  int32_t overflow = 0;
  int32_t short_rank = -1;  // first rank whose row budget is too small, -1 = none
  int64_t num_rows = 0;
  int64_t required_rows = 0;
  int64_t expert_stride = 0;  // resolved; 0 unless expert_strided
  int64_t short_rows = 0;     // that rank's budget
  int64_t short_needs = 0;    // rows it would need
  int64_t padding = 0;
};

// One arrival on its receiver.
struct ArrivalHead {
  int32_t token = 0;       // on the source
  int32_t num_routes = 0;  // kept; 0: dropped as a whole
  int32_t return_row =
      0;  // of combine's partial sum in the source's staging: token * min(num_ranks,
          // topk) + the arrival's place among the token's, ascending rank
  int32_t padding = 0;
};

// Offsets of every array in a plan block. `T` is max_tokens, `K` max_topk: strides do not depend on
// the call. [...] are the extents in elements.
struct PlanMap {
  uint32_t num_ranks = 1;
  uint32_t num_experts = 1;
  uint32_t max_tokens = 1;
  uint32_t max_topk = 1;

  [[nodiscard]] WEFT_HD static constexpr uint64_t align(uint64_t bytes) {
    return (bytes + 127) / 128 * 128;
  }
  [[nodiscard]] WEFT_HD constexpr uint64_t routes() const {
    return static_cast<uint64_t>(max_tokens) * max_topk;
  }
  [[nodiscard]] WEFT_HD constexpr uint64_t pairs() const {
    return static_cast<uint64_t>(max_tokens) * num_ranks;
  }

  // --- shape of this rank's output and of the group ---
  [[nodiscard]] WEFT_HD constexpr uint64_t header() const { return 0; }
  // int64 [num_local_experts] each, as in Plan; with rank_major `rows` counts dropped routes too.
  [[nodiscard]] WEFT_HD constexpr uint64_t rows_per_expert() const {
    return align(sizeof(PlanHeader));
  }
  [[nodiscard]] WEFT_HD constexpr uint64_t expert_bytes() const {
    return align(sizeof(int64_t) * (num_experts / num_ranks));
  }
  [[nodiscard]] WEFT_HD constexpr uint64_t padded_rows_per_expert() const {
    return rows_per_expert() + expert_bytes();
  }
  [[nodiscard]] WEFT_HD constexpr uint64_t expert_begin() const {
    return padded_rows_per_expert() + expert_bytes();
  }
  // int64 [num_experts] routes of all ranks, before dropping.
  [[nodiscard]] WEFT_HD constexpr uint64_t global_routes() const {
    return expert_begin() + expert_bytes();
  }
  // int32 [num_ranks] tokens of each rank.
  [[nodiscard]] WEFT_HD constexpr uint64_t tokens_of() const {
    return global_routes() + align(sizeof(int64_t) * num_experts);
  }
  // int32 [num_ranks] arrivals from each source to this rank, dropped ones included.
  [[nodiscard]] WEFT_HD constexpr uint64_t received() const {
    return tokens_of() + align(sizeof(int32_t) * num_ranks);
  }
  // int32 [num_ranks] arrivals to each receiver from ranks before this one: where this rank's
  // begin in that receiver's staging.
  [[nodiscard]] WEFT_HD constexpr uint64_t arrival_base() const {
    return received() + align(sizeof(int32_t) * num_ranks);
  }
  // int32 [num_ranks] arrivals from each source, summed over the sources before it: where they
  // begin in this rank's staging.
  [[nodiscard]] WEFT_HD constexpr uint64_t received_base() const {
    return arrival_base() + align(sizeof(int32_t) * num_ranks);
  }

  // What the host reads in exact mode lies before this offset.
  [[nodiscard]] WEFT_HD constexpr uint64_t shape_bytes() const {
    return received_base() + align(sizeof(int32_t) * num_ranks);
  }

  // --- this rank's tokens; row stride K = max_topk even where the call's topk is smaller ---
  // int32 [T, K] expert and slot of each route, -1 = none (slot: or dropped).
  [[nodiscard]] WEFT_HD constexpr uint64_t route_expert() const { return shape_bytes(); }
  [[nodiscard]] WEFT_HD constexpr uint64_t route_slot() const {
    return route_expert() + align(sizeof(int32_t) * routes());
  }
  // float [T, K] weights, if the routing carried any.
  [[nodiscard]] WEFT_HD constexpr uint64_t route_weight() const {
    return route_slot() + align(sizeof(int32_t) * routes());
  }
  // int32 [T, num_ranks] smallest slot of the token on each rank, -1 = none kept there.
  [[nodiscard]] WEFT_HD constexpr uint64_t primary() const {
    return route_weight() + align(sizeof(float) * routes());
  }
  // int32 [T, num_ranks] number of the arrival in its pair, -1 = the token has no route there.
  [[nodiscard]] WEFT_HD constexpr uint64_t arrival() const {
    return primary() + align(sizeof(int32_t) * pairs());
  }

  // --- arrivals on this rank, written by their sources ---
  // int32 [num_ranks][max_chunks + 1]: number of the first arrival of each chunk of the source's
  // tokens; entry num_device_chunks(tokens) closes the last.
  [[nodiscard]] WEFT_HD constexpr uint64_t chunk_stride() const {
    const uint32_t chunks = max_tokens <= 512 ? max_tokens : (max_tokens + 3) / 4;
    return align(sizeof(int32_t) * ((chunks < 512 ? 512 : chunks) + 1));
  }
  [[nodiscard]] WEFT_HD constexpr uint64_t chunk_begin(uint32_t source) const {
    return arrival() + align(sizeof(int32_t) * pairs()) + source * chunk_stride();
  }
  // ArrivalHead [num_ranks][T]
  [[nodiscard]] WEFT_HD constexpr uint64_t heads(uint32_t source) const {
    return chunk_begin(num_ranks) + source * align(sizeof(ArrivalHead) * max_tokens);
  }
  // Of the kept routes of each arrival, ascending slot (equal slots: ascending k), [num_ranks][T,
  // K]: int32 slot, float weight, int32 local expert << 8 | k.
  [[nodiscard]] WEFT_HD constexpr uint64_t slots(uint32_t source) const {
    return heads(num_ranks) + source * align(sizeof(int32_t) * routes());
  }
  [[nodiscard]] WEFT_HD constexpr uint64_t weights(uint32_t source) const {
    return slots(num_ranks) + source * align(sizeof(float) * routes());
  }
  [[nodiscard]] WEFT_HD constexpr uint64_t origins(uint32_t source) const {
    return weights(num_ranks) + source * align(sizeof(int32_t) * routes());
  }

  [[nodiscard]] WEFT_HD constexpr uint64_t num_bytes() const { return origins(num_ranks); }
};

// A plan block with typed access; `data` may be the block as mapped from a peer.
struct PlanView {
  std::byte* data = nullptr;
  PlanMap map;

  template <class T>
  [[nodiscard]] WEFT_HD T* at(uint64_t offset) const {
    return reinterpret_cast<T*>(data + offset);
  }
  [[nodiscard]] WEFT_HD PlanHeader* header() const { return at<PlanHeader>(map.header()); }
  [[nodiscard]] WEFT_HD int64_t* rows_per_expert() const {
    return at<int64_t>(map.rows_per_expert());
  }
  [[nodiscard]] WEFT_HD int64_t* padded_rows_per_expert() const {
    return at<int64_t>(map.padded_rows_per_expert());
  }
  [[nodiscard]] WEFT_HD int64_t* expert_begin() const { return at<int64_t>(map.expert_begin()); }
  [[nodiscard]] WEFT_HD int64_t* global_routes() const { return at<int64_t>(map.global_routes()); }
  [[nodiscard]] WEFT_HD int32_t* tokens_of() const { return at<int32_t>(map.tokens_of()); }
  [[nodiscard]] WEFT_HD int32_t* received() const { return at<int32_t>(map.received()); }
  [[nodiscard]] WEFT_HD int32_t* arrival_base() const { return at<int32_t>(map.arrival_base()); }
  [[nodiscard]] WEFT_HD int32_t* received_base() const { return at<int32_t>(map.received_base()); }
  [[nodiscard]] WEFT_HD int32_t* route_expert() const { return at<int32_t>(map.route_expert()); }
  [[nodiscard]] WEFT_HD int32_t* route_slot() const { return at<int32_t>(map.route_slot()); }
  [[nodiscard]] WEFT_HD float* route_weight() const { return at<float>(map.route_weight()); }
  [[nodiscard]] WEFT_HD int32_t* primary() const { return at<int32_t>(map.primary()); }
  [[nodiscard]] WEFT_HD int32_t* arrival() const { return at<int32_t>(map.arrival()); }
  [[nodiscard]] WEFT_HD int32_t* chunk_begin(uint32_t source) const {
    return at<int32_t>(map.chunk_begin(source));
  }
  [[nodiscard]] WEFT_HD ArrivalHead* heads(uint32_t source) const {
    return at<ArrivalHead>(map.heads(source));
  }
  [[nodiscard]] WEFT_HD int32_t* slots(uint32_t source) const {
    return at<int32_t>(map.slots(source));
  }
  [[nodiscard]] WEFT_HD float* weights(uint32_t source) const {
    return at<float>(map.weights(source));
  }
  [[nodiscard]] WEFT_HD int32_t* origins(uint32_t source) const {
    return at<int32_t>(map.origins(source));
  }
};

}  // namespace weft
