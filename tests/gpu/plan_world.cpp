// SPDX-License-Identifier: Apache-2.0
#include "gpu/plan_world.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <optional>

#include "cuda/plan/balance/launch.hpp"
#include "cuda/plan/download.hpp"
#include "gpu/device_bytes.hpp"
#include "plan/plan_data.hpp"
#include "plan/slots.hpp"
#include "support/compare.hpp"

namespace weft::test {
namespace {

constexpr uint32_t kPlanRegion = 1;

DeviceBytes copy_matrix(const Matrix& matrix) {
  const ConstTensor view = matrix.view();
  return device_copy(view.data, static_cast<size_t>(view.num_bytes()));
}

void sync_device() {
  WEFT_CUDA(Context{}, cudaDeviceSynchronize());
}

}  // namespace

struct PlanWorld::Rank {
  DeviceBytes control;
  DeviceBytes block;
  DeviceBytes regions;
  DeviceBytes local;
  DeviceBytes scratch;
  DeviceBytes counts;
  PinnedBytes fault;
  PinnedBytes host_shape;
  DeviceBytes indices;
  DeviceBytes weights;
  cudaStream_t stream = nullptr;
  cudaEvent_t begin = nullptr;
  cudaEvent_t end = nullptr;
  PlanLaunch call;
};

PlanWorld::PlanWorld(const ExchangeSetup& setup, int num_blocks, uint64_t timeout_ns)
    : setup_(setup) {
  const auto num_ranks = static_cast<uint32_t>(setup.num_ranks);
  const auto num_experts = static_cast<uint32_t>(setup.num_experts);
  const auto max_tokens = static_cast<uint32_t>(setup.max_tokens);
  const auto max_topk = static_cast<uint32_t>(setup.max_topk);
  const PlanMap map = {num_ranks, num_experts, max_tokens, max_topk};
  const DeviceControlMap control_map = {num_ranks, num_experts, max_tokens, max_topk};
  prepare_plan(map);
  prepare_swap_counts();
  for (int r = 0; r < setup.num_ranks; ++r) {
    auto rank = std::make_unique<Rank>();
    rank->control = device_bytes(control_map.num_bytes());
    rank->block = device_bytes(map.num_bytes());
    rank->local = device_bytes(sizeof(LocalState));
    rank->scratch = device_bytes(plan_scratch_bytes(map));
    rank->counts = device_bytes(sizeof(int32_t) * num_ranks * num_experts);
    rank->fault = pinned_bytes(sizeof(FaultRecord));
    rank->host_shape = pinned_bytes(map.shape_bytes() + sizeof(uint32_t));
    WEFT_CUDA(Context{}, cudaStreamCreateWithFlags(&rank->stream, cudaStreamNonBlocking));
    WEFT_CUDA(Context{}, cudaEventCreate(&rank->begin));
    WEFT_CUDA(Context{}, cudaEventCreate(&rank->end));
    ranks_.push_back(std::move(rank));
  }
  std::vector<std::byte*> table(size_t{num_ranks} * kMaxPeerRegions, nullptr);
  for (size_t r = 0; r < ranks_.size(); ++r) {
    table[r * kMaxPeerRegions] = ranks_[r]->control.get();
    table[r * kMaxPeerRegions + kPlanRegion] = ranks_[r]->block.get();
  }
  for (int r = 0; r < setup.num_ranks; ++r) {
    Rank& rank = *ranks_[static_cast<size_t>(r)];
    rank.regions = device_copy(table.data(), table.size() * sizeof(table[0]));
    PlanLaunch& call = rank.call;
    call.me.rank = r;
    call.me.num_ranks = setup.num_ranks;
    call.me.map = control_map;
    for (size_t peer = 0; peer < ranks_.size(); ++peer) {
      call.me.control[peer] = ranks_[peer]->control.get();
    }
    call.me.regions = reinterpret_cast<std::byte* const*>(rank.regions.get());
    call.me.new_regions = call.me.regions;
    call.me.local = reinterpret_cast<LocalState*>(rank.local.get());
    call.me.fault = reinterpret_cast<FaultRecord*>(rank.fault.get());
    call.me.timeout_ns = timeout_ns;
    call.plan = {rank.block.get(), map};
    call.plan_address = {kPlanRegion, 0, 0};
    call.host_shape = rank.host_shape.get();
    call.scratch = reinterpret_cast<int32_t*>(rank.scratch.get());
    call.num_blocks = num_blocks;
  }
}

PlanWorld::~PlanWorld() {
  static_cast<void>(cudaDeviceSynchronize());
  for (const auto& rank : ranks_) {
    static_cast<void>(cudaEventDestroy(rank->begin));
    static_cast<void>(cudaEventDestroy(rank->end));
    static_cast<void>(cudaStreamDestroy(rank->stream));
  }
}

void PlanWorld::load(const CaseData& data) {
  for (size_t r = 0; r < ranks_.size(); ++r) {
    Rank& rank = *ranks_[r];
    const RankRouting& routing = data.routing[r];
    const bool from_map = data.spec.index == IndexKind::kMap;
    rank.indices = copy_matrix(from_map ? routing.map : routing.topk_idx);
    PlanLaunch& call = rank.call;
    call.map = from_map ? reinterpret_cast<const bool*>(rank.indices.get()) : nullptr;
    call.topk_idx = from_map ? nullptr : rank.indices.get();
    call.index_bytes = data.spec.index == IndexKind::kInt32 ? 4 : 8;
    call.num_tokens = static_cast<int32_t>(data.spec.num_tokens[r]);
    call.ignores_unknown = routing.ignores_unknown;
    call.topk = from_map ? setup_.max_topk : data.spec.topk;
    call.by_topk = FastDivide(static_cast<uint32_t>(call.topk));
    call.weights = nullptr;
    call.has_weights = data.spec.has_plan_weights;
    if (data.spec.has_plan_weights) {
      rank.weights = copy_matrix(routing.weights);
      call.weights = reinterpret_cast<const float*>(rank.weights.get());
    }
    call.layout = routing.options.layout;
    call.pad_multiple = routing.options.pad_multiple;
    call.expert_stride = routing.options.expert_stride;
    call.row_budget = routing.options.row_budget.value_or(-1);
    for (int word = 0; word < kSignatureWords; ++word) {
      call.signature.words[word] = 100 + word;
    }
  }
  sync_device();
}

PlanLaunch& PlanWorld::launch_of(int rank) {
  return ranks_[static_cast<size_t>(rank)]->call;
}

void PlanWorld::start(int rank) {
  Rank& one = *ranks_[static_cast<size_t>(rank)];
  launch_plan(one.call, one.stream);
}

void PlanWorld::start_swap(int rank) {
  Rank& one = *ranks_[static_cast<size_t>(rank)];
  launch_swap_counts(one.call, reinterpret_cast<int32_t*>(one.counts.get()), one.stream);
}

void PlanWorld::start_second(int rank) {
  Rank& one = *ranks_[static_cast<size_t>(rank)];
  PlanLaunch second = one.call;
  second.is_second = true;
  launch_plan(second, one.stream);
}

std::vector<int32_t> PlanWorld::swapped(int rank) const {
  const PlanMap& map = ranks_[static_cast<size_t>(rank)]->call.plan.map;
  std::vector<int32_t> counts(size_t{map.num_ranks} * map.num_experts);
  const void* from = ranks_[static_cast<size_t>(rank)]->counts.get();
  const size_t num_bytes = counts.size() * sizeof(int32_t);
  WEFT_CUDA(Context{}, cudaMemcpy(counts.data(), from, num_bytes, cudaMemcpyDeviceToHost));
  return counts;
}

void PlanWorld::wait() {
  sync_device();
}

FaultRecord PlanWorld::fault(int rank) const {
  FaultRecord record;
  std::memcpy(&record, ranks_[static_cast<size_t>(rank)]->fault.get(), sizeof(record));
  return record;
}

std::string PlanWorld::difference(const CaseData& data) {
  std::vector<Plan> made;
  for (size_t r = 0; r < ranks_.size(); ++r) {
    const Rank& rank = *ranks_[r];
    PlanShape shape = contents_of(data.plans[r]).shape;
    shape.options.expert_stride = data.routing[r].options.expert_stride;
    PlanData plan = download_plan(rank.call.me, rank.call.plan, shape, rank.stream);
    made.emplace_back(std::make_shared<const PlanData>(std::move(plan)));
  }
  for (int r = 0; r < setup_.num_ranks; ++r) {
    const auto at = static_cast<size_t>(r);
    std::string text = first_difference(made[at], data.plans[at]);
    if (text.empty() && !(made[at] == data.plans[at])) {
      text = "plan: differs";
    }
    if (text.empty()) {
      text = internals_difference(data, r);
    }
    if (!text.empty()) {
      return fmt::format("rank {}: {}", r, text);
    }
  }
  return {};
}

// Compares what only kernels read with its definition, applied to the reference's routes.
std::string PlanWorld::internals_difference(const CaseData& data, int rank) {
  const Rank& mine = *ranks_[static_cast<size_t>(rank)];
  const PlanMap& map = mine.call.plan.map;
  const auto download = [&](const Rank& from) {
    std::vector<std::byte> bytes(map.num_bytes());
    WEFT_CUDA(
        Context{}, cudaMemcpy(bytes.data(), from.block.get(), bytes.size(), cudaMemcpyDeviceToHost)
    );
    return bytes;
  };
  std::vector<std::byte> own_bytes = download(mine);
  const PlanView own = {own_bytes.data(), map};
  if (std::memcmp(own.header(), mine.host_shape.get(), sizeof(PlanHeader)) != 0) {
    return "the host's header differs";
  }
  const PlanView on_host = {mine.host_shape.get(), map};
  uint32_t has_come = 0;
  std::memcpy(&has_come, mine.host_shape.get() + map.shape_bytes(), sizeof(has_come));
  const auto per_rank = static_cast<size_t>(map.num_experts / map.num_ranks);
  if (has_come != 1 ||
      !std::equal(
          own.rows_per_expert(), own.rows_per_expert() + per_rank, on_host.rows_per_expert()
      ) ||
      !std::equal(own.received(), own.received() + map.num_ranks, on_host.received()) ||
      !std::equal(
          own.global_routes(), own.global_routes() + map.num_experts, on_host.global_routes()
      )) {
    return "the host's shape differs";
  }

  const PlanData& plan = contents_of(data.plans[static_cast<size_t>(rank)]);
  const int num_ranks = setup_.num_ranks;
  const auto source = static_cast<uint32_t>(rank);
  const auto num_tokens = static_cast<int32_t>(plan.shape.num_tokens);
  const int each = chunk_tokens(num_tokens);
  const int most = std::min(num_ranks, plan.shape.topk);
  std::vector<int32_t> lower(static_cast<size_t>(num_tokens), 0);
  int32_t received_base = 0;
  for (int peer = 0; peer < num_ranks; ++peer) {
    std::vector<std::byte> peer_bytes = download(*ranks_[static_cast<size_t>(peer)]);
    const PlanView theirs = {peer_bytes.data(), map};
    const auto wrong = [&](std::string_view what, int64_t at, int64_t seen, int64_t wanted) {
      return fmt::format("{} [{}] at rank {} is {}, expected {}", what, at, peer, seen, wanted);
    };
    int32_t number = 0;
    for (int32_t token = 0; token < num_tokens; ++token) {
      const auto t = static_cast<size_t>(token);
      if (token % each == 0 && theirs.chunk_begin(source)[token / each] != number) {
        return wrong("chunk_begin", token / each, theirs.chunk_begin(source)[token / each], number);
      }
      bool is_arrival = false;
      int32_t primary = -1;
      for (int k = 0; k < plan.shape.topk; ++k) {
        const size_t route = t * static_cast<size_t>(plan.shape.topk) + static_cast<size_t>(k);
        const int32_t expert = plan.route_expert[route];
        if (expert < 0 || owner_rank(expert, plan.shape.num_local_experts()) != peer) {
          continue;
        }
        is_arrival = true;
        const int32_t slot = plan.route_slot[route];
        primary = slot >= 0 && (primary < 0 || slot < primary) ? slot : primary;
      }
      const size_t pair = t * static_cast<size_t>(num_ranks) + static_cast<size_t>(peer);
      const int32_t wanted = is_arrival ? number : -1;
      if (own.arrival()[pair] != wanted) {
        return wrong("arrival of token", token, own.arrival()[pair], wanted);
      }
      if (own.primary()[pair] != primary) {
        return wrong("primary of token", token, own.primary()[pair], primary);
      }
      if (is_arrival) {
        const ArrivalHead& head = theirs.heads(source)[number];
        const int32_t return_row = token * most + lower[t];
        if (head.token != token || head.return_row != return_row) {
          return wrong("head's return_row", number, head.return_row, return_row);
        }
        ++lower[t];
        ++number;
      }
    }
    if (theirs.chunk_begin(source)[num_device_chunks(num_tokens)] != number) {
      return wrong("last chunk_begin", num_tokens, -1, number);
    }
    if (theirs.received()[source] != number) {
      return wrong("received", rank, theirs.received()[source], number);
    }
    if (own.received_base()[peer] != received_base) {
      return wrong("received_base", peer, own.received_base()[peer], received_base);
    }
    received_base += own.received()[peer];
    if (own.arrival_base()[peer] != theirs.received_base()[source]) {
      return wrong("arrival_base", peer, own.arrival_base()[peer], theirs.received_base()[source]);
    }
    if (own.tokens_of()[peer] != data.spec.num_tokens[static_cast<size_t>(peer)]) {
      return wrong("tokens_of", peer, own.tokens_of()[peer], -1);
    }
  }
  return {};
}

double PlanWorld::microseconds(int count) {
  std::vector<cudaGraphExec_t> graphs(ranks_.size(), nullptr);
  for (size_t r = 0; r < ranks_.size(); ++r) {
    Rank& rank = *ranks_[r];
    cudaGraph_t graph = nullptr;
    WEFT_CUDA(Context{}, cudaStreamBeginCapture(rank.stream, cudaStreamCaptureModeThreadLocal));
    for (int i = 0; i < count; ++i) {
      launch_plan(rank.call, rank.stream);
    }
    WEFT_CUDA(Context{}, cudaStreamEndCapture(rank.stream, &graph));
    WEFT_CUDA(Context{}, cudaGraphInstantiate(&graphs[r], graph, 0));
    WEFT_CUDA(Context{}, cudaGraphDestroy(graph));
    WEFT_CUDA(Context{}, cudaGraphUpload(graphs[r], rank.stream));
  }
  sync_device();
  float best = 0;
  for (int round = 0; round < 5; ++round) {
    for (size_t r = 0; r < ranks_.size(); ++r) {
      WEFT_CUDA(Context{}, cudaEventRecord(ranks_[r]->begin, ranks_[r]->stream));
      WEFT_CUDA(Context{}, cudaGraphLaunch(graphs[r], ranks_[r]->stream));
      WEFT_CUDA(Context{}, cudaEventRecord(ranks_[r]->end, ranks_[r]->stream));
    }
    sync_device();
    float elapsed = 0;  // of the rank that began last: all others were waiting
    WEFT_CUDA(Context{}, cudaEventElapsedTime(&elapsed, ranks_.back()->begin, ranks_.back()->end));
    best = round == 0 ? elapsed : std::min(best, elapsed);
  }
  for (cudaGraphExec_t graph : graphs) {
    WEFT_CUDA(Context{}, cudaGraphExecDestroy(graph));
  }
  return static_cast<double>(best) * 1e3 / count;
}

}  // namespace weft::test
