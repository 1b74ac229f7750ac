// SPDX-License-Identifier: Apache-2.0
#include "measure/bench_check.hpp"

#include <algorithm>
#include <cstring>
#include <map>
#include <memory>

#include "core/gpu/device_memory.hpp"
#include "core/half.hpp"
#include "measure/measure.hpp"
#include "plan/plan_data.hpp"
#include "plan/reference/reference_plan.hpp"

namespace weft::program {
namespace {

constexpr int64_t kFilledAtOnce = 256;  // rows

// A small number with few bits, so that no type rounds it and sums differ if a term is missing: -4
// to 3.97.
float element(uint64_t rank_seed, int64_t row, int64_t col) {
  uint64_t bits = rank_seed ^ (static_cast<uint64_t>(row) << 20U) ^ static_cast<uint64_t>(col);
  bits *= 0x9e3779b97f4a7c15U;
  bits ^= bits >> 29U;
  bits *= 0xbf58476d1ce4e5b9U;
  return static_cast<float>(static_cast<int>(bits >> 56U) - 128) / 32.0F;
}

uint64_t seed_of(const MadeUpRows& rows, int rank) {
  return mix_seed(rows.seed, static_cast<uint64_t>(rank));
}

// Returns the value as it is when stored and loaded again.
float rounded(DType dtype, float value) {
  return dtype == DType::kFloat32    ? value
         : dtype == DType::kBFloat16 ? bf16_to_float(float_to_bf16(value))
                                     : fp16_to_float(float_to_fp16(value));
}

// Returns whether a row of the matrix is `expected`, bit for bit.
bool is_row(const Tensor& matrix, int64_t row, std::span<const float> expected) {
  const auto num_bytes = static_cast<size_t>(matrix.row_bytes());
  std::vector<std::byte> got(num_bytes);
  std::vector<std::byte> wanted(num_bytes);
  copy_between(got.data(), {}, matrix.data + row * matrix.row_bytes(), matrix.device, num_bytes);
  for (size_t col = 0; col < expected.size(); ++col) {
    store_element(matrix.dtype, expected[col], &wanted[col * num_bytes / expected.size()]);
  }
  return got == wanted;
}

// So far apart are `num_samples` of `count` or a few less.
int64_t step_of(int64_t count, int64_t num_samples) {
  return std::max<int64_t>(1, (count + num_samples - 1) / num_samples);
}

}  // namespace

std::vector<Plan> expected_plans(
    std::span<const RouteTable> routes,
    int num_experts,
    const PlanOptions& options,
    std::span<const int64_t> budgets
) {
  std::vector<Plan> plans;
  for (PlanData& data : reference_plans(routes, num_experts, options, budgets)) {
    plans.emplace_back(std::make_shared<const PlanData>(std::move(data)));
  }
  return plans;
}

void MadeUpRows::fill(const Tensor& rows, int rank) const {
  const int64_t width = dtype_bytes(rows.dtype);
  std::vector<std::byte> host;
  for (int64_t begin = 0; begin < rows.rows; begin += kFilledAtOnce) {
    const int64_t end = std::min(begin + kFilledAtOnce, rows.rows);
    host.resize(static_cast<size_t>((end - begin) * rows.row_bytes()));
    std::byte* place = host.data();
    for (int64_t row = begin; row < end; ++row) {
      for (int64_t col = 0; col < rows.cols; ++col, place += width) {
        store_element(rows.dtype, element(seed_of(*this, rank), row, col), place);
      }
    }
    copy_between(rows.data + begin * rows.row_bytes(), rows.device, host.data(), {}, host.size());
  }
}

bool rows_are_right(
    const Tensor& rows,
    std::span<const Plan> plans,
    size_t rank,
    const MadeUpRows& made_up,
    int64_t num_samples
) {
  std::vector<float> expected(static_cast<size_t>(rows.cols));
  for (size_t source = 0; source < plans.size(); ++source) {
    const uint64_t seed = seed_of(made_up, static_cast<int>(source));
    const Arrivals& arrivals = contents_of(plans[source]).sent[rank];
    for (int64_t i = 0; i < arrivals.size(); i += step_of(arrivals.size(), num_samples)) {
      for (int64_t col = 0; col < rows.cols; ++col) {
        expected[static_cast<size_t>(col)] =
            element(seed, arrivals.token[static_cast<size_t>(i)], col);
      }
      const auto slots = arrivals.slots(i);
      const auto is_right = [&](int32_t slot) { return is_row(rows, slot, expected); };
      if (!std::ranges::all_of(slots, is_right)) {
        return false;
      }
    }
  }
  return true;
}

namespace {

// A token's sum by SumOrder::kTopk: all its rows in the order of its choices.
std::vector<float> sum_by_choice(
    const PlanData& data, size_t token, const MadeUpRows& made_up, size_t num_cols
) {
  std::map<int32_t, std::pair<uint64_t, int32_t>> rows;  // by choice: the seed, the slot
  for (int32_t i = data.token_begin[token]; i < data.token_begin[token + 1]; ++i) {
    const TokenArrival& arrival = data.token_arrivals[static_cast<size_t>(i)];
    const Arrivals& pair = data.sent[static_cast<size_t>(arrival.rank)];
    const auto at = static_cast<size_t>(arrival.index);
    for (auto j = static_cast<size_t>(pair.route_begin[at]);
         j < static_cast<size_t>(pair.route_begin[at + 1]);
         ++j) {
      rows[pair.k[j]] = {seed_of(made_up, arrival.rank), pair.slot[j]};
    }
  }
  std::vector<float> sum(num_cols);
  for (const auto& [k, row] : rows) {
    for (size_t col = 0; col < num_cols; ++col) {
      sum[col] += element(row.first, row.second, static_cast<int64_t>(col));
    }
  }
  return sum;
}

}  // namespace

bool sums_are_right(
    const Tensor& sums,
    const Plan& plan,
    std::span<const int> domain_of,
    const MadeUpRows& made_up,
    int64_t num_samples
) {
  const PlanData& data = contents_of(plan);
  const auto num_cols = static_cast<size_t>(sums.cols);
  const bool is_by_choice = data.shape.options.order == SumOrder::kTopk;
  // Adds the elements as they are once stored.
  const auto add = [&](std::vector<float>& sum, const std::vector<float>& more) {
    sum.resize(num_cols);
    for (size_t col = 0; col < num_cols; ++col) {
      sum[col] += rounded(sums.dtype, more[col]);
    }
  };
  for (int64_t token = 0; token < plan.num_tokens();
       token += step_of(plan.num_tokens(), num_samples)) {
    const auto t = static_cast<size_t>(token);
    if (is_by_choice) {
      if (!is_row(sums, token, sum_by_choice(data, t, made_up, num_cols))) {
        return false;
      }
      continue;
    }
    std::map<int, std::vector<float>> domains;
    for (int32_t i = data.token_begin[t]; i < data.token_begin[t + 1]; ++i) {
      const TokenArrival& arrival = data.token_arrivals[static_cast<size_t>(i)];
      const uint64_t seed = seed_of(made_up, arrival.rank);
      std::vector<float> partial(num_cols);
      for (const int32_t slot : data.sent[static_cast<size_t>(arrival.rank)].slots(arrival.index)) {
        for (size_t col = 0; col < num_cols; ++col) {
          partial[col] += element(seed, slot, static_cast<int64_t>(col));
        }
      }
      add(domains[domain_of[static_cast<size_t>(arrival.rank)]], partial);
    }
    std::vector<float> expected(num_cols);
    for (const auto& [domain, sum] : domains) {
      add(expected, sum);
    }
    if (!is_row(sums, token, expected)) {
      return false;
    }
  }
  return true;
}

Verdict verdict_of_all(const Group& group, const Verdict& mine) {
  Verdict all = {true, true, true};
  for (const Verdict& one : gather(group, mine)) {
    all.is_plan_good &= one.is_plan_good;
    all.is_dispatch_good &= one.is_dispatch_good;
    all.is_combine_good &= one.is_combine_good;
  }
  return all;
}

}  // namespace weft::program
