// SPDX-License-Identifier: Apache-2.0
// A plan as it lies in device memory: one block of fixed size per plan, in a region that peers map,
// so that sources write their arrival records straight into the receiver's plan. plan/ fills it in,
// dispatch/ and combine/ read it, and plan/download.cpp copies it to the host.
//
// Arrivals are numbered in token order per (source, receiver) pair, dropped ones included; an
// arrival all of whose routes are dropped has a record with no rows.
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/hd.hpp"
#include "cuda/layout/control.hpp"
#include "cuda/layout/divide.hpp"

namespace weft {

// An imported plan is an image in host memory, laid out so that a kernel (plan/import.cu) copies it
// into this rank's plan block and into those of its receivers. These are the records of one
// receiver, as offsets in bytes into the image, multiples of 16. Arrays are as in PlanMap.
struct ImportedRecords {
  uint64_t chunk_begin = 0;  // [num_device_chunks(num_tokens) + 1]
  uint64_t heads = 0;        // [num_arrivals]
  uint64_t slots = 0;        // [num_arrivals, max_topk], as the two below
  uint64_t weights = 0;
  uint64_t origins = 0;
  int32_t num_arrivals = 0;
};

struct PlanHeader {
  uint64_t epoch = 0;  // of the call that made it
  int32_t num_tokens = 0;
  int32_t overflow = 0;
  int32_t short_rank = -1;  // first rank whose row budget is too small, -1 = none
  uint32_t members = 0;     // LocalState's
  uint32_t serial = 0;      // PlanView's of the plan that the block holds, 0: none
  int64_t num_rows = 0;
  int64_t required_rows = 0;
  int64_t expert_stride = 0;  // resolved; 0 unless expert_strided
  int64_t short_rows = 0;     // that rank's budget
  int64_t short_needs = 0;    // rows it would need
};

// One arrival on its receiver.
struct ArrivalHead {
  int32_t token = 0;       // on the source
  int32_t num_routes = 0;  // kept; 0: dropped as a whole
  // The row of combine's partial sum in the source's staging: token * min(num_ranks, topk) + the
  // arrival's place among the token's, by ascending rank.
  int32_t return_row = 0;
  int32_t padding = 0;
};

// The offsets of an array that every source has.
struct BySource {
  uint64_t begin = 0;
  uint64_t stride = 0;
  [[nodiscard]] WEFT_HD constexpr uint64_t operator()(uint32_t source) const {
    return begin + source * stride;
  }
};

// Offsets in bytes of every array in a plan block, computed once: a kernel that computed them would
// spend more instructions on them than on a short plan. Strides do not depend on the call. Arrays
// are aligned to 128 bytes, a cache line of the GPU.
struct PlanMap {
  uint32_t num_ranks = 1;
  uint32_t num_experts = 1;  // physical ones, where there are replicas
  uint32_t max_tokens = 1;
  uint32_t max_topk = 1;
  FastDivide by_ranks;
  FastDivide experts_per_rank;

