// SPDX-License-Identifier: Apache-2.0
#include "exchange/plan_records.hpp"

#include <cstring>

#include "plan/domain_traffic.hpp"

namespace weft {
namespace {

// An area of the control region is free again when its source begins the next plan call, for which
// it needs this rank's next call word.
class RecordSwap {
 public:
  RecordSwap(CpuExchange& state, const PlanData& plan)
      : state_(state),
        plan_(plan),
        domains_(*state.domains),
        rank_(state.context.rank),
        num_ranks_(state.context.num_ranks) {}

  void send_own() const {
    for (int domain = 0; domain < domains_.num_domains(); ++domain) {
      if (domain != domains_.own()) {
        send_bundle(domain);
      }
    }
    for (int step = 1; step < num_ranks_; ++step) {
      const int peer = (rank_ + step) % num_ranks_;
      if (domains_.is_near(peer)) {
        send(peer, rank_, encode_records(plan_.sent[static_cast<size_t>(peer)]));
      }
    }
  }

  // Each carried source's bundle, as it comes, to the ranks of this domain.
  void pass_on() {
    for (const int source : domains_.carried()) {
      state_.waiter->until_raised(reason(), {missing(source)});
      const auto records =
          unbundle_records(received(source), domains_.near().size(), source, state_.context);
      for (size_t m = 0; m < records.size(); ++m) {
        if (domains_.near()[m] != rank_) {
          send(domains_.near()[m], source, records[m]);
        }
      }
    }
  }

  void wait_for_all() {
    std::vector<Missing> wanted;
    for (int source = 0; source < num_ranks_; ++source) {
      if (source != rank_) {
        wanted.push_back(missing(source));
      }
    }
    state_.waiter->until_raised(reason(), wanted);
    for (const Missing& one : wanted) {
      state_.settled[one.signal] = one.wanted;
    }
  }

  [[nodiscard]] Arrivals received_from(int source) const {
    if (source == rank_) {
      return plan_.sent[static_cast<size_t>(rank_)];
    }
    std::span<const std::byte> records = received(source);
    if (!domains_.is_near(source) && domains_.between(source) < 0) {
      const auto place = static_cast<size_t>(domains_.place_of(rank_));
      records = unbundle_records(records, domains_.near().size(), source, state_.context)[place];
    }
    return decode_records(records, plan_, source, state_.context);
  }

  // Of the pairs (source, member), but for this rank's own.
  [[nodiscard]] std::vector<Arrivals> carried_from(
      int source, std::span<const int64_t> receiver_rows
  ) const {
    const std::span<const int> near = domains_.near();
    const auto records = unbundle_records(received(source), near.size(), source, state_.context);
    std::vector<Arrivals> pairs(near.size());
    for (size_t m = 0; m < near.size(); ++m) {
      if (near[m] != rank_) {
        const int64_t rows = receiver_rows[static_cast<size_t>(near[m])];
        pairs[m] = decode_records(records[m], plan_.shape, rows, source, state_.context);
      }
    }
    return pairs;
  }

 private:
  [[nodiscard]] WaitReason reason() const {
    return {.op = "plan", .call = state_.call_number, .what = "records"};
  }

  [[nodiscard]] Missing missing(int source) const {
    const uint32_t signal = state_.signals.records(static_cast<uint32_t>(source));
    return {
        .peer = source,
        .signal = signal,
        .wanted = state_.settled[signal] + 1,
        .via = domains_.between(source)};
  }

  // What lies in the area of `source`, its length bounded by the area's.
  [[nodiscard]] std::span<const std::byte> received(int source) const {
    const std::byte* area =
        state_.control.data + state_.control_map.record_offset(static_cast<uint64_t>(source));
    uint64_t length = 0;
    std::memcpy(&length, area, sizeof length);
    return {area + sizeof length, std::min(length, state_.control_map.record_bytes)};
  }

  void send_bundle(int domain) const {
    std::vector<std::vector<std::byte>> records;
    for (const int member : domains_.members(domain)) {
      records.push_back(encode_records(plan_.sent[static_cast<size_t>(member)]));
    }
    send(domains_.carrier_into(domain, rank_), rank_, bundle_records(records));
  }

  void send(int peer, int source, std::span<const std::byte> records) const {
    const uint64_t length = records.size();
    std::vector<std::byte> message(sizeof length + records.size());
    std::memcpy(message.data(), &length, sizeof length);
    std::memcpy(message.data() + sizeof length, records.data(), records.size());
    const Put put = {
        .source = message.data(),
        .bytes = message.size(),
        .region = state_.control_slots[static_cast<size_t>(peer)],
        .signal = state_.signals.records(static_cast<uint32_t>(source)),
        .offset = state_.control_map.record_offset(static_cast<uint64_t>(source))};
    state_.transport->put(peer, {&put, 1});
  }

  CpuExchange& state_;
  const PlanData& plan_;
  const Domains& domains_;
  int rank_;
  int num_ranks_;
};

// More tokens than the source said it has could not be numbered by chunk signals.
void check_carried(
    const std::vector<Arrivals>& pairs, int source, const RankCounts& counts, const Context& context
) {
  for (const Arrivals& pair : pairs) {
    const int64_t last = pair.token.empty() ? -1 : pair.token.back();
    if (last >= counts.num_tokens) {
      raise_error(
          ErrorCode::kTransport,
          context,
          fmt::format(
              "plan: records of rank {} are malformed: token {} is out of range (num_tokens = {})",
              source,
              last,
              counts.num_tokens
          )
      );
    }
  }
}

}  // namespace

SwappedRecords swap_records(
    CpuExchange& state,
    const PlanData& plan,
    std::span<const RankCounts> counts,
    std::span<const int64_t> receiver_rows
) {
  RecordSwap swap(state, plan);
  swap.send_own();
  swap.pass_on();
  swap.wait_for_all();
  SwappedRecords records;
  for (int source = 0; source < state.context.num_ranks; ++source) {
    records.received.push_back(swap.received_from(source));
  }
  for (const int source : state.domains->carried()) {
    const auto s = static_cast<size_t>(source);
    records.carried.push_back(swap.carried_from(source, receiver_rows));
    check_carried(records.carried.back(), source, counts[s], state.context);
    check_carried({records.received[s]}, source, counts[s], state.context);
  }
  return records;
}

}  // namespace weft
