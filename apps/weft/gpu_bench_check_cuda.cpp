// SPDX-License-Identifier: Apache-2.0
#include "gpu_bench_check_cuda.hpp"

#include <algorithm>

#include "core/device_memory.hpp"
#include "core/half.hpp"
#include "gpu_rows.hpp"
#include "plan/plan_data.hpp"
#include "workload.hpp"

namespace weft::program {
namespace {

constexpr int64_t kSampledRows = 256;
constexpr int64_t kSampledTokens = 96;

std::vector<uint16_t> read_row(const Tensor& tensor, int64_t row) {
  std::vector<uint16_t> host(static_cast<size_t>(tensor.cols));
  const auto bytes = static_cast<uint64_t>(tensor.row_bytes());
  copy_between(
      reinterpret_cast<std::byte*>(host.data()),
      {},
      tensor.data + row * tensor.row_bytes(),
      tensor.device,
      bytes
  );
  return host;
}

}  // namespace

uint64_t token_seed(int rank) {
  return mix_seed(1, static_cast<uint64_t>(rank));
}

uint64_t expert_seed(int rank) {
  return mix_seed(2, static_cast<uint64_t>(rank));
}

uint64_t scale_seed(int rank) {
  return mix_seed(3, static_cast<uint64_t>(rank));
}

bool rows_are_right(
    const Tensor& rows, const std::vector<Plan>& plans, size_t rank, uint64_t (*seed_of)(int source)
) {
  for (size_t source = 0; source < plans.size(); ++source) {
    const Arrivals& arrivals = plans[source].data().sent[rank];
    const int64_t step = std::max<int64_t>(1, arrivals.size() / kSampledRows);
    for (int64_t i = 0; i < arrivals.size(); i += step) {
      for (const int32_t slot : arrivals.slots(i)) {
        const auto got = read_row(rows, slot);
        const int64_t token = arrivals.token[static_cast<size_t>(i)];
        const uint64_t seed = seed_of(static_cast<int>(source));
        for (int64_t col = 0; col < rows.cols; ++col) {
          if (got[static_cast<size_t>(col)] != float_to_bf16(row_element(seed, token, col))) {
            return false;
          }
        }
      }
    }
  }
  return true;
}

bool sums_are_right(const Tensor& sums, const Plan& plan) {
  const PlanData& data = plan.data();
  const int64_t step = std::max<int64_t>(1, plan.num_tokens() / kSampledTokens);
  for (int64_t token = 0; token < plan.num_tokens(); token += step) {
    const auto got = read_row(sums, token);
    const auto t = static_cast<size_t>(token);
    for (int64_t col = 0; col < sums.cols; ++col) {
      float sum = 0;
      for (int32_t i = data.token_begin[t]; i < data.token_begin[t + 1]; ++i) {
        const TokenArrival& arrival = data.token_arrivals[static_cast<size_t>(i)];
        const Arrivals& sent = data.sent[static_cast<size_t>(arrival.rank)];
        const uint64_t seed = expert_seed(arrival.rank);
        float partial = 0;
        bool is_first = true;
        for (const int32_t slot : sent.slots(arrival.index)) {
          const float value = bf16_to_float(float_to_bf16(row_element(seed, slot, col)));
          partial = is_first ? value : partial + value;
          is_first = false;
        }
        partial = bf16_to_float(float_to_bf16(partial));
        sum = i == data.token_begin[t] ? partial : sum + partial;
      }
      if (got[static_cast<size_t>(col)] != float_to_bf16(sum)) {
        return false;
      }
    }
  }
  return true;
}

}  // namespace weft::program