  constexpr PlanMap() : PlanMap(1, 1, 1, 1) {}
  // `experts`: those that tokens choose among.
  constexpr PlanMap(
      uint32_t ranks,
      uint32_t experts,
      uint32_t tokens,
      uint32_t topk,
      uint32_t replicas_of_rank = 0
  )
      : num_ranks(ranks),
        num_experts(experts + ranks * replicas_of_rank),
        max_tokens(tokens),
        max_topk(topk),
        by_ranks(ranks),
        experts_per_rank(num_experts / ranks),
        replicas(replicas_of_rank) {
    const uint64_t per_local = align(sizeof(int64_t) * (num_experts / num_ranks));
    const uint64_t per_rank = align(sizeof(int32_t) * num_ranks);
    const uint64_t per_route = align(sizeof(int32_t) * max_tokens * max_topk);
    const uint64_t per_pair = align(sizeof(int32_t) * max_tokens * num_ranks);
    uint64_t end = align(sizeof(PlanHeader));
    const auto take = [&](uint64_t bytes) {
      const uint64_t begin = end;
      end += bytes;
      return begin;
    };
    const auto take_all = [&](uint64_t bytes) { return BySource{take(num_ranks * bytes), bytes}; };
    rows_per_expert = take(per_local);
    padded_rows_per_expert = take(per_local);
    expert_begin = take(per_local);
    global_routes = take(align(sizeof(int64_t) * num_experts));
    tokens_of = take(per_rank);
    sent = take(per_rank);
    received = take(per_rank);
    arrival_base = take(per_rank);
    received_base = take(per_rank);
    placement = take(align(sizeof(int32_t) * num_ranks * replicas));
    route_expert = take(per_route);
    route_slot = take(per_route);
    route_weight = take(per_route);
    primary = take(per_pair);
    arrival = take(per_pair);
    chunk_begin = take_all(align(sizeof(int32_t) * (most_device_chunks(max_tokens) + 1)));
    heads = take_all(align(sizeof(ArrivalHead) * max_tokens));
    slots = take_all(per_route);
    weights = take_all(per_route);
    origins = take_all(per_route);
    has_records = take(align(sizeof(uint32_t)));
    num_bytes_ = end;
  }

  // Returns this layout with the experts that tokens choose among, for the first half of a plan
  // with replicas.
  [[nodiscard]] constexpr PlanMap of_chosen() const {
    PlanMap chosen = *this;
    chosen.num_experts = num_experts - num_ranks * replicas;
    chosen.experts_per_rank = FastDivide(chosen.num_experts / num_ranks);
    return chosen;
  }

  // Returns the leading bytes of a plan that the host reads in exact mode.
  [[nodiscard]] WEFT_HD constexpr uint64_t shape_bytes() const { return route_expert; }

  [[nodiscard]] WEFT_HD constexpr uint64_t num_bytes() const { return num_bytes_; }

  // --- shape of this rank's output and of the group ---
  // int64 [num_local_experts] each, as in Plan; with rank_major `rows` counts dropped routes too.
  uint64_t rows_per_expert = 0;
  uint64_t padded_rows_per_expert = 0;
  uint64_t expert_begin = 0;
  uint64_t global_routes = 0;  // int64 [num_experts] routes of all ranks, before dropping
  uint64_t tokens_of = 0;      // int32 [num_ranks] tokens of each rank
  // int32 [num_ranks] arrivals from this rank to each receiver, from each source to this rank,
  // dropped ones included.
  uint64_t sent = 0;
  uint64_t received = 0;
  // int32 [num_ranks] arrivals to each receiver from ranks before this one: where this rank's
  // begin in that receiver's staging.
  uint64_t arrival_base = 0;
  // int32 [num_ranks] arrivals from each source, summed over the sources before it: where they
  // begin in this rank's staging.
  uint64_t received_base = 0;

  // --- this rank's tokens; T = max_tokens, K = max_topk even where the call has less ---
  // int32 [T, K] expert and slot of each route, -1 = none (slot: or dropped).
  uint64_t route_expert = 0;
  uint64_t route_slot = 0;
  uint64_t route_weight = 0;  // float [T, K] weights, if the routing carried any
  uint64_t primary = 0;  // int32 [T, num_ranks] smallest slot of the token there, -1 = none kept
  uint64_t arrival = 0;  // int32 [T, num_ranks] its number in its pair, -1 = no route there

  // --- arrivals on this rank, written by their sources ---
  // int32 [num_ranks][max_chunks + 1]: number of the first arrival of each chunk of the source's
  // tokens; entry num_device_chunks(tokens) closes the last.
  BySource chunk_begin;
  BySource heads;  // ArrivalHead [num_ranks][T]
  // The kept routes of each arrival, by ascending slot (equal slots: ascending k), [num_ranks][T,
  // K]: int32 slot, float weight, int32 local expert << 8 | k.
  BySource slots;
  BySource weights;
  BySource origins;
  // uint32 1 if a host that asked found the arrivals of all sources, 2 if not (download.hpp).
  uint64_t has_records = 0;

