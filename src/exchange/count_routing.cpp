// SPDX-License-Identifier: Apache-2.0
// weft::count_routing: on the CPU here, on a GPU by one launch (cuda/plan/count.cu).
#include <algorithm>
#include <vector>

#include "cuda/plan/count.hpp"
#include "plan/build.hpp"
#include "weft/routing.hpp"

namespace weft {
namespace {

constexpr std::string_view kVerb = "count_routing";

void check(const ConstTensor& topk_idx, int num_experts, const RoutingCounts& out) {
  const Context nobody;
  const TensorCheck tensor{kVerb, nobody, topk_idx.device};
  tensor("topk_idx", topk_idx, {DType::kInt64, DType::kInt32});
  WEFT_CHECK_ARG(
      nobody,
      topk_idx.cols <= kMaxTopk,
      "{}: topk_idx has {} columns (expected at most {})",
      kVerb,
      topk_idx.cols,
      kMaxTopk
  );
  const int64_t num_ranks = out.per_rank.cols;
  WEFT_CHECK_ARG(
      nobody,
      num_ranks > 0 && num_experts > 0 && num_experts % num_ranks == 0,
      "{}: num_experts = {} (expected a multiple of the {} ranks)",
      kVerb,
      num_experts,
      num_ranks
  );
  tensor("per_rank", out.per_rank, {DType::kInt32}, {1, num_ranks});
  tensor("per_expert", out.per_expert, {DType::kInt32}, {1, num_experts});
  tensor("is_token_in_rank", out.is_token_in_rank, {DType::kBool}, {topk_idx.rows, num_ranks});
  if (out.per_host.is_given()) {
    tensor("per_host", out.per_host, {DType::kInt32}, {1, out.per_host.cols});
    tensor("host_of_rank", out.host_of_rank, {DType::kInt64}, {1, num_ranks});
  }
}

CountLaunch launch_of(const ConstTensor& topk_idx, int num_experts, const RoutingCounts& out) {
  CountLaunch call;
  call.topk_idx = topk_idx.data;
  call.index_bytes = static_cast<int32_t>(dtype_bytes(topk_idx.dtype));
  call.topk = static_cast<int32_t>(topk_idx.cols);
  call.num_tokens = topk_idx.rows;
  call.num_experts = num_experts;
  call.num_ranks = static_cast<int32_t>(out.per_rank.cols);
  call.num_hosts = static_cast<int32_t>(out.per_host.cols);
  call.host_of_rank = reinterpret_cast<const int64_t*>(out.host_of_rank.data);
  call.per_rank = reinterpret_cast<int32_t*>(out.per_rank.data);
  call.per_host = reinterpret_cast<int32_t*>(out.per_host.data);
  call.per_expert = reinterpret_cast<int32_t*>(out.per_expert.data);
  call.is_token_in_rank = reinterpret_cast<bool*>(out.is_token_in_rank.data);
  return call;
}

void count_on_cpu(const CountLaunch& call) {
  for (int32_t rank = 0; call.per_host != nullptr && rank < call.num_ranks; ++rank) {
    const int64_t host = call.host_of_rank[rank];
    WEFT_CHECK_ARG(
        Context{},
        host >= 0 && host < call.num_hosts,
        "{}: host_of_rank[{}] = {} (expected 0 to {})",
        kVerb,
        rank,
        host,
        call.num_hosts - 1
    );
  }
  std::fill_n(call.per_rank, call.num_ranks, 0);
  std::fill_n(call.per_host, call.num_hosts, 0);
  std::fill_n(call.per_expert, call.num_experts, 0);
  std::fill_n(call.is_token_in_rank, call.num_tokens * call.num_ranks, false);
  std::vector<char> is_in_host(static_cast<size_t>(call.num_hosts));
  for (int64_t token = 0; token < call.num_tokens; ++token) {
    std::ranges::fill(is_in_host, 0);
    bool* const marks = call.is_token_in_rank + token * call.num_ranks;
    for (int64_t at = token * call.topk; at < (token + 1) * call.topk; ++at) {
      const int64_t expert = call.index_bytes == sizeof(int64_t)
                                 ? static_cast<const int64_t*>(call.topk_idx)[at]
                                 : static_cast<const int32_t*>(call.topk_idx)[at];
      if (expert < 0 || expert >= call.num_experts) {
        continue;
      }
      ++call.per_expert[expert];
      const int64_t rank = expert / (call.num_experts / call.num_ranks);
      if (!marks[rank]) {
        marks[rank] = true;
        ++call.per_rank[rank];
      }
      if (call.per_host != nullptr) {
        char& mark = is_in_host[static_cast<size_t>(call.host_of_rank[rank])];
        call.per_host[call.host_of_rank[rank]] += mark == 0 ? 1 : 0;
        mark = 1;
      }
    }
  }
}

}  // namespace

void count_routing(
    const ConstTensor& topk_idx, int num_experts, const RoutingCounts& out, void* stream
) {
  check(topk_idx, num_experts, out);
  const CountLaunch call = launch_of(topk_idx, num_experts, out);
  if (topk_idx.device.kind == Device::Kind::kCpu) {
    count_on_cpu(call);
  } else {
    launch_count_routing(call, topk_idx.device.index, stream);
  }
}

}  // namespace weft
