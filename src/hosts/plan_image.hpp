// SPDX-License-Identifier: Apache-2.0
// Turns a plan on the host into what the GPUs of a domain follow: the image of one round
// (PlanImage), in which every rank of the domain sends the tokens of one source: its own, or those
// that it forwards; and further arrays that a GPU needs of the plan (InterNodeIndex), which
// message_rows.cu reads: the inter-node tokens, where rows come from, and what combine adds up.
// Previous in the data flow: plan.cpp; next: src/cuda/plan/call.cpp.
#pragma once

#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "cuda/layout/plan.hpp"
#include "hosts/call_memory.hpp"
#include "plan/plan_data.hpp"

namespace weft {

// Arrivals that this rank sends in a round, by place of the receiver in the domain.
struct Round {
  int32_t num_tokens = 0;
  struct Pair {
    const Arrivals* arrivals = nullptr;
    // [arrivals] number of each one's token in the round, ascending.
    std::span<const int32_t> token;
  };
  std::vector<Pair> pairs;
};

// Returns round 0, which sends this rank's own tokens, or round i, which sends those of the i-th
// source that it forwards for, or none.
[[nodiscard]] Round find_round(const PlanData& plan, size_t index);
// Returns the number of rounds, in which every rank of the domain takes part.
[[nodiscard]] size_t num_rounds(const PlanData& plan);

// The image for this rank, in a domain whose plan blocks have the geometry `map`.
class PlanImage {
 public:
  // `topk` is the plan's. The round must outlive the image.
  PlanImage(const PlanMap& map, const Round& round, int topk);

  [[nodiscard]] uint64_t num_bytes() const { return num_bytes_; }
  // [members]
  [[nodiscard]] const std::vector<ImportedRecords>& records() const { return records_; }
  // These write the image in two parts, by any threads; `image` has num_bytes(). `is_first`: this
  // round zeroes the padding of the output.
  void write_block(std::span<std::byte> image, const PlanData& plan, bool is_first) const;
  void write_records(std::span<std::byte> image) const;

 private:
  void write_shape(const PlanView& block, const PlanData& plan, bool is_first) const;
  void write_routes(const PlanView& block, const PlanData& plan) const;
  void write_records(std::span<std::byte> image, size_t member, std::span<int32_t> num_arrivals)
      const;

  PlanMap map_;
  const Round& round_;
  int32_t topk_;
  std::vector<ImportedRecords> records_;
  uint64_t num_bytes_ = 0;
};

// Place of each array: its offset in bytes, or its address, by T.
//
// Combine adds up parts: the own domain's sums, a row for each token, then the sums of the other
// domains, ascending, a row for each inter-node token.
template <class T>
struct InterNodeArrays {
  std::vector<T> sent;   // [num_domains] inter-node tokens, ascending
  T row_sources = {};    // [num_used_rows, 3] row, its source rank and its token there
  T row_experts = {};    // rank_major: [num_used_rows, topk] DispatchOutput::experts
  T part_begin = {};     // [num_tokens + 1]
  T part_row = {};       // by token, ascending domain
  T weight_row = {};     // [num_tokens, topk] the part with the route's weight, -1 = none
  T weight_column = {};  // [num_tokens, topk] expert of the route, -1 = none; from_map only
};

// Arrays on the host, one behind the other, ready to be copied.
class InterNodeIndex {
 public:
  // The plan must outlive the index.
  explicit InterNodeIndex(const PlanData& plan);

  [[nodiscard]] uint64_t num_bytes() const { return map_.num_bytes(); }
  void write(std::byte* to) const;
  // Returns the arrays once the bytes lie at `address`, of whatever memory.
  [[nodiscard]] InterNodeArrays<const int32_t*> at(const std::byte* address) const;

 private:
  [[nodiscard]] uint64_t add(std::span<const int32_t> values);

  bool from_map_;
  std::vector<int32_t> row_sources_;
  std::vector<int32_t> row_experts_;
  std::vector<int32_t> part_row_;
  std::vector<int32_t> weight_row_;
  std::vector<std::pair<uint64_t, std::span<const int32_t>>> arrays_;
  AreaMap map_;
  InterNodeArrays<uint64_t> offsets_;
};

}  // namespace weft
