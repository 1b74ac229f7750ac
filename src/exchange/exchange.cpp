// SPDX-License-Identifier: Apache-2.0
// Sequences every call: check arguments, swap call words, hand over to the executor. Owns the
// memory that peers write. Previous in the data flow: plan/place_routes.cpp; next:
// dispatch_cpu.cpp.
#include "weft/exchange.hpp"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <thread>

#include "core/check.hpp"
#include "exchange/buffer_pool.hpp"
#include "exchange/call_board.hpp"
#include "exchange/cpu_call.hpp"
#include "exchange/validate.hpp"
#include "plan/build.hpp"

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

// What must be equal on all ranks, and whether this rank's config is good at all.
struct ConfigWord {
  int64_t hidden;
  int64_t max_tokens;
  int64_t num_experts;
  int64_t max_topk;
  uint64_t is_refused;
  std::array<char, 512> refusal;
};

// Collective: a config that is wrong on one rank is an error on all.
void agree_on_config(const Group& group, const ExchangeConfig& config, const Context& context) {
  ConfigWord own = {config.hidden, config.max_tokens, config.num_experts, config.max_topk, 0, {}};
  std::exception_ptr failure;
  try {
    validate_config(config, context);
  } catch (const Error& error) {
    failure = std::current_exception();
    own.is_refused = 1;
    std::string_view(error.what()).copy(own.refusal.data(), own.refusal.size() - 1);
  }
  const std::vector<Bytes> blocks = group.all_gather(bytes_of(own));
  if (failure) {
    std::rethrow_exception(failure);
  }
  for (size_t rank = 0; rank < blocks.size(); ++rank) {
    ConfigWord word;
    WEFT_CHECK(
        context,
        blocks[rank].size() == sizeof word,
        ErrorCode::kPeerFailed,
        "exchange: rank {} sent {} bytes of config (expected {}; are all ranks of one version?)",
        rank,
        blocks[rank].size(),
        sizeof word
    );
    std::memcpy(&word, blocks[rank].data(), sizeof word);
    WEFT_CHECK_ARG(
        context, word.is_refused == 0, "exchange: rank {} refused: {}", rank, word.refusal.data()
    );
    const auto compare = [&](std::string_view name, int64_t mine, int64_t theirs) {
      WEFT_CHECK_ARG(
          context,
          mine == theirs,
          "exchange: {} = {} here and {} on rank {} (must be equal on all ranks)",
          name,
          mine,
          theirs,
          rank
      );
    };
    compare("hidden", own.hidden, word.hidden);
    compare("max_tokens", own.max_tokens, word.max_tokens);
    compare("num_experts", own.num_experts, word.num_experts);
    compare("max_topk", own.max_topk, word.max_topk);
  }
}

}  // namespace

struct Exchange::State {
  State(const Group& group, const ExchangeConfig& wanted);

  Plan make_plan(const Routing& routing, const PlanOptions& options);
  void dispatch(const PlanData& plan, const DispatchInput& in, const DispatchOutput& out);
  void combine(const PlanData& plan, const CombineInput& in, const CombineOutput& out);

  // Runs one call under the rules of exchange.hpp: `prepare` may refuse, everything after it may
  // only break.
  template <class Prepare, class Run>
  auto call(Op op, const Prepare& prepare, const Run& run);

  void connect(const Group& group);
  [[nodiscard]] std::vector<RankCounts> counts_of(std::span<const CallWord> words) const;
  [[nodiscard]] std::vector<Arrivals> swap_records(const PlanData& plan);
  void reserve_staging(uint64_t bytes);
  [[nodiscard]] Target staging_at(uint64_t offset) const;
  void import_targets(std::span<const CallWord> words);
  [[nodiscard]] CallWord new_word(Op op) const;

  ExchangeConfig config;
  Context context;
  uint64_t id = next_exchange_id++;
  std::shared_ptr<Transport> transport;
  std::string transport_name;
  ControlMap control_map;
  SignalMap signals;
  std::vector<uint64_t> settled;
  std::unique_ptr<Waiter> waiter;
  std::unique_ptr<WorkerPool> workers;
  std::unique_ptr<CallBoard> board;
  std::shared_ptr<BufferPool> pool;
  Region control;
  std::vector<uint32_t> control_slots;  // [num_ranks] of the peers' control regions
  Region staging;
  uint64_t call_number = 0;
  std::exception_ptr broken;  // why the exchange can no longer be used
  ExchangeStats counters;
};

