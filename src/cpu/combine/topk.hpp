// SPDX-License-Identifier: Apache-2.0
// combine with SumOrder::kTopk: a row for each route returns straight to the token's rank, also
// between domains, and is added there in the order of the token's choices. Only a rank that has all
// topk routes of a token adds them up itself (returns_sum() in plan/plan_data.hpp).
#pragma once

#include <algorithm>
#include <array>
#include <span>
#include <vector>

#include "call/chunks.hpp"
#include "cpu/call.hpp"
#include "cpu/chunk_work.hpp"
#include "cpu/combine/rows.hpp"
#include "cpu/combine/weights.hpp"
#include "plan/domain_traffic.hpp"

namespace weft {

// A row of a sum and its factor, which does not count without scale.
struct TopkTerm {
  const std::byte* row = nullptr;
  float weight = 1;
};

// The rows of one token, by choice.
class TopkTerms {
 public:
  explicit TopkTerms(int topk) : topk_(static_cast<size_t>(topk)) {}
  void set(int32_t k, const TopkTerm& term) { terms_[static_cast<size_t>(k)] = term; }
  // Adds the terms that are set to `groups`, as one group.
  void list(bool is_scaled, RowGroups& groups) const {
    for (const TopkTerm& term : std::span(terms_).first(topk_)) {
      if (term.row == nullptr) {
        continue;
      }
      groups.rows.push_back(term.row);
      if (is_scaled) {
        groups.weights.push_back(term.weight);
      }
    }
    if (!groups.rows.empty()) {
      groups.group_ends.push_back(groups.rows.size());
    }
  }

 private:
  std::array<TopkTerm, kMaxTopk> terms_;
  size_t topk_;
};

// Returns a route's factor, held by the plan or given by `source_weight(route)`.
template <class SourceWeight>
[[nodiscard]] float factor_of(
    const CombineInput& in, const Arrivals& pair, size_t route, const SourceWeight& source_weight
) {
  switch (in.scale) {
    case CombineScale::kPlanWeights:
      return pair.weight[route];
    case CombineScale::kSourceWeights:
      return source_weight(route);
    default:
      return 1.0F;
  }
}

// Sets an arrival's rows, of the output that begins at `rows`.
template <class SourceWeight>
void add_routes(
    const CombineInput& in,
    const std::byte* rows,
    const Arrivals& pair,
    int64_t arrival,
    const SourceWeight& source_weight,
    TopkTerms& terms
) {
  const auto a = static_cast<size_t>(arrival);
  const auto last = static_cast<size_t>(pair.route_begin[a + 1]);
  for (auto j = static_cast<size_t>(pair.route_begin[a]); j < last; ++j) {
    const std::byte* row =
        rows + static_cast<size_t>(pair.slot[j]) * static_cast<size_t>(in.rows.row_bytes());
    terms.set(pair.k[j], {row, factor_of(in, pair, j, source_weight)});
  }
}

// The sending role: puts rows of a token rank's arrivals, each at its route's place in this rank's
// area there; a sum at that of its arrival's first route.
class TopkReturn {
 public:
  TopkReturn(const CpuCall& call, const CombineInput& in)
      : call_(call),
        plan_(call.plan),
        in_(in),
        self_(static_cast<size_t>(call.plan.shape.rank)),
        row_bytes_(static_cast<size_t>(in.rows.row_bytes())),
        scratch_(static_cast<size_t>(call.rank.workers.num_workers())) {
    const size_t num_ranks = plan_.received.size();
    for (const bool wants_near : {false, true}) {
      for (size_t step = 1; step < num_ranks; ++step) {
        const size_t peer = (self_ + step) % num_ranks;
        if (wants_near == is_near(plan_, peer)) {
          peers_.push_back(peer);
          num_units_ = std::max(num_units_, num_chunks(plan_.received[peer].size()));
        }
      }
    }
  }

