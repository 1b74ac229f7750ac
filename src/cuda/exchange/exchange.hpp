// SPDX-License-Identifier: Apache-2.0
// The CUDA executor's exchange: the device memory it owns and the frame that every call runs in.
// The operations are in plan_call_cuda.cpp, dispatch_call_cuda.cpp, combine_call_cuda.cpp and
// dispatch_routed_call_cuda.cpp, calls by copy engines in copies_cuda.cpp; the kernels in
// src/kernels.
#pragma once

#include <cuda_runtime_api.h>

#include <exception>
#include <memory>
#include <span>

#include "call/executor.hpp"
#include "call/refusal.hpp"
#include "core/check.hpp"
#include "core/gpu/check.hpp"
#include "core/gpu/stream.hpp"
#include "cuda/exchange/fault_text.hpp"
#include "cuda/exchange/refusal_board.hpp"
#include "cuda/exchange/tuning.hpp"
#include "cuda/layout/launch.hpp"
#include "cuda/memory/buffers.hpp"
#include "cuda/memory/owners.hpp"
#include "cuda/plan/pool.hpp"
#include "cuda/transport/peer_memory.hpp"
#include "plan/plan_data.hpp"

namespace weft {

// What kernels of this rank use besides regions; a plan keeps it alive after its exchange.
struct CudaRankState {
  std::shared_ptr<PeerMemory> memory;
  GpuStream stream;
  CudaEvent last_call;  // end of the last call that was not captured
  CudaBuffer<LocalState> local;
  PinnedBuffer<FaultRecord> fault;
};

struct CudaExchange final : Exchange::State {
  // `has_early_rows`: dispatch_routed will be called.
  CudaExchange(const Group& group, const ExchangeConfig& wanted, bool has_early_rows);
  ~CudaExchange() override;

  Plan make_plan(const Routing& routing, const PlanOptions& options, const CallOptions& call)
      override;
  void dispatch(
      const Plan& plan, const DispatchInput& in, const DispatchOutput& out, const CallOptions& call
  ) override;
  Plan dispatch_routed(
      const Routing& routing,
      const PlanOptions& options,
      const DispatchInput& in,
      const DispatchOutput& out,
      const CallOptions& call
  ) override;
  bool refuse(Op op, std::string_view reason, const CallOptions& call) override;
  void combine(
      const Plan& plan, const CombineInput& in, const CombineOutput& out, const CallOptions& call
  ) override;
  void check() override;
  [[nodiscard]] Buffer allocate(const Tensor& shape) override;
  void release_pooled() override;
  [[nodiscard]] int rank() const override { return context.rank; }
  [[nodiscard]] int num_ranks() const override { return context.num_ranks; }
  [[nodiscard]] const ExchangeConfig& config() const override { return settings; }
  [[nodiscard]] ExchangeStats stats() const override;
  [[nodiscard]] Footprint footprint() const override;

  // Its ranks are `ranks` of a larger group: messages call them so. `num_sharing` ranks of that
  // group share this GPU, and so many multiprocessors are kept for other kernels.
  void join_domains(
      const Context& whole, std::span<const int> ranks, int num_sharing, int num_kept_sms
  );
  // This rank's part of the constructor.
  void set_up(uint64_t stamp);
  // One call, or the first of two (kPlanAndDispatch): faults of earlier ones are thrown,
  // `launch(stream)` queues it; a refusal of its arguments is told to the peers. Without a stream
  // of the caller's it is waited for.
  template <class Launch>
  auto run_call(Op op, const CallOptions& call, const Launch& launch);

  // The stream of a call; the exchange's own if the caller has none.
  [[nodiscard]] cudaStream_t stream_of(const CallOptions& call) const {
    return call.stream == nullptr ? own->stream.get() : static_cast<cudaStream_t>(call.stream);
  }
  // Tells the peers of one call that this rank does not make. -> its number on the GPUs.
  uint32_t refuse_one(Op op, std::string_view reason, cudaStream_t stream);
  // Whether a plan that this rank has refused was a call by itself for the others, by their words.
  // False if they refused it, too.
  [[nodiscard]] bool do_peers_plan_alone(uint32_t epoch) const;
  // make_plan(), where `op` says what is refused if its arguments are.
  Plan make_plan_of(
      Op op, const Routing& routing, const PlanOptions& options, const CallOptions& call
  );
  // The running call is in the stream: its end can be waited for, and peers will hear of it.
  void set_launched(cudaStream_t stream);
  [[nodiscard]] bool is_capturing(cudaStream_t stream) const;
  // Whether check() would throw; any thread.
  [[nodiscard]] bool has_fault() const {
    return *static_cast<volatile FaultKind*>(&own->fault.get()->kind) != FaultKind::kNone;
  }
  // Throws what the record says. A refusal that harmed nothing is cleared first.
  void throw_fault();
  void clear_fault(uint32_t epoch);
  [[nodiscard]] ControlSurvey survey_control(uint32_t epoch) const;
  [[nodiscard]] LocalState read_local() const;
  void finish(cudaStream_t stream);

