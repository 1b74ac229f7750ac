// SPDX-License-Identifier: Apache-2.0
#include "nccl/rival_check_cuda.hpp"

#include <algorithm>
#include <cstddef>

#include "core/gpu/check.hpp"
#include "core/half.hpp"
#include "plan/slots.hpp"
#include "rival_pattern.hpp"

namespace weft::bench {
namespace {

constexpr int64_t kSamples = 31;  // rows of a matrix; no factor of any padding

using Row = std::vector<uint16_t>;

size_t at(int64_t index) {
  return static_cast<size_t>(index);
}

uint32_t seed_of_tokens(int rank) {
  return 2 * static_cast<uint32_t>(rank);
}
uint32_t seed_of_experts(int rank) {
  return 2 * static_cast<uint32_t>(rank) + 1;
}

void finish(NcclRival& rival) {
  for (int rank = 0; rank < rival.shape().num_ranks; ++rank) {
    WEFT_CUDA(Context{}, cudaSetDevice(rank));
    WEFT_CUDA(Context{}, cudaStreamSynchronize(rival.group().stream(rank)));
  }
}

void spoil(NcclRival& rival, int rank, void* rows, int64_t num_rows) {
  const size_t bytes = at(num_rows * rival.shape().row_bytes());
  WEFT_CUDA(Context{}, cudaMemsetAsync(rows, 0xff, bytes, rival.group().stream(rank)));
}

Row read_row(const NcclRival& rival, const std::byte* rows, int64_t row) {
  Row bits(at(rival.shape().hidden));
  const size_t bytes = at(rival.shape().row_bytes());
  const std::byte* from = rows + row * rival.shape().row_bytes();
  WEFT_CUDA(Context{}, cudaMemcpy(bits.data(), from, bytes, cudaMemcpyDeviceToHost));
  return bits;
}

Row pattern_row(const RivalCase& shape, uint32_t seed, int64_t row) {
  Row bits;
  for (uint32_t column = 0; column < shape.hidden; ++column) {
    bits.push_back(pattern(seed, static_cast<uint32_t>(row), column));
  }
  return bits;
}

Row sum_of(const std::vector<Row>& rows, int64_t hidden) {
  Row bits;
  for (size_t column = 0; column < at(hidden); ++column) {
    float sum = 0;
    for (const Row& row : rows) {
      sum += bf16_to_float(row[column]);
    }
    bits.push_back(float_to_bf16(sum));
  }
  return bits;
}

// Token that a row of a receiver's output holds; -1: padding.
struct Origin {
  int rank = -1;
  int64_t token = -1;
};

std::vector<Origin> origins_of(
    const RivalCase& shape, const SlotTable& slots, std::span<const RouteTable> routes, int receiver
) {
  std::vector<Origin> origins(at(slots.num_rows[at(receiver)]));
  for (int rank = 0; rank < shape.num_ranks; ++rank) {
    const RouteTable& table = routes[at(rank)];
    for (size_t i = 0; i < table.expert.size(); ++i) {
      const int32_t expert = table.expert[i];
      if (expert >= 0 && owner_rank(expert, shape.num_experts / shape.num_ranks) == receiver) {
        origins[at(slots.slot[at(rank)][i])] = {rank, static_cast<int64_t>(i) / table.topk};
      }
    }
  }
  return origins;
}

// A token's sum in the order in which this way adds.
Row expected_sum(
    const RivalCase& shape,
    RivalWay way,
    const RouteTable& table,
    std::span<const int32_t> slots,
    int64_t token
) {
  const int per_rank = shape.num_experts / shape.num_ranks;
  struct Place {
    int rank;
    int32_t slot;
  };
  std::vector<Place> places;
  for (int64_t i = token * table.topk; i < (token + 1) * table.topk; ++i) {
    if (table.expert[at(i)] >= 0) {
      places.push_back({owner_rank(table.expert[at(i)], per_rank), slots[at(i)]});
    }
  }
  const auto row_at = [&](const Place& place) {
    return pattern_row(shape, seed_of_experts(place.rank), place.slot);
  };
  std::vector<Row> terms;
  if (way != RivalWay::kPerRank) {
    std::ranges::transform(places, std::back_inserter(terms), row_at);
    return sum_of(terms, shape.hidden);
  }
  std::ranges::sort(places, {}, &Place::slot);
  for (int rank = 0; rank < shape.num_ranks; ++rank) {
    std::vector<Row> rows;
    for (const Place& place : places) {
      if (place.rank == rank) {
        rows.push_back(row_at(place));
      }
    }
    if (!rows.empty()) {
      terms.push_back(sum_of(rows, shape.hidden));
    }
  }
  return sum_of(terms, shape.hidden);
}

}  // namespace

bool is_dispatch_right(
    NcclRival& rival, const RivalPlan& plan, std::span<const RouteTable> routes
) {
  const RivalCase& shape = rival.shape();
  for (int rank = 0; rank < shape.num_ranks; ++rank) {
    const auto& mine = rival.matrices(rank);
    const cudaStream_t stream = rival.group().stream(rank);
    WEFT_CUDA(Context{}, cudaSetDevice(rank));
    fill_rows(mine.tokens, shape.num_tokens, shape.row_bytes(), seed_of_tokens(rank), stream);
    WEFT_CUDA(Context{}, cudaGetLastError());
    spoil(rival, rank, mine.sent, plan.lists(rank).num_sent);
    spoil(rival, rank, mine.received, plan.lists(rank).num_received);
    spoil(rival, rank, mine.experts, plan.lists(rank).num_rows);
  }
  finish(rival);
  rival.dispatch(plan);
  finish(rival);
  const SlotTable slots = make_slots(shape, routes);
  for (int rank = 0; rank < shape.num_ranks; ++rank) {
    const auto origins = origins_of(shape, slots, routes, rank);
    const auto num_rows = static_cast<int64_t>(origins.size());
    WEFT_CUDA(Context{}, cudaSetDevice(rank));
    for (int64_t sample = 0; sample < std::min(kSamples, num_rows); ++sample) {
      const int64_t row = sample * num_rows / std::min(kSamples, num_rows);
      const Origin origin = origins[at(row)];
      const Row wanted = origin.rank < 0
                             ? Row(at(shape.hidden), 0)
                             : pattern_row(shape, seed_of_tokens(origin.rank), origin.token);
      if (read_row(rival, rival.matrices(rank).experts, row) != wanted) {
        return false;
      }
    }
  }
  return true;
}

bool is_combine_right(NcclRival& rival, const RivalPlan& plan, std::span<const RouteTable> routes) {
  const RivalCase& shape = rival.shape();
  for (int rank = 0; rank < shape.num_ranks; ++rank) {
    const auto& mine = rival.matrices(rank);
    const RivalLists& lists = plan.lists(rank);
    const cudaStream_t stream = rival.group().stream(rank);
    WEFT_CUDA(Context{}, cudaSetDevice(rank));
    fill_rows(mine.experts, lists.num_rows, shape.row_bytes(), seed_of_experts(rank), stream);
    WEFT_CUDA(Context{}, cudaGetLastError());
    spoil(rival, rank, mine.sent, lists.num_sent);
    spoil(rival, rank, mine.received, lists.num_received);
    spoil(rival, rank, mine.out, shape.num_tokens);
  }
  finish(rival);
  rival.combine(plan);
  finish(rival);
  const SlotTable slots = make_slots(shape, routes);
  for (int rank = 0; rank < shape.num_ranks; ++rank) {
    WEFT_CUDA(Context{}, cudaSetDevice(rank));
    for (int64_t sample = 0; sample < std::min(kSamples, shape.num_tokens); ++sample) {
      const int64_t token = sample * shape.num_tokens / std::min(kSamples, shape.num_tokens);
      const Row wanted =
          expected_sum(shape, plan.way(), routes[at(rank)], slots.slot[at(rank)], token);
      if (read_row(rival, rival.matrices(rank).out, token) != wanted) {
        return false;
      }
    }
  }
  return true;
}

}  // namespace weft::bench
