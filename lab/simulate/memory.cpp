// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <numeric>
#include <utility>

#include "core/size_class.hpp"
#include "cpu/protocol/call_board.hpp"
#include "cpu/protocol/region_map.hpp"
#include "cuda/layout/control.hpp"
#include "cuda/layout/plan.hpp"
#include "hosts/call_memory.hpp"
#include "plan/build.hpp"
#include "plan/domain_traffic.hpp"
#include "simulate/simulate.hpp"

namespace weft::sim {
namespace {

constexpr int64_t kSmallScaleBytes = 256;  // of a token, which executors of GPUs keep room for

// The last may be smaller: where a resource ends is looked for at any number of ranks.
Domains domains_of(const Scenario& scenario, int rank) {
  const int most_members = scenario.is_flat ? scenario.num_ranks : scenario.ranks_per_domain;
  std::vector<std::vector<int>> domains;
  for (int member = 0; member < scenario.num_ranks; ++member) {
    if (member % most_members == 0) {
      domains.emplace_back();
    }
    domains.back().push_back(member);
  }
  return {std::move(domains), rank};
}

// Bytes that one rank's part in a routing takes.
class RankUse {
 public:
  RankUse(const Scenario& scenario, const Traffic& traffic, int rank)
      : scenario_(scenario), traffic_(traffic), rank_(rank), domains_(domains_of(scenario, rank)) {}

  // Records of all other ranks; of a source that this rank forwards, those for the whole domain,
  // bundled.
  [[nodiscard]] uint64_t records() const {
    uint64_t bytes = 0;
    for (int source = 0; source < scenario_.num_ranks; ++source) {
      if (source == rank_) {
        continue;
      }
      if (!forwards(source)) {
        bytes += record_bytes(source, rank_);
        continue;
      }
      for (const int member : domains_.near()) {
        bytes += sizeof(uint64_t) + record_bytes(source, member);
      }
    }
    return bytes;
  }

  // Rows of a dispatch or of a combine, whichever are more.
  [[nodiscard]] uint64_t staging() const {
    const uint64_t dispatched = staged_rows([this](int peer) { return dispatched_from(peer); });
    const uint64_t combined = staged_rows([this](int peer) { return combined_from(peer); });
    const uint64_t staged = std::max(dispatched, combined);
    return staged > 0 ? size_class(staged) : 0;
  }

 private:
  [[nodiscard]] bool forwards(int source) const {
    return !domains_.is_near(source) && domains_.forwarder(source, rank_) == rank_;
  }

  // Records from `source` for `to`, with weights.
  [[nodiscard]] uint64_t record_bytes(int source, int to) const {
    const uint64_t fixed = max_record_bytes(0, scenario_.topk);
    const uint64_t of_route = max_record_bytes(1, 2) - max_record_bytes(1, 1);
    const uint64_t of_arrival = max_record_bytes(1, 1) - fixed - of_route;
    const auto per_rank = static_cast<size_t>(scenario_.num_experts / scenario_.num_ranks);
    const auto routes = std::span(traffic_.counts[static_cast<size_t>(source)].routes)
                            .subspan(static_cast<size_t>(to) * per_rank, per_rank);
    const auto num_routes = std::accumulate(routes.begin(), routes.end(), uint64_t{0});
    return fixed + static_cast<uint64_t>(traffic_.arrivals(source, to)) * of_arrival +
           num_routes * of_route;
  }

  [[nodiscard]] int64_t inter_node_rows(int source, int domain) const {
    const auto num_domains = static_cast<size_t>(domains_.num_domains());
    return traffic_
        .domain_rows[static_cast<size_t>(source) * num_domains + static_cast<size_t>(domain)];
  }

  // A peer of the domain puts its own rows and those that it forwards.
  [[nodiscard]] int64_t dispatched_from(int peer) const {
    if (!domains_.is_near(peer)) {
      return forwards(peer) ? inter_node_rows(peer, domains_.own()) : 0;
    }
    int64_t rows = traffic_.arrivals(peer, rank_);
    for (const int source : domains_.forwarded_by(peer)) {
      rows += traffic_.arrivals(source, rank_);
    }
    return rows;
  }

  // Sums for this rank's tokens and for those that it forwards.
  [[nodiscard]] int64_t combined_from(int peer) const {
    if (!domains_.is_near(peer)) {
      const bool is_forwarder = domains_.forwarder(rank_, peer) == peer;
      return is_forwarder ? inter_node_rows(rank_, domains_.domain_of(peer)) : 0;
    }
    int64_t rows = traffic_.arrivals(rank_, peer);
    for (const int source : domains_.forwarded()) {
      rows += traffic_.arrivals(source, peer);
    }
    return rows;
  }