  // --- replicas, last: what most kernels need of their parameters lies together ---
  uint32_t replicas = 0;  // places for them on each rank
  // int32 [num_ranks, replicas] the expert of each, -1: none. It is among what the host reads.
  uint64_t placement = 0;

 private:
  [[nodiscard]] static constexpr uint64_t align(uint64_t bytes) {
    return (bytes + 127) / 128 * 128;
  }

  uint64_t num_bytes_ = 0;
};

// A plan block with typed access; `data` may be the block as mapped from a peer.
struct PlanView {
  std::byte* data = nullptr;
  PlanMap map;
  // Number of the plan on this rank, from 1 on. A block serves one plan after another, and a replay
  // writes a captured one again, so calls compare it with the header's.
  uint32_t serial = 0;

  template <class T>
  [[nodiscard]] WEFT_HD T* at(uint64_t offset) const {
    return reinterpret_cast<T*>(data + offset);
  }
  [[nodiscard]] WEFT_HD PlanHeader* header() const { return at<PlanHeader>(0); }
  [[nodiscard]] WEFT_HD int64_t* rows_per_expert() const {
    return at<int64_t>(map.rows_per_expert);
  }
  [[nodiscard]] WEFT_HD int64_t* padded_rows_per_expert() const {
    return at<int64_t>(map.padded_rows_per_expert);
  }
  [[nodiscard]] WEFT_HD int64_t* expert_begin() const { return at<int64_t>(map.expert_begin); }
  [[nodiscard]] WEFT_HD int64_t* global_routes() const { return at<int64_t>(map.global_routes); }
  [[nodiscard]] WEFT_HD int32_t* tokens_of() const { return at<int32_t>(map.tokens_of); }
  [[nodiscard]] WEFT_HD int32_t* sent() const { return at<int32_t>(map.sent); }
  [[nodiscard]] WEFT_HD int32_t* received() const { return at<int32_t>(map.received); }
  [[nodiscard]] WEFT_HD int32_t* arrival_base() const { return at<int32_t>(map.arrival_base); }
  [[nodiscard]] WEFT_HD int32_t* received_base() const { return at<int32_t>(map.received_base); }
  [[nodiscard]] WEFT_HD int32_t* placement() const { return at<int32_t>(map.placement); }
  [[nodiscard]] WEFT_HD int32_t* route_expert() const { return at<int32_t>(map.route_expert); }
  [[nodiscard]] WEFT_HD int32_t* route_slot() const { return at<int32_t>(map.route_slot); }
  [[nodiscard]] WEFT_HD float* route_weight() const { return at<float>(map.route_weight); }
  [[nodiscard]] WEFT_HD int32_t* primary() const { return at<int32_t>(map.primary); }
  [[nodiscard]] WEFT_HD int32_t* arrival() const { return at<int32_t>(map.arrival); }
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
  [[nodiscard]] WEFT_HD uint32_t* has_records() const { return at<uint32_t>(map.has_records); }

  // Returns the chosen expert whose rows a physical expert has. plan/plan_data.hpp does the same on
  // the host.
  [[nodiscard]] WEFT_HD int32_t chosen_expert(int32_t physical) const {
    if (map.replicas == 0) {
      return physical;
    }
    const auto replicas = static_cast<int32_t>(map.replicas);
    const auto per_rank = static_cast<int32_t>(map.experts_per_rank.divisor());
    const auto rank =
        static_cast<int32_t>(map.experts_per_rank.divide(static_cast<uint32_t>(physical)));
    const int32_t place = physical - rank * per_rank - (per_rank - replicas);
    return place < 0 ? physical - rank * replicas : placement()[rank * replicas + place];
  }
};

}  // namespace weft