Exchange::State::State(const Group& group, const ExchangeConfig& wanted)
    : config(wanted), context(context_of(group)) {
  agree_on_config(group, config, context);
  if (config.num_threads == 0) {
    config.num_threads = default_num_threads(group);
  }
  signals = {
      .num_ranks = static_cast<uint32_t>(context.num_ranks),
      .max_chunks = static_cast<uint32_t>(num_chunks(config.max_tokens))};
  settled.resize(signals.size());
  transport = make_transport(config.transport, group, signals.size());
  config.transport = transport->name();
  transport_name = config.transport;
  context.transport = transport_name;
  waiter = std::make_unique<Waiter>(*transport, context, config.timeout);
  workers = std::make_unique<WorkerPool>(config.num_threads);
  pool = std::make_shared<BufferPool>(transport);
  connect(group);
}

// Tells every rank where this rank's control region is.
void Exchange::State::connect(const Group& group) {
  const auto ranks = static_cast<uint64_t>(context.num_ranks);
  control_map = {
      .num_ranks = ranks,
      .word_bytes = sizeof(CallWord),
      .payload_bytes = (static_cast<uint64_t>(config.num_experts) + ranks) * sizeof(int32_t),
      .record_bytes = max_record_bytes(config.max_tokens, config.max_topk)};
  control = transport->allocate(control_map.num_bytes());
  const std::vector<Bytes> refs = group.all_gather(bytes_of(control.ref));
  for (size_t rank = 0; rank < refs.size(); ++rank) {
    RegionRef ref;
    std::memcpy(&ref, refs[rank].data(), sizeof ref);
    transport->import(static_cast<int>(rank), ref);
    control_slots.push_back(ref.slot);
  }
  board = std::make_unique<CallBoard>(*transport, *waiter, context, control_map, signals);
  board->connect(control.data, control_slots);
  group.barrier();  // nobody leaves the constructor before everybody can be written to
}

template <class Prepare, class Run>
auto Exchange::State::call(Op op, const Prepare& prepare, const Run& run) {
  if (broken) {
    std::rethrow_exception(broken);
  }
  call_number = board->next_call();
  const auto prepared = [&] {
    try {
      return prepare();
    } catch (const Error& refusal) {
      try {
        board->refuse(op, refusal.what());
      } catch (...) {
        broken = std::current_exception();
      }
      throw;
    }
  }();
  try {
    return run(prepared);
  } catch (const Error& error) {
    if (error.code() != ErrorCode::kInvalidArgument) {
      broken = std::current_exception();
    }
    throw;
  } catch (...) {
    broken = std::current_exception();
    throw;
  }
}

CallWord Exchange::State::new_word(Op op) const {
  CallWord word;
  word.call = call_number;
  word.op = op;
  return word;
}

Plan Exchange::State::make_plan(const Routing& routing, const PlanOptions& options) {
  const auto prepare = [&] {
    check_options(options, context);
    return read_routing(routing, config.num_experts, config.max_topk, config.max_tokens, context);
  };
  return call(Op::kPlan, prepare, [&](const RouteTable& routes) {
    const RankCounts own = count_routes(routes, config.num_experts, context.num_ranks, options);
    CallWord word = new_word(Op::kPlan);
    word.signature = {
        static_cast<int64_t>(options.layout),
        options.pad_multiple,
        options.expert_stride,
        static_cast<int64_t>(options.overflow),
        routes.topk,
        routes.from_map,
        !routes.weight.empty() || routing.weights.is_given()};
    word.num_tokens = own.num_tokens;
    word.row_budget = own.row_budget;
    std::vector<int32_t> payload = own.routes;
    payload.insert(payload.end(), own.arrivals.begin(), own.arrivals.end());
    const std::vector<CallWord> to(static_cast<size_t>(context.num_ranks), word);
    const std::vector<CallWord> words = board->swap(to, std::as_bytes(std::span(payload)));
    PlanData data =
        place_routes(routes, counts_of(words), context.rank, config.num_experts, options, context);
    data.exchange_id = id;
    data.call = call_number;
    add_received(data, swap_records(data));
    ++counters.num_plans;
    return Plan(std::make_shared<const PlanData>(std::move(data)));
  });
}

std::vector<RankCounts> Exchange::State::counts_of(std::span<const CallWord> words) const {
  std::vector<RankCounts> counts;
  for (int rank = 0; rank < context.num_ranks; ++rank) {
    const std::byte* payload = board->payload(rank).data();
    const CallWord& word = words[static_cast<size_t>(rank)];
    RankCounts& one = counts.emplace_back();
    one.num_tokens = word.num_tokens;
    one.row_budget = word.row_budget;
    one.routes.resize(static_cast<size_t>(config.num_experts));
    one.arrivals.resize(static_cast<size_t>(context.num_ranks));
    const size_t route_bytes = one.routes.size() * sizeof(int32_t);
    std::memcpy(one.routes.data(), payload, route_bytes);
    std::memcpy(one.arrivals.data(), payload + route_bytes, one.arrivals.size() * sizeof(int32_t));
  }
  return counts;
}

