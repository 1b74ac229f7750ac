// SPDX-License-Identifier: Apache-2.0
#include "cuda/plan/download.hpp"

#include <algorithm>
#include <array>
#include <memory>
#include <tuple>
#include <utility>
#include <vector>

#include "core/check.hpp"
#include "core/gpu/check.hpp"
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
      : block_(block), context_(context) {
    plan_.shape = shape;
    topk_ = static_cast<size_t>(shape.topk);
    stride_ = block.map.max_topk;
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

  void check_shape() const {
    const PlanMap& map = block_.map;
    const bool is_sound = plan_.shape.num_ranks == static_cast<int>(map.num_ranks) &&
                          plan_.shape.num_experts == static_cast<int>(map.num_experts) &&
                          plan_.shape.topk >= 1 && topk_ <= stride_ &&
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
      const int64_t begin = plan_.expert_begin[e];
      const int64_t kept_end = begin + plan_.rows_per_expert[e];
      const int64_t end = begin + plan_.padded_rows_per_expert[e];
      if (kept_end < end) {
        plan_.padding.emplace_back(kept_end, end);
      }
    }
  }

  void read_routes() {
    const auto num_tokens = static_cast<size_t>(plan_.shape.num_tokens);
    plan_.route_expert.reserve(num_tokens * topk_);
    plan_.route_slot.reserve(num_tokens * topk_);
    for (size_t token = 0; token < num_tokens; ++token) {
      const int32_t* expert = block_.route_expert() + token * stride_;
      const int32_t* slot = block_.route_slot() + token * stride_;
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
    const int per_rank = plan_.shape.num_local_experts();
    std::vector<PairWriter> writers;
    plan_.sent.resize(static_cast<size_t>(plan_.shape.num_ranks));
    for (Arrivals& arrivals : plan_.sent) {
      arrivals.one_row = is_rank_major();
      PairWriter::resize(
          arrivals,
          static_cast<size_t>(plan_.shape.num_tokens),
          plan_.route_expert.size(),
          plan_.shape.has_weights
      );
      writers.emplace_back(arrivals);
    }
    std::array<PairWriter::Route, kMaxTopk> kept = {};
    for (int32_t token = 0; token < plan_.shape.num_tokens; ++token) {
      size_t num_kept = 0;
      for (size_t k = 0; k < topk_; ++k) {
        const size_t route = static_cast<size_t>(token) * topk_ + k;
        const int32_t slot = plan_.route_slot[route];
        if (slot >= 0) {
          const size_t place = static_cast<size_t>(token) * stride_ + k;
          const float weight = plan_.shape.has_weights ? block_.route_weight()[place] : 0.0F;
          kept[num_kept++] = {slot, static_cast<int32_t>(k), plan_.route_expert[route], weight};
        }
      }
      std::sort(
          kept.begin(),
          kept.begin() + static_cast<std::ptrdiff_t>(num_kept),
          [](const PairWriter::Route& a, const PairWriter::Route& b) {
            return std::tie(a.slot, a.k) < std::tie(b.slot, b.k);
          }
      );
      for (size_t i = 0; i < num_kept; ++i) {
        PairWriter::Route route = kept[i];
        const auto target = static_cast<size_t>(owner_rank(route.expert, per_rank));
        route.expert = local_expert(route.expert, per_rank);
        writers[target].add(token, route);
      }
    }
    for (size_t rank = 0; rank < writers.size(); ++rank) {
      writers[rank].finish(plan_.sent[rank]);
    }
  }

  // Arrivals without kept routes are left out.
  Arrivals read_received(uint32_t source) {
    const int32_t num_arrivals = block_.received()[source];
    WEFT_CHECK(
        context_,
        num_arrivals >= 0 && num_arrivals <= static_cast<int64_t>(block_.map.max_tokens),
        ErrorCode::kInternal,
        "plan: {} arrivals from rank {} (at most {})",
        num_arrivals,
        source,
        block_.map.max_tokens
    );
    Arrivals out;
    out.one_row = is_rank_major();
    for (int32_t i = 0; i < num_arrivals; ++i) {
      const ArrivalHead& head = block_.heads(source)[i];
      WEFT_CHECK(
          context_,
          head.num_routes >= 0 && head.num_routes <= plan_.shape.topk,
          ErrorCode::kInternal,
          "plan: arrival {} from rank {} has {} routes (at most {})",
          i,
          source,
          head.num_routes,
          plan_.shape.topk
      );
      if (head.num_routes > 0) {
        out.token.push_back(head.token);
        out.route_begin.push_back(static_cast<int32_t>(out.slot.size()));
        add_routes(out, source, static_cast<size_t>(i) * stride_, head.num_routes);
      }
    }
    out.route_begin.push_back(static_cast<int32_t>(out.slot.size()));
    return out;
  }

  void add_routes(Arrivals& out, uint32_t source, size_t first, int32_t num_routes) const {
    for (size_t at = first; at < first + static_cast<size_t>(num_routes); ++at) {
      const int32_t slot = block_.slots(source)[at];
      const int32_t origin = block_.origins(source)[at];
      const int32_t k = origin & 0xff;
      const int32_t expert = origin >> 8;
      WEFT_CHECK(
          context_,
          slot >= 0 && slot < plan_.num_rows && k < plan_.shape.topk && expert >= 0 &&
              expert < plan_.shape.num_local_experts(),
          ErrorCode::kInternal,
          "plan: a route from rank {} has slot {}, k {}, expert {} (out of range)",
          source,
          slot,
          k,
          expert
      );
      out.slot.push_back(slot);
      out.k.push_back(k);
      out.expert.push_back(expert);
      if (plan_.shape.has_weights) {
        out.weight.push_back(block_.weights(source)[at]);
      }
    }
  }

  PlanView block_;
  Context context_;
  PlanData plan_;
  size_t topk_ = 0;
  size_t stride_ = 0;  // of routes in the block
};

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
  return BlockReader(on_host, shape, context).read();
}

}  // namespace weft
