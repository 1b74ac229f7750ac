// SPDX-License-Identifier: Apache-2.0
// From a plan on the host to what the GPUs of a domain follow: the image of one round, in which
// every rank of the domain sends the tokens of one source: its own, or those that it forwards.
// Previous in the data flow: plan.cpp; next: src/cuda/plan/import.cpp.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "cuda/layout/plan.hpp"
#include "plan/plan_data.hpp"

namespace weft {

// What this rank sends in a round, by place of the receiver in the domain.
struct Round {
  int32_t num_tokens = 0;
  struct Pair {
    const Arrivals* arrivals = nullptr;
    // [arrivals] number of each one's token in the round, ascending.
    std::span<const int32_t> token;
  };
  std::vector<Pair> pairs;
};

// Round 0 sends this rank's own tokens; round i those of the i-th source that it forwards for, or
// none.
[[nodiscard]] Round find_round(const PlanData& plan, size_t index);
// Rounds that every rank of the domain takes part in.
[[nodiscard]] size_t num_rounds(const PlanData& plan);

// The image for this rank, in a domain whose plan blocks have the geometry `map`.
class PlanImage {
 public:
  // `topk` is the plan's. The round must outlive it.
  PlanImage(const PlanMap& map, const Round& round, int topk);

  [[nodiscard]] uint64_t num_bytes() const { return num_bytes_; }
  // [members]
  [[nodiscard]] const std::vector<ImportedRecords>& records() const { return records_; }
  // In two parts, by any threads; `image` has num_bytes(). `is_first`: padding of the output is
  // this round's to zero.
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

}  // namespace weft