// Each pair's slots travel from source to receiver. An area is free again when its source begins
// the next plan call, for which it needs this rank's next call word.
std::vector<Arrivals> Exchange::State::swap_records(const PlanData& plan) {
  std::vector<Missing> wanted;
  for (int step = 1; step < context.num_ranks; ++step) {
    const int peer = (context.rank + step) % context.num_ranks;
    const auto p = static_cast<size_t>(peer);
    const std::vector<std::byte> records = encode_records(plan.sent[p]);
    const uint64_t length = records.size();
    std::vector<std::byte> message(sizeof length + records.size());
    std::memcpy(message.data(), &length, sizeof length);
    std::memcpy(message.data() + sizeof length, records.data(), records.size());
    const Put put = {
        .source = message.data(),
        .bytes = message.size(),
        .region = control_slots[p],
        .signal = signals.records(static_cast<uint32_t>(context.rank)),
        .offset = control_map.record_offset(static_cast<uint64_t>(context.rank))};
    transport->put(peer, {&put, 1});
    const uint32_t signal = signals.records(static_cast<uint32_t>(peer));
    wanted.push_back({.peer = peer, .signal = signal, .wanted = ++settled[signal]});
  }
  waiter->until_raised({.op = "plan", .call = call_number, .what = "records"}, wanted);
  std::vector<Arrivals> received;
  for (int source = 0; source < context.num_ranks; ++source) {
    const auto s = static_cast<size_t>(source);
    if (source == context.rank) {
      received.push_back(plan.sent[s]);
      continue;
    }
    const std::byte* area = control.data + control_map.record_offset(s);
    uint64_t length = 0;
    std::memcpy(&length, area, sizeof length);
    length = std::min(length, control_map.record_bytes);
    received.push_back(decode_records({area + sizeof length, length}, plan, source, context));
  }
  return received;
}

// Grows in steps; nobody writes there between calls.
void Exchange::State::reserve_staging(uint64_t bytes) {
  if (bytes <= staging.ref.bytes) {
    return;
  }
  if (staging.data != nullptr) {
    transport->release(staging.ref);
    staging = {};
  }
  staging = transport->allocate(size_class(bytes));
}

Target Exchange::State::staging_at(uint64_t offset) const {
  return {.region = staging.ref, .offset = offset, .by_slot = 0};
}

void Exchange::State::import_targets(std::span<const CallWord> words) {
  for (size_t rank = 0; rank < words.size(); ++rank) {
    const CallWord& word = words[rank];
    for (const Target& target : {word.rows, word.scales, word.weights, word.source_weights}) {
      if (target.region.generation != 0 && rank != static_cast<size_t>(context.rank)) {
        transport->import(static_cast<int>(rank), target.region);
      }
    }
  }
}

void Exchange::State::dispatch(
    const PlanData& plan, const DispatchInput& in, const DispatchOutput& out
) {
  struct Ready {
    std::optional<Region> rows;
    std::optional<Region> scales;
    Staging staging;
  };
  const auto prepare = [&] {
    Validator{context, config, id}.dispatch(plan, in, out);
    const auto region_of = [&](const Tensor& tensor) {
      return pool->find(tensor.data, static_cast<uint64_t>(tensor.num_bytes()));
    };
    Ready ready = {.rows = region_of(out.rows), .scales = region_of(out.scales), .staging = {}};
    const auto staged_bytes = [](const ConstTensor& tensor, bool is_direct) {
      return tensor.is_given() && !is_direct ? static_cast<uint64_t>(tensor.row_bytes()) : 0;
    };
    ready.staging = dispatch_staging(
        plan,
        {.rows = staged_bytes(in.x, ready.rows.has_value()),
         .scales = staged_bytes(in.scales, ready.scales.has_value()),
         .weights = in.weights.is_given() ? sizeof(float) : 0}
    );
    reserve_staging(ready.staging.num_bytes);
    return ready;
  };
  call(Op::kDispatch, prepare, [&](const Ready& ready) {
    CallWord word = new_word(Op::kDispatch);
    word.signature = {
        static_cast<int64_t>(plan.call),
        static_cast<int64_t>(in.x.dtype),
        in.x.row_bytes(),
        in.scales.is_given() ? in.scales.row_bytes() : -1,
        in.weights.is_given()};
    std::vector<CallWord> to(static_cast<size_t>(context.num_ranks), word);
    for (size_t source = 0; source < to.size(); ++source) {
      const auto place =
          [&](const std::optional<Region>& region, const Tensor& tensor, uint64_t offset) {
            if (!region) {
              return staging_at(offset);
            }
            const auto begin = static_cast<uint64_t>(tensor.data - region->data);
            return Target{.region = region->ref, .offset = begin, .by_slot = 1};
          };
      to[source].rows = place(ready.rows, out.rows, ready.staging.rows[source]);
      to[source].scales = place(ready.scales, out.scales, ready.staging.scales[source]);
      to[source].weights = staging_at(ready.staging.weights[source]);
    }
    const std::vector<CallWord> words = board->swap(to, {});
    import_targets(words);
    std::vector<CallWord> targets = words;
    targets[static_cast<size_t>(context.rank)] = to[static_cast<size_t>(context.rank)];
    const CpuRank rank = {*transport, *waiter, *workers, signals, settled};
    const CpuCall cpu_call = {call_number, plan, targets, ready.staging, staging.data};
    dispatch_cpu(rank, cpu_call, in, out);
    ++counters.num_dispatches;
  });
}