  [[nodiscard]] int64_t num_units() const { return num_units_; }
  // Sends a chunk of arrivals to every token rank but this one, other domains first. Any worker,
  // each unit once.
  void run(int64_t unit, int worker) {
    Scratch& scratch = scratch_[static_cast<size_t>(worker)];
    for (const size_t peer : peers_) {
      const ChunkRange range = chunk_range(plan_.received[peer].size(), unit);
      if (range.first == range.last) {
        continue;
      }
      const uint32_t signal = call_.rank.signals.combine(self_, unit);
      if (!is_reader(call_, peer)) {
        send_rows(peer, range, signal, scratch);
      }
      if (in_.weights.is_given()) {
        send_weights(call_, in_, peer, range, signal, scratch.weights);
      }
    }
  }

 private:
  // Memory of one worker, in cache lines of its own.
  struct alignas(64) Scratch {
    std::vector<Put> puts;
    std::vector<std::byte> sums;
    std::vector<float> weights;
    RowGroups groups;
  };

  void send_rows(size_t to, ChunkRange range, uint32_t signal, Scratch& scratch) const {
    const Arrivals& pair = plan_.received[to];
    const Target& target = call_.words[to].rows;
    scratch.puts.clear();
    size_t num_sums = 0;
    for (int64_t i = range.first; i < range.last; ++i) {
      const int64_t first = pair.route_begin[static_cast<size_t>(i)];
      if (returns_sum(plan_.shape, pair, i)) {
        scratch.sums.resize(static_cast<size_t>(kChunkArrivals) * row_bytes_);
        std::byte* const sum = scratch.sums.data() + num_sums++ * row_bytes_;
        add_up(to, i, scratch.groups, sum);
        scratch.puts.push_back(put_to(target, first, sum, row_bytes_, signal));
        continue;
      }
      const int64_t last = pair.route_begin[static_cast<size_t>(i) + 1];
      for (int64_t j = first; j < last; ++j) {
        const auto slot = static_cast<size_t>(pair.slot[static_cast<size_t>(j)]);
        const std::byte* row = in_.rows.data + slot * row_bytes_;
        scratch.puts.push_back(put_to(target, j, row, row_bytes_, signal));
      }
    }
    call_.rank.transport.put(static_cast<int>(to), scratch.puts);
  }

  void add_up(size_t to, int64_t arrival, RowGroups& groups, std::byte* sum) const {
    TopkTerms terms(plan_.shape.topk);
    add_routes(in_, in_.rows.data, plan_.received[to], arrival, staged_weights(call_, to), terms);
    groups.clear();
    terms.list(in_.scale != CombineScale::kNone, groups);
    sum_groups(sum, groups, in_.rows.dtype, in_.rows.cols);
  }

  const CpuCall& call_;
  const PlanData& plan_;
  const CombineInput& in_;
  size_t self_;
  size_t row_bytes_;
  std::vector<Scratch> scratch_;  // by worker
  std::vector<size_t> peers_;     // in the order of sending
  int64_t num_units_ = 0;
};

// Terms of each token: its rows where they can be read here, else those that came.
class TopkRows {
 public:
  using Traffic = CountedTraffic;
  struct Token {
    RowGroups rows;
  };

  TopkRows(const CpuCall& call, const CombineInput& in)
      : call_(call),
        plan_(call.plan),
        in_(in),
        row_bytes_(static_cast<size_t>(in.rows.row_bytes())) {
    for (int peer = 0; peer < plan_.shape.num_ranks; ++peer) {
      rows_of_.push_back(readable_rows(call, in, peer));
      is_read_.push_back(is_readable(call, peer));
    }
  }

