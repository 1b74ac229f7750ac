// SPDX-License-Identifier: Apache-2.0
// Arrays that a GPU needs of a plan between domains in addition to its rounds: the inter-node
// tokens, and what combine adds up. On the host, one behind the other, ready to be copied. Previous
// in the data flow: the plan; next: message_rows.cu, which reads them.
#pragma once

#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "plan/plan_data.hpp"

namespace weft {

// Where each array lies, as T says: offsets in bytes, or addresses.
//
// What combine adds up. Its parts are the own domain's sums, a row for each token, then the sums of
// the other domains, ascending, a row for each inter-node token.
template <class T>
struct InterNodeArrays {
  std::vector<T> sent;   // [num_domains] inter-node tokens, ascending
  T part_begin = {};     // [num_tokens + 1]
  T part_row = {};       // by token, ascending domain
  T weight_row = {};     // [num_tokens, topk] the part with the route's weight, -1 = none
  T weight_column = {};  // [num_tokens, topk] expert of the route, -1 = none; from_map only
};

class InterNodeIndex {
 public:
  // The plan must outlive it.
  explicit InterNodeIndex(const PlanData& plan);

  [[nodiscard]] uint64_t num_bytes() const { return num_bytes_; }
  void write(std::byte* to) const;
  // Once the bytes lie at `address`, of whatever memory.
  [[nodiscard]] InterNodeArrays<const int32_t*> at(const std::byte* address) const;

 private:
  [[nodiscard]] uint64_t add(std::span<const int32_t> values);

  bool from_map_;
  std::vector<int32_t> part_row_;
  std::vector<int32_t> weight_row_;
  std::vector<std::pair<uint64_t, std::span<const int32_t>>> arrays_;
  uint64_t num_bytes_ = 0;
  InterNodeArrays<uint64_t> offsets_;
};

}  // namespace weft