void Exchange::State::combine(
    const PlanData& plan, const CombineInput& in, const CombineOutput& out
) {
  const auto prepare = [&] {
    Validator{context, config, id}.combine(plan, in, out);
    const bool has_source_weights = in.scale == CombineScale::kSourceWeights;
    Staging ready = combine_staging(
        plan,
        {.rows = static_cast<uint64_t>(in.rows.row_bytes()),
         .weights = in.weights.is_given() ? sizeof(float) : 0,
         .source_weights = has_source_weights ? sizeof(float) : 0}
    );
    reserve_staging(ready.num_bytes);
    return ready;
  };
  call(Op::kCombine, prepare, [&](const Staging& ready) {
    CallWord word = new_word(Op::kCombine);
    word.signature = {
        static_cast<int64_t>(plan.call),
        static_cast<int64_t>(in.rows.dtype),
        in.rows.row_bytes(),
        static_cast<int64_t>(in.scale),
        in.weights.is_given()};
    std::vector<CallWord> to(static_cast<size_t>(context.num_ranks), word);
    for (size_t peer = 0; peer < to.size(); ++peer) {
      to[peer].rows = staging_at(ready.rows[peer]);
      to[peer].weights = staging_at(ready.weights[peer]);
      to[peer].source_weights = staging_at(ready.source_weights[peer]);
    }
    const std::vector<CallWord> words = board->swap(to, {});
    import_targets(words);
    const CpuRank rank = {*transport, *waiter, *workers, signals, settled};
    const CpuCall cpu_call = {call_number, plan, words, ready, staging.data};
    combine_cpu(rank, cpu_call, in, out);
    ++counters.num_combines;
  });
}

Exchange::Exchange(const Group& group, const ExchangeConfig& config)
    : state_(std::make_unique<State>(group, config)) {}
Exchange::~Exchange() {
  if (state_ && state_->transport) {
    state_->transport->close();
  }
}
Exchange::Exchange(Exchange&&) noexcept = default;
Exchange& Exchange::operator=(Exchange&&) noexcept = default;

Plan Exchange::plan(const Routing& routing, const PlanOptions& options) {
  return state_->make_plan(routing, options);
}

void Exchange::dispatch(const Plan& plan, const DispatchInput& in, const DispatchOutput& out) {
  state_->dispatch(plan.data(), in, out);
}

void Exchange::combine(const Plan& plan, const CombineInput& in, const CombineOutput& out) {
  state_->combine(plan.data(), in, out);
}

Buffer Exchange::allocate(int64_t rows, int64_t cols, DType dtype) {
  WEFT_CHECK_ARG(
      state_->context,
      rows >= 0 && cols >= 0,
      "allocate: shape [{}, {}] (expected no negative size)",
      rows,
      cols
  );
  Tensor tensor = {.data = nullptr, .dtype = dtype, .rows = rows, .cols = cols};
  const auto region = state_->pool->take(static_cast<uint64_t>(tensor.num_bytes()));
  tensor.data = region->data;
  return {tensor, std::const_pointer_cast<Region>(region)};
}

void Exchange::release_pooled() {
  state_->pool->release_unused();
}
int Exchange::rank() const {
  return state_->context.rank;
}
int Exchange::num_ranks() const {
  return state_->context.num_ranks;
}
const ExchangeConfig& Exchange::config() const {
  return state_->config;
}

ExchangeStats Exchange::stats() const {
  ExchangeStats stats = state_->counters;
  stats.wait_seconds = state_->waiter->wait_seconds();
  return stats;
}

Footprint Exchange::footprint() const {
  return {
      .control_bytes = static_cast<int64_t>(state_->control.ref.bytes),
      .staging_bytes = static_cast<int64_t>(state_->staging.ref.bytes),
      .buffer_bytes = static_cast<int64_t>(state_->pool->used_bytes()),
      .pooled_bytes = static_cast<int64_t>(state_->pool->unused_bytes())};
}

}  // namespace weft