  // reads() and list() mean what they do in CombineRows.
  [[nodiscard]] bool reads(size_t peer) const { return is_read_[peer]; }
  void list(int64_t token, Token& out) const {
    TopkTerms terms(plan_.shape.topk);
    const auto t = static_cast<size_t>(token);
    for (auto a = plan_.token_begin[t]; a < plan_.token_begin[t + 1]; ++a) {
      const TokenArrival& arrival = plan_.token_arrivals[static_cast<size_t>(a)];
      const auto peer = static_cast<size_t>(arrival.rank);
      is_read_[peer] ? add_read(token, peer, arrival.index, terms)
                     : add_staged(token, peer, arrival.index, terms);
    }
    out.rows.clear();
    terms.list(in_.scale != CombineScale::kNone, out.rows);
  }

 private:
  [[nodiscard]] auto weights_of(int64_t token, const Arrivals& pair) const {
    const auto* weights = reinterpret_cast<const float*>(in_.source_weights.data);
    return [this, token, &pair, weights](size_t route) {
      return weights[weight_index(plan_, token, pair.k[route])];
    };
  }

  void add_read(int64_t token, size_t peer, int64_t arrival, TopkTerms& terms) const {
    const Arrivals& pair = plan_.sent[peer];
    add_routes(in_, rows_of_[peer], pair, arrival, weights_of(token, pair), terms);
  }

  // Adds an arrival's rows that came; a sum was multiplied before.
  void add_staged(int64_t token, size_t peer, int64_t arrival, TopkTerms& terms) const {
    const Arrivals& pair = plan_.sent[peer];
    const std::byte* staged = call_.staging_data + call_.staging.rows[peer];
    const auto a = static_cast<size_t>(arrival);
    const auto first = static_cast<size_t>(pair.route_begin[a]);
    if (returns_sum(plan_.shape, pair, arrival)) {
      terms.set(pair.k[first], {.row = staged + first * row_bytes_});
      return;
    }
    const auto source_weight = weights_of(token, pair);
    for (size_t j = first; j < static_cast<size_t>(pair.route_begin[a + 1]); ++j) {
      terms.set(pair.k[j], {staged + j * row_bytes_, factor_of(in_, pair, j, source_weight)});
    }
  }

  const CpuCall& call_;
  const PlanData& plan_;
  const CombineInput& in_;
  size_t row_bytes_;
  std::vector<bool> is_read_;              // by rank
  std::vector<const std::byte*> rows_of_;  // by rank, where its rows can be read here
};

// Traffic to a rank that adds by choice, from ranks of all domains alike.
[[nodiscard]] inline CountedTraffic sum_traffic(
    const PlanData& plan, const TopkRows& rows, bool has_weights
) {
  CountedTraffic traffic;
  for (size_t peer = 0; peer < plan.sent.size(); ++peer) {
    const Arrivals& pair = plan.sent[peer];
    const bool is_self = peer == static_cast<size_t>(plan.shape.rank);
    const int64_t num_arrivals = is_self ? 0 : pair.size();
    traffic.sources.push_back({.num_arrivals = num_arrivals, .peer = static_cast<int>(peer)});
    std::vector<uint64_t>& puts = traffic.puts.emplace_back();
    for (int64_t chunk = 0; chunk < num_chunks(num_arrivals); ++chunk) {
      const ChunkRange range = chunk_range(num_arrivals, chunk);
      uint64_t& count = puts.emplace_back(has_weights ? 1 : 0);
      for (int64_t i = range.first; i < range.last && !rows.reads(peer); ++i) {
        count += static_cast<uint64_t>(returned_rows(plan.shape, pair, i));
      }
    }
  }
  return traffic;
}

// Nothing is added up on its way between domains.
[[nodiscard]] inline ChunkTraffic crossing_traffic(
    const PlanData& /*plan*/, const TopkRows& /*rows*/
) {
  return {};
}

// Stand-in for CombineForward where nothing is forwarded.
struct NothingToForward {
  static bool is_claimed() { return true; }
  static bool has_ready() { return false; }
  static bool run_ready(int /*worker*/) { return false; }
  static void add_missing(std::vector<Missing>& /*late*/) {}
  static void settle() {}
};

}  // namespace weft
