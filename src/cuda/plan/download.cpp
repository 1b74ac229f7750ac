// SPDX-License-Identifier: Apache-2.0
#include "cuda/plan/download.hpp"

#include <algorithm>
#include <array>
#include <numeric>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "core/check.hpp"
#include "core/gpu/check.hpp"
#include "cuda/layout/launch.hpp"
#include "plan/build.hpp"
#include "plan/pair_writer.hpp"
#include "plan/slots.hpp"
#include "weft/routing.hpp"

namespace weft {
namespace {

// Reads a plan block in host memory.
class BlockReader {
 public:
  BlockReader(const PlanView& block, const PlanShape& shape, const Context& context)
      : block_(block), context_(context), topk_(static_cast<size_t>(shape.topk)) {
    plan_.shape = shape;
  }

  PlanData read() {
    check_shape();
    read_output_shape(block_, plan_);
    find_padding();
    read_routes();
    read_sent();
    link_tokens(plan_);
    std::vector<Arrivals> received;
    for (int source = 0; source < plan_.shape.num_ranks; ++source) {
      received.push_back(read_received(static_cast<uint32_t>(source)));
    }
    add_received(plan_, std::move(received));
    return std::move(plan_);
  }

 private:
  [[nodiscard]] bool is_rank_major() const {
    return plan_.shape.options.layout == Layout::kRankMajor;
  }
  // Returns the index in the block of route k of a token, or of an arrival.
  [[nodiscard]] size_t place_of(int32_t item, size_t k) const {
    return static_cast<size_t>(item) * block_.map.max_topk + k;
  }

  void check_shape() const {
    const PlanMap& map = block_.map;
    const bool is_sound = plan_.shape.num_ranks == static_cast<int>(map.num_ranks) &&
                          plan_.shape.num_experts == static_cast<int>(map.num_experts) &&
                          plan_.shape.topk >= 1 && topk_ <= map.max_topk &&
                          block_.header()->num_tokens == plan_.shape.num_tokens &&
                          plan_.shape.num_tokens <= static_cast<int64_t>(map.max_tokens);
    WEFT_CHECK(
        context_,
        is_sound,
        ErrorCode::kInternal,
        "plan: the block on the GPU holds another plan ({} tokens, expected {})",
        block_.header()->num_tokens,
        plan_.shape.num_tokens
    );
  }

  void find_padding() {
    for (size_t e = 0; e < plan_.expert_begin.size() && !is_rank_major(); ++e) {
      const int64_t kept_end = plan_.expert_begin[e] + plan_.rows_per_expert[e];
      const int64_t end = plan_.expert_begin[e] + plan_.padded_rows_per_expert[e];
      if (kept_end < end) {
        plan_.padding.emplace_back(kept_end, end);
      }
    }
  }

  void read_routes() {
    for (int32_t token = 0; token < plan_.shape.num_tokens; ++token) {
      const int32_t* expert = block_.route_expert() + place_of(token, 0);
      const int32_t* slot = block_.route_slot() + place_of(token, 0);
      plan_.route_expert.insert(plan_.route_expert.end(), expert, expert + topk_);
      plan_.route_slot.insert(plan_.route_slot.end(), slot, slot + topk_);
    }
    const auto is_foreign = [&](int32_t expert) { return expert >= plan_.shape.num_experts; };
    WEFT_CHECK(
        context_,
        std::ranges::none_of(plan_.route_expert, is_foreign),
        ErrorCode::kInternal,
        "plan: the block on the GPU names experts that do not exist"
    );
  }

  // Reads this rank's own slots: each token's kept routes are in (slot, k) order.
  void read_sent() {
    const PlanShape& shape = plan_.shape;
    const int per_rank = shape.num_local_experts();
    const auto num_tokens = static_cast<size_t>(shape.num_tokens);
    std::vector<PairWriter> writers;
    plan_.sent.resize(static_cast<size_t>(shape.num_ranks));
    for (Arrivals& arrivals : plan_.sent) {
      arrivals.one_row = is_rank_major();
      PairWriter::resize(arrivals, num_tokens, plan_.route_expert.size(), shape.has_weights);
      writers.emplace_back(arrivals);
    }
    std::array<size_t, kMaxTopk> all_ks = {};
    const std::span<size_t> ks = std::span(all_ks).first(topk_);
    for (int32_t token = 0; token < shape.num_tokens; ++token) {
      const int32_t* slots = block_.route_slot() + place_of(token, 0);
      std::iota(ks.begin(), ks.end(), 0);
      std::ranges::sort(ks, {}, [&](size_t k) { return std::pair(slots[k], k); });
      for (const size_t k : ks) {
        const size_t place = place_of(token, k);
        const int32_t expert = block_.route_expert()[place];
        if (slots[k] >= 0) {
          writers[static_cast<size_t>(owner_rank(expert, per_rank))].add(
              token,
              {.slot = slots[k],
               .k = static_cast<int32_t>(k),
               .expert = local_expert(expert, per_rank),
               .weight = shape.has_weights ? block_.route_weight()[place] : 0.0F}
          );
        }
      }
    }
    for (size_t rank = 0; rank < writers.size(); ++rank) {
      writers[rank].finish(plan_.sent[rank]);
    }
  }

