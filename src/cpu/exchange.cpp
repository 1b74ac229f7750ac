// SPDX-License-Identifier: Apache-2.0
// Sets the CPU executor's exchange up, owns the memory that peers write, and answers for it. Each
// operation has its own file: plan_call.cpp, dispatch_call.cpp, combine_call.cpp.
#include "exchange/exchange_cpu.hpp"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <thread>

#include "core/env.hpp"
#include "core/host_map.hpp"
#include "core/memory_nodes.hpp"
#include "exchange/config_agreement.hpp"
#include "group/block_value.hpp"
#include "plan/build.hpp"
#include "transport/agree.hpp"

namespace weft {
namespace {

std::atomic<uint64_t> next_exchange_id = 1;

Context context_of(const Group& group) {
  return {.rank = group.rank(), .num_ranks = group.num_ranks()};
}

// The host's cores, shared among the ranks that run on it.
int default_num_threads(const Group& group) {
  const auto& hosts = group.topology().host_of;
  const auto mine =
      std::count(hosts.begin(), hosts.end(), hosts[static_cast<size_t>(group.rank())]);
  const auto cores = static_cast<int>(std::max(1U, std::thread::hardware_concurrency()));
  return std::max(1, cores / static_cast<int>(mine));
}

template <class T>
std::span<const std::byte> bytes_of(const T& value) {
  return std::as_bytes(std::span(&value, 1));
}

}  // namespace

CpuExchange::CpuExchange(
    const Group& group,
    const ExchangeConfig& wanted,
    std::vector<std::vector<int>> domains_wanted,
    const std::string& gpu
)
    : settings(wanted),
      context(context_of(group)),
      id(next_exchange_id++),
      domains(std::make_shared<const Domains>(std::move(domains_wanted), context.rank)) {
  agree_on_config(group, settings, context);
  const Env env = Env::read();
  if (settings.num_threads == 0) {
    settings.num_threads = env.num_threads > 0 ? env.num_threads : default_num_threads(group);
  }
  if (settings.transport == "auto") {
    settings.transport = env.transport;
  }
  if (settings.fan_out == FanOut::kAuto) {
    settings.fan_out = num_memory_nodes() == 1 ? FanOut::kSource : FanOut::kReceiver;
  }
  signals = {
      .num_ranks = static_cast<uint32_t>(context.num_ranks),
      .max_chunks = static_cast<uint32_t>(num_chunks(settings.max_tokens)),
      .has_crossings = domains->has_several(),
      .num_carried_pairs = domains->max_carried_pairs()};
  settled.resize(signals.size());
  transport = make_transport(
      settings.transport, group, signals.size(), {.timeout = settings.timeout, .device = gpu}
  );
  settings.transport = transport->name();
  context.transport = settings.transport;
  waiter = std::make_unique<Waiter>(*transport, context, settings.timeout);
  agree(group, [&] {
    workers = std::make_unique<WorkerPool>(
        settings.num_threads, gpu.empty() ? std::vector<int>() : HostMap::here().cores_near(gpu)
    );
  });
  pool = std::make_shared<BufferPool>(transport);
  connect(group);
}

// Tells every rank where this rank's control region is.
void CpuExchange::connect(const Group& group) {
  const auto ranks = static_cast<uint64_t>(context.num_ranks);
  control_map = {
      .num_ranks = ranks,
      .word_bytes = sizeof(CallWord),
      .payload_bytes = (static_cast<uint64_t>(settings.num_experts) + ranks) * sizeof(int32_t),
      .record_bytes =
          domains->has_several()
              ? max_bundle_bytes(settings.max_tokens, settings.max_topk, domains->max_members())
              : max_record_bytes(settings.max_tokens, settings.max_topk)};
  agree(group, [&] { control = transport->allocate(control_map.num_bytes()); });
  const std::vector<Bytes> refs = group.all_gather(bytes_of(control.ref));
  agree(group, [&] {  // nobody leaves the constructor before everybody can be written to
    for (size_t rank = 0; rank < refs.size(); ++rank) {
      const auto ref = block_value<RegionRef>(refs[rank], rank, context);
      transport->import(static_cast<int>(rank), ref);
      control_slots.push_back(ref.slot);
    }
    board = std::make_unique<CallBoard>(*transport, *waiter, context, control_map, signals);
    board->connect(control.data, control_slots);
  });
}

CpuExchange::~CpuExchange() {
  if (transport) {
    transport->close();  // a Buffer may keep the memory alive, peers shall not wait for it
  }
}

int CpuExchange::find_gone_peer(std::chrono::milliseconds patience) const {
  const auto deadline = std::chrono::steady_clock::now() + patience;
  for (;;) {
    for (const PeerState wanted : {PeerState::kDied, PeerState::kLeft}) {
      for (int peer = 0; peer < context.num_ranks; ++peer) {
        if (peer != context.rank && transport->peer_state(peer) == wanted) {
          return peer;
        }
      }
    }
    if (std::chrono::steady_clock::now() >= deadline) {
      return -1;
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

std::exception_ptr CpuExchange::cause_of(Op op, const Error& error) const {
  const bool is_unmapped = error.code() == ErrorCode::kNotAvailable;
  if (error.code() != ErrorCode::kTransport && !is_unmapped) {
    return std::current_exception();
  }
  // The memory of a peer that dies is gone a moment before its death can be seen.
  const int peer = find_gone_peer(std::chrono::milliseconds(is_unmapped ? 1000 : 0));
  if (peer < 0) {
    return std::current_exception();
  }
  const std::string problem = fmt::format(
      "{}: rank {} {} during call {} ({})",
      op_name(op),
      peer,
      transport->peer_state(peer) == PeerState::kDied ? "died" : "left the exchange",
      call_number,
      error.what()
  );
  try {
    raise_error(ErrorCode::kPeerFailed, context, problem);
  } catch (const Error&) {
    return std::current_exception();
  }
}

CallWord CpuExchange::new_word(Op op) const {
  CallWord word;
  word.call = call_number;
  word.op = op;
  return word;
}

// Grows in steps; nobody writes there between calls.
void CpuExchange::reserve_staging(uint64_t bytes) {
  if (bytes <= staging.ref.bytes) {
    return;
  }
  if (staging.data != nullptr) {
    transport->release(staging.ref);
    staging = {};
  }
  staging = transport->allocate(size_class(bytes));
}

Target CpuExchange::staging_at(uint64_t offset) const {
  return {.region = staging.ref, .offset = offset, .place = Place::kStaging};
}

bool CpuExchange::may_touch_peers() const {
  const uint32_t own_slot = control_slots[static_cast<size_t>(context.rank)];
  return settings.fan_out == FanOut::kSource &&
         transport->mapped(context.rank, own_slot) != nullptr;
}

void CpuExchange::import_targets(std::span<const CallWord> words) {
  for (size_t rank = 0; rank < words.size(); ++rank) {
    const CallWord& word = words[rank];
    for (const Target& target :
         {word.rows, word.scales, word.weights, word.source_weights, word.own_rows}) {
      if (target.region.generation != 0 && rank != static_cast<size_t>(context.rank)) {
        transport->import(static_cast<int>(rank), target.region);
      }
    }
  }
}

Buffer CpuExchange::allocate(const Tensor& shape) {
  Tensor tensor = shape;
  const auto region = pool->take(static_cast<uint64_t>(tensor.num_bytes()));
  tensor.data = region->data;
  return {tensor, std::const_pointer_cast<Region>(region)};
}

void CpuExchange::count_crossings(const CrossingCount& count, int64_t row_bytes) {
  counters.crossing_bytes += count.rows * row_bytes;
  counters.crossing_bytes_by_arrival += count.arrivals * row_bytes;
}

ExchangeStats CpuExchange::stats() const {
  ExchangeStats stats = counters;
  stats.wait_seconds = waiter->wait_seconds();
  return stats;
}

Footprint CpuExchange::footprint() const {
  return {
      .control_bytes = static_cast<int64_t>(control.ref.bytes),
      .staging_bytes = static_cast<int64_t>(staging.ref.bytes),
      .buffer_bytes = static_cast<int64_t>(pool->used_bytes()),
      .pooled_bytes = static_cast<int64_t>(pool->unused_bytes())};
}

std::unique_ptr<Exchange::State> make_cpu_exchange(
    const Group& group, const ExchangeConfig& config
) {
  return std::make_unique<CpuExchange>(group, config);
}

}  // namespace weft