  // Where peers write this rank's arrivals when the output is not in their reach; grows to at least
  // twice its size.
  const PeerRegion& staging_of(uint64_t bytes, cudaStream_t stream);
  // Memory for so many more plans.
  void add_plans(uint64_t num_plans);
  [[nodiscard]] int sms_of(const CallOptions& call) const;
  // A plan to be made, and the launch that makes it.
  struct PreparedPlan {
    PlanData data;
    PlanLaunch launch;
  };
  // Checks the arguments and takes memory. Throws Error (kInvalidArgument). `payload`: of the
  // dispatch that is made in the same launch; empty for a plan by itself.
  PreparedPlan prepare_plan(
      const Routing& routing,
      const PlanOptions& options,
      const PayloadFormat& payload,
      cudaStream_t stream
  );
  // What every dispatch by `plan` begins with; where rows are to be written is left open.
  [[nodiscard]] DispatchLaunch prepare_dispatch(
      const PlanData& plan, const DispatchInput& in, const DispatchOutput& out
  ) const;
  // A dispatch that is prepared but for its places, by one kernel or by copy engines.
  void dispatch_by_stores(
      const PlanData& plan,
      const DispatchOutput& out,
      DispatchLaunch& launch,
      const CallOptions& call,
      cudaStream_t stream
  );
  void dispatch_by_copies(
      const PlanData& plan, DispatchLaunch& launch, const CallOptions& call, cudaStream_t stream
  );
  // A combine likewise.
  void combine_by_stores(
      const PlanData& plan, CombineLaunch& launch, const CallOptions& call, cudaStream_t stream
  );
  void combine_by_copies(
      const PlanData& plan, CombineLaunch& launch, const CallOptions& call, cudaStream_t stream
  );
  // Calls by copy engines: whether such rows go so, the next call's places, this rank's place in
  // the memory of a peer, and the copies of as many rows as there are arrivals of each peer, or of
  // `most_arrivals` where only the GPU knows.
  [[nodiscard]] bool goes_by_copies(
      const CopiedRows& rows, const CallOptions& call, cudaStream_t stream
  ) const;
  [[nodiscard]] CopiedLaunch next_copies(const CopiedRows& rows);
  [[nodiscard]] PeerAddress copied_address(const CopiedLaunch& copied) const;
  void queue_copies(
      const CopiedLaunch& copied,
      std::span<const int32_t> arrivals,
      int64_t most_arrivals,
      cudaStream_t stream
  ) const;
  // A plan whose slots are known already, of the shape `data`: one kernel from `image`, host memory
  // that the GPU reads and that must stay until the stream has passed. Collective, like make_plan;
  // `number` tells calls apart and must be equal on all ranks.
  Plan adopt_plan(
      PlanData data,
      const std::byte* image,
      std::span<const GivenRecords> records,
      int64_t number,
      const CallOptions& call
  );
  // Memory for one plan, grown if need be, and the plan in it.
  std::shared_ptr<const Block> take_plan(cudaStream_t stream);
  [[nodiscard]] std::shared_ptr<DevicePlan> device_plan(
      std::shared_ptr<const Block> block, const PlanShape& shape
  ) const;
  // Where a plan of this exchange lies.
  [[nodiscard]] PlanView view_of(const PlanData& plan) const;
  // Rows must begin at multiples of 16 bytes.
  void check_aligned(std::string_view op, std::string_view name, const ConstTensor& tensor) const;
  // Until the plan kernel has written the shape of its output to the host.
  void wait_shape(const volatile uint32_t* seen, cudaStream_t stream);
  [[nodiscard]] Mover mover() const;

  ExchangeConfig settings;  // "auto" and 0 resolved
  Context context;
  std::vector<int> rank_names;  // [num_ranks] in messages; empty: as they are
  uint64_t id;
  std::shared_ptr<PeerMemory> memory;
  std::unique_ptr<RefusalBoard> refusals;
  std::shared_ptr<CudaRankState> own;
  DeviceControlMap control_map;
  bool can_plan_beside = false;  // plan and dispatch of few tokens in one launch, on all ranks
  PlanMap plan_map;
  CudaBuffer<int32_t> plan_scratch;
  PinnedBuffer<std::byte> host_shape;
  RankView view;
  std::shared_ptr<PlanPool> plans;
  std::shared_ptr<BlockPool> buffers;
  PeerRegion staging;
  CudaBuffer<std::byte> packed;  // what copy engines carry to the peers, if they may
  uint32_t num_copies = 0;       // calls by copy engines; does not begin at 0, as epochs
  // Outgrown: freeing memory waits for the whole GPU, where a peer's kernel may wait for this rank.
  std::vector<PeerRegion> retired;
  bool is_launched = false;  // the running call has reached the GPU, so that peers will hear of it
  BlockChoice tuning;
  int num_gpu_sms = 0;
  int compute_capability = 0;  // 90 for 9.0
  std::exception_ptr broken;
  ExchangeStats counters;
};

template <class Launch>
auto CudaExchange::run_call(Op op, const CallOptions& call, const Launch& launch) {
  const CudaDeviceGuard guard(settings.device.index);
  const bool is_own = call.stream == nullptr;
  const cudaStream_t stream = stream_of(call);
  is_launched = false;
  const auto launched = [&] {
    try {
      check();  // the call counts on every rank, whichever of them hears of a fault first
      return launch(stream);
    } catch (const Error& error) {
      if (!is_launched && !refuse(op, error.what(), call)) {
        throw untold(error);
      }
      throw;
    }
  };
  if constexpr (std::is_void_v<decltype(launch(stream))>) {
    launched();
    if (is_own) {
      finish(stream);
    }
  } else {
    auto result = launched();
    if (is_own) {
      finish(stream);
    }
    return result;
  }
}

}  // namespace weft