  // Reads a source's arrivals, but those without kept routes.
  Arrivals read_received(uint32_t source) {
    const int32_t num_arrivals = block_.received()[source];
    bool is_sound =
        num_arrivals >= 0 && num_arrivals <= static_cast<int64_t>(block_.map.max_tokens);
    Arrivals out;
    out.one_row = is_rank_major();
    for (int32_t i = 0; is_sound && i < num_arrivals; ++i) {
      const ArrivalHead& head = block_.heads(source)[i];
      is_sound = head.num_routes >= 0 && head.num_routes <= plan_.shape.topk;
      if (!is_sound || head.num_routes == 0) {
        continue;
      }
      out.token.push_back(head.token);
      out.route_begin.push_back(static_cast<int32_t>(out.slot.size()));
      for (size_t route = 0; route < static_cast<size_t>(head.num_routes); ++route) {
        const size_t place = place_of(i, route);
        const int32_t origin = block_.origins(source)[place];
        out.slot.push_back(block_.slots(source)[place]);
        out.k.push_back(origin & 0xff);
        out.expert.push_back(origin >> 8);
        if (plan_.shape.has_weights) {
          out.weight.push_back(block_.weights(source)[place]);
        }
      }
    }
    out.route_begin.push_back(static_cast<int32_t>(out.slot.size()));
    const ArrivalBounds bounds(plan_.shape, block_.tokens_of()[source], plan_.num_rows);
    const std::string fault = is_sound ? arrivals_fault(out, bounds) : "sizes are out of range";
    WEFT_CHECK(
        context_,
        fault.empty(),
        ErrorCode::kInternal,
        "plan: records of rank {} on the GPU are malformed: {}",
        source,
        fault
    );
    return out;
  }

  PlanView block_;
  Context context_;
  PlanData plan_;
  size_t topk_;
};

// Checks that a copied block holds this plan. Throws Error (kInvalidArgument).
void check_serial(const PlanView& on_host, const PlanView& plan, const Context& context) {
  WEFT_CHECK_ARG(
      context,
      on_host.header()->serial == plan.serial || on_host.header()->serial == 0,
      "plan: another plan lies in its memory (the graph that makes it has not been replayed since "
      "a graph that shares its memory)"
  );
}

}  // namespace

void read_output_shape(const PlanView& block, PlanData& data) {
  const PlanHeader& header = *block.header();
  data.num_rows = header.num_rows;
  data.required_rows = header.required_rows;
  data.overflow = header.overflow != 0;
  data.shape.options.expert_stride = header.expert_stride;
  const int local = data.shape.num_local_experts();
  const auto copy = [](const int64_t* from, int count) {
    return std::vector<int64_t>(from, from + count);
  };
  data.rows_per_expert = copy(block.rows_per_expert(), local);
  data.padded_rows_per_expert = copy(block.padded_rows_per_expert(), local);
  data.expert_begin = copy(block.expert_begin(), local);
  data.global_routes = copy(block.global_routes(), data.shape.num_experts);
  const int32_t* const placement = block.placement();
  data.shape.options.balance.placement.assign(
      placement, placement + size_t{block.map.num_ranks} * block.map.replicas
  );
}

std::optional<PlanData> download_shape(
    const RankView& me, const PlanView& plan, const PlanShape& shape, cudaStream_t stream
) {
  const Context context = {me.rank, me.num_ranks, "cuda"};
  std::vector<std::byte> bytes(plan.map.shape_bytes());
  WEFT_CUDA(
      context,
      cudaMemcpyAsync(bytes.data(), plan.data, bytes.size(), cudaMemcpyDeviceToHost, stream)
  );
  WEFT_CUDA(context, cudaStreamSynchronize(stream));
  const PlanView on_host = {bytes.data(), plan.map};
  if (on_host.header()->epoch == 0) {
    return std::nullopt;
  }
  check_serial(on_host, plan, context);
  PlanData data;
  data.shape = shape;
  read_output_shape(on_host, data);
  return data;
}

PlanData download_plan(
    const RankView& me, const PlanView& plan, const PlanShape& shape, cudaStream_t stream
) {
  const Context context = {me.rank, me.num_ranks, "cuda"};
  launch_wait_records(me, plan, stream);
  std::vector<std::byte> bytes(plan.map.num_bytes());
  WEFT_CUDA(
      context,
      cudaMemcpyAsync(bytes.data(), plan.data, bytes.size(), cudaMemcpyDeviceToHost, stream)
  );
  WEFT_CUDA(context, cudaStreamSynchronize(stream));
  const PlanView on_host = {bytes.data(), plan.map};
  WEFT_CHECK(
      context,
      *on_host.has_records() == 1,
      ErrorCode::kTimeout,
      "plan: the arrival records of some rank have not come (waited {:.1f} s at most)",
      static_cast<double>(me.timeout_ns) * 1e-9
  );
  check_serial(on_host, plan, context);
  return BlockReader(on_host, shape, context).read();
}

}  // namespace weft