  // Each peer's begin at a multiple of 64 bytes.
  template <class RowsFrom>
  [[nodiscard]] uint64_t staged_rows(const RowsFrom& rows_from) const {
    uint64_t bytes = 0;
    for (int peer = 0; peer < scenario_.num_ranks; ++peer) {
      const int64_t rows = peer == rank_ ? 0 : rows_from(peer);
      bytes = align_up(bytes + static_cast<uint64_t>(rows * scenario_.row_bytes), 64);
    }
    return bytes;
  }

  const Scenario& scenario_;
  const Traffic& traffic_;
  int rank_;
  Domains domains_;
};

Memory::Cpu reserved_by_cpu(const Scenario& scenario) {
  const auto ranks = static_cast<uint64_t>(scenario.num_ranks);
  const Domains domains = domains_of(scenario, 0);
  const ControlMap map = {
      .num_ranks = ranks,
      .word_bytes = sizeof(CallWord),
      .payload_bytes = (static_cast<uint64_t>(scenario.num_experts) + ranks) * sizeof(int32_t),
      .record_bytes =
          domains.has_several()
              ? max_bundle_bytes(scenario.max_tokens, scenario.topk, domains.max_members())
              : max_record_bytes(scenario.max_tokens, scenario.topk)};
  const SignalMap signals = {
      .num_ranks = static_cast<uint32_t>(scenario.num_ranks),
      .max_chunks = static_cast<uint32_t>(num_chunks(scenario.max_tokens)),
      .has_crossings = domains.has_several(),
      .num_forwarded_pairs = domains.max_forwarded_pairs()};
  Memory::Cpu cpu;
  cpu.signals = uint64_t{signals.size()} * sizeof(uint64_t);
  cpu.words = map.record_offset(0);
  cpu.records = map.num_bytes() - map.record_offset(0);
  return cpu;
}

// Staging of CudaExchange::set_up: 16-bit rows with small scale rows.
uint64_t staging_of_gpu(const Scenario& scenario, int num_members) {
  constexpr int kUsualRanks = 8;
  const int64_t rows = std::max<int64_t>(scenario.max_tokens, 1) *
                       std::min(num_members, std::max(scenario.topk, kUsualRanks));
  return size_class(static_cast<uint64_t>(rows * (scenario.row_bytes + kSmallScaleBytes)));
}

// For inter-node tokens, as HostsExchange::reserve does, and for the image of a plan.
void add_inter_node(
    const Scenario& scenario, const Domains& domains, uint64_t block_bytes, Memory::Gpu& gpu
) {
  constexpr uint64_t kLeastBytes = uint64_t{1} << 20;
  const uint64_t forwarded = domains.forwarded().size();
  const CallRoom room = room_of_calls(
      {.num_others = static_cast<uint64_t>(domains.num_domains()) - 1,
       .num_forwarded = forwarded,
       .max_tokens = scenario.max_tokens,
       .max_topk = scenario.topk,
       .token_bytes = scenario.row_bytes + int64_t{scenario.topk} * 8 + kSmallScaleBytes}
  );
  const uint64_t image = size_class(2 * block_bytes * (1 + forwarded) + kLeastBytes);
  const uint64_t done = room.num_messages * sizeof(uint32_t);
  gpu.host = size_class(std::max(room.staging, kLeastBytes)) + room.messages + done + image;
  gpu.staging += size_class(room.work) + gpu.host;
}

Memory::Gpu reserved_by_gpu(const Scenario& scenario) {
  const Domains domains = domains_of(scenario, 0);
  const auto members = static_cast<uint32_t>(domains.near().size());
  const auto experts =
      static_cast<uint32_t>(int64_t{scenario.num_experts} * members / scenario.num_ranks);
  const auto tokens = static_cast<uint32_t>(scenario.max_tokens);
  const auto topk = static_cast<uint32_t>(scenario.topk);
  const auto hidden = static_cast<uint64_t>(scenario.row_bytes) / 2;
  const DeviceControlMap map = {
      members,
      experts,
      tokens,
      topk,
      domains.has_several() ? 0 : eager_row_room(members, tokens, topk, hidden)};
  const PlanMap plan = {members, experts, tokens, topk};
  const PlanMap block = {members, experts, tokens, topk, kMostReplicas};  // on a GPU any plan fits
  uint64_t rounds = 1;  // the same on all ranks of a domain
  for (const int member : domains.near()) {
    rounds = std::max<uint64_t>(rounds, 1 + domains.forwarded_by(member).size());
  }
  const uint64_t second_words = map.num_bytes() - map.second_word_offset(0, 0);
  Memory::Gpu gpu = {
      .signals = map.word_offset(0, 0),
      .words = map.weights_offset(0) - map.word_offset(0, 0) + second_words,
      .weights = map.num_bytes() - map.weights_offset(0) - second_words,
      .plan = rounds * block.num_bytes(),
      .staging = staging_of_gpu(scenario, static_cast<int>(members))};
  if (domains.has_several()) {
    add_inter_node(scenario, domains, plan.num_bytes(), gpu);
  }
  return gpu;
}

// Many small messages out of a card at once, until the last has arrived.
double card_us(const Model& model, int64_t messages, int64_t bytes) {
  if (messages == 0) {
    return 0;
  }
  const auto count = static_cast<double>(messages);
  const double posting = count * model.post_us / model.proxies;
  const double sending = count / model.card_messages;
  const double moving = static_cast<double>(bytes) / model.card_gbps / 1e3;
  return std::max({posting, sending, moving}) + model.card_latency_us;
}

double link_us(const Model& model, int64_t messages, int64_t bytes) {
  if (messages == 0) {
    return 0;
  }
  const double moving = static_cast<double>(bytes) / model.link_gbps / 1e3;
  return moving + static_cast<double>(messages) * model.link_signal_us + model.link_latency_us;
}

// Adds what records cost. By symmetry a rank sends as many bytes as it gets; records are taken to
// be of one length.
void add_records(
    const Scenario& scenario, const Model& model, int64_t record_bytes, ControlCost& cost
) {
  const int64_t intra = scenario.ranks_per_domain - 1;
  const int64_t inter = scenario.num_ranks - scenario.ranks_per_domain;
  const int64_t others = scenario.num_domains() - 1;
  const bool is_forwarded = others > 0 && !scenario.is_flat;
  // A bundle for each other domain, whose forwarder passes on all but its own records.
  const int64_t passed = is_forwarded ? others * intra : 0;
  const int64_t num_records = intra + inter + passed;
  const int64_t inter_bytes = num_records == 0 ? 0 : record_bytes * inter / num_records;
  const double inter_us = card_us(model, is_forwarded ? others : inter, inter_bytes);
  const double intra_us = link_us(model, intra + passed, record_bytes - inter_bytes);
  cost.plan_records_us = is_forwarded ? inter_us + intra_us : std::max(inter_us, intra_us);
  cost.plan_bytes_out += inter_bytes;
}

}  // namespace

Memory reserved_memory(const Scenario& scenario) {
  Memory memory;
  memory.cpu = reserved_by_cpu(scenario);
  memory.gpu = reserved_by_gpu(scenario);
  return memory;
}

Memory memory_of(const Scenario& scenario, const Traffic& traffic, int rank) {
  const RankTraffic& own = traffic.ranks[static_cast<size_t>(rank)];
  const auto row_bytes = static_cast<uint64_t>(scenario.row_bytes);
  Memory memory = reserved_memory(scenario);
  memory.output = static_cast<uint64_t>(own.num_rows) * row_bytes;
  memory.forwarder = scenario.is_flat ? 0 : static_cast<uint64_t>(own.card_in) * row_bytes;
  const RankUse use(scenario, traffic, rank);
  memory.cpu.records_used = use.records();
  memory.cpu.staging = use.staging();
  return memory;
}

ControlCost control_cost(const Scenario& scenario, const Model& model, const Memory& memory) {
  const int64_t intra = scenario.ranks_per_domain - 1;
  const int64_t inter = scenario.num_ranks - scenario.ranks_per_domain;
  const int64_t others = scenario.num_domains() - 1;
  const auto word = static_cast<int64_t>(sizeof(CallWord));
  const int64_t counts = (int64_t{scenario.num_experts} + scenario.num_ranks) * 4;
  const auto both = [&](int64_t bytes) {
    return std::max(card_us(model, inter, inter * bytes), link_us(model, intra, intra * bytes));
  };

  ControlCost cost;
  cost.word_messages = inter;
  // call_us holds the words of a domain.
  cost.words_us = card_us(model, inter, inter * word);
  cost.words_by_forwarder_us = others == 0 ? 0
                                           : card_us(model, others, others * word) +
                                                 link_us(model, intra, intra * others * word);
  cost.plan_words_us = both(word + counts);
  cost.plan_local_us =
      plan_work_us(model, scenario.num_ranks, scenario.num_experts, scenario.max_tokens);
  add_records(scenario, model, static_cast<int64_t>(memory.cpu.records_used), cost);
  cost.plan_bytes_out += inter * (word + counts);
  return cost;
}

}  // namespace weft::sim
