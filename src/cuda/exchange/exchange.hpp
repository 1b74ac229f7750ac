// SPDX-License-Identifier: Apache-2.0
// The CUDA executor's exchange: the device memory it owns and the frame that every call runs in.
// The operations are in call.cpp of src/cuda/plan, dispatch and combine, calls by copy engines in
// copy_engines/copies.cpp.
#pragma once

#include <cuda_runtime_api.h>

#include <exception>
#include <memory>
#include <optional>
#include <span>
#include <variant>
#include <vector>

#include "call/executor.hpp"
#include "core/check.hpp"
#include "core/gpu/check.hpp"
#include "core/gpu/short_copies.hpp"
#include "core/gpu/stream.hpp"
#include "cuda/exchange/fault_text.hpp"
#include "cuda/exchange/loss_watch.hpp"
#include "cuda/exchange/refusal_board.hpp"
#include "cuda/exchange/repeats.hpp"
#include "cuda/exchange/tuning.hpp"
#include "cuda/layout/launch.hpp"
#include "cuda/memory/owners.hpp"
#include "cuda/memory/pools.hpp"
#include "cuda/transport/peer_memory.hpp"
#include "group/invitation.hpp"
#include "plan/plan_data.hpp"

namespace weft {

// State that kernels of this rank use besides regions; a plan keeps it alive after its exchange.
struct CudaRankState {
  std::shared_ptr<PeerMemory> memory;
  GpuStream stream;
  CudaEvent last_call;  // end of the last call that was not captured
  CudaBuffer<LocalState> local;
  std::vector<CudaBuffer<LocalState>> retired;  // of graphs that know old addresses of peers
  PinnedBuffer<FaultRecord> fault;
};

class CudaExchange final : public Executor {
 public:
  // Collective. `has_eager_rows` reserves memory for a fused plan and dispatch.
  CudaExchange(const Group& group, const ExchangeConfig& wanted, bool has_eager_rows);
  ~CudaExchange() override;

  Plan make_plan(const Routing& routing, const PlanOptions& options, const CallOptions& call)
      override {
    return make_plan_of(Op::kPlan, routing, options, call);
  }
  void dispatch(
      const Plan& plan, const DispatchInput& in, const DispatchOutput& out, const CallOptions& call
  ) override {
    dispatch_by_plan(plan, in, out, call);
  }
  Plan dispatch_routed(
      const Routing& routing,
      const PlanOptions& options,
      const DispatchInput& in,
      const DispatchOutput& out,
      const CallOptions& call
  ) override;
  // Decides by what all ranks pass alike.
  [[nodiscard]] bool writes_alone(
      const Routing& routing,
      const PlanOptions& options,
      const DispatchInput& in,
      const CallOptions& call
  ) const override;
  void place_rows(
      const Plan& plan, const DispatchInput& in, const DispatchOutput& out, const CallOptions& call
  ) override;
  void receive(const Plan& plan, const CallOptions& call) override;
  [[nodiscard]] bool is_open(const Plan& plan) const override {
    return open_ && &header_of(open_->plan) == &header_of(plan);
  }
  bool refuse(Op op, const Refusal& reason, const CallOptions& call) override;
  [[nodiscard]] bool is_outgrown() const override;
  void combine(
      const Plan& plan, const CombineInput& in, const CombineOutput& out, const CallOptions& call
  ) override;
  void check() override;
  [[nodiscard]] CallReport report() const override;
  void mask(std::span<const int> ranks) override;
  [[nodiscard]] std::string invitation() const override;
  void readmit(std::span<const int> ranks) override;
  bool grow(int64_t max_tokens, int max_topk) override;
  void add_waits(int64_t* sums, int64_t times, const CallOptions& call) override;
  void set_num_senders(int count) override { num_senders_ = count; }
  [[nodiscard]] Buffer allocate(const Tensor& shape) override;
  void release_pooled() override;
  [[nodiscard]] const Context& context() const override { return context_; }
  [[nodiscard]] const ExchangeConfig& config() const override { return settings_; }
  [[nodiscard]] ExchangeStats stats() const override;
  [[nodiscard]] Footprint footprint() const override;

  // Sets the number of the last call on the GPU, as if later calls had raised no signal. For tests
  // of long runs: on all ranks, while no rank makes a call.
  void set_epoch(uint64_t epoch);

  // --- for the executor of several hosts (src/hosts), in whose domain this one moves rows ---
  // Names this exchange's ranks as `ranks` of the group of `whole` in messages from now on.
  // `num_sharing` ranks of that group share this GPU, and `num_kept_sms` of its multiprocessors are
  // kept for other kernels.
  void join(const Context& whole, std::span<const int> ranks, int num_sharing, int num_kept_sms);
  // Returns the geometry of plan blocks with `replicas` places on each rank.
  [[nodiscard]] PlanMap plan_map(int replicas = 0) const {
    return {
        control_map_.num_ranks,
        control_map_.num_experts,
        control_map_.max_tokens,
        control_map_.max_topk,
        static_cast<uint32_t>(replicas)};
  }
  // Imports a plan of shape `data` that the host has made. `image` is host memory that the GPU
  // reads and that must stay until the stream has passed. Collective, like make_plan; `number`
  // tells calls apart and must be equal on all ranks.
  [[nodiscard]] Plan import_plan(
      PlanData data,
      const std::byte* image,
      std::span<const ImportedRecords> records,
      int64_t number,
      cudaStream_t stream
  );
  // Waits for the stream. An interrupt of this rank's caller (core/interrupt.hpp) ends the wait and
  // the exchange, as that of a peer does.
  void wait_for(cudaStream_t stream) {
    const LossWatch::Wait wait(losses_.get());
    wait_for_stream(stream, context_, [&] { look_for_interrupts(stream); });
  }
  // Returns the state that this rank's kernels share, in this GPU's memory.
  [[nodiscard]] LocalState* local_state() const { return own_->local.get(); }
  // Returns whether check() has ever thrown what a kernel found.
  [[nodiscard]] bool has_thrown_fault() const { return has_thrown_fault_; }
  // Stops the kernels because this rank's caller wants to; peers hear why.
  void interrupt();
  // Any thread: ends all waits of this rank's kernels, until go_on_without().
  void stop();
  // Returns this rank's calls once its stopped kernels have ended, and nothing before. No call is
  // made meanwhile.
  [[nodiscard]] std::optional<LossWatch::Calls> ended_calls() const;
  // Throws faults as check() does, within a call in `stream`; misuses are left for check().
  void check_faults(std::optional<cudaStream_t> stream = std::nullopt);
  // Returns whether check_faults() would throw; any thread may ask.
  [[nodiscard]] bool has_fault() const { return has_record(0); }

 private:
  // Returns whether a kernel has told of a misuse, which is no fault: its call goes on.
  [[nodiscard]] bool has_misuse() const { return has_record(1); }
  [[nodiscard]] bool has_record(int place) const {
    return *static_cast<volatile FaultKind*>(&own_->fault.get()[place].kind) != FaultKind::kNone;
  }
  // Does this rank's part of the constructor.
  void set_up(uint64_t stamp);
  // Returns the bytes of shared memory that a block may have on this GPU.
  [[nodiscard]] uint64_t shared_bytes() const;
  // Returns for which numbers R of replicas (bit R) a plan and dispatch in one launch are possible,
  // with `shared_bytes` on each GPU.
  [[nodiscard]] uint32_t fused_replicas(uint64_t shared_bytes) const;
  // Runs one call, or the first of two (kPlanAndDispatch): throws faults of earlier calls, queues
  // this one by `launch(stream)` and tells peers if its arguments are refused. Waits for the call
  // if the caller gave no stream. `is_second` of the two: losses are heard of before the first is
  // queued, or after both are.
  template <class Launch>
  auto run_call(Op op, const CallOptions& call, const Launch& launch, bool is_second = false);

  // Returns a call's stream; the exchange's own if the caller has none.
  [[nodiscard]] cudaStream_t stream_of(const CallOptions& call) const {
    return call.stream == nullptr ? own_->stream.get() : static_cast<cudaStream_t>(call.stream);
  }
  // Notes that the running call is queued: its end can be awaited, and peers will hear of it.
  void set_launched(cudaStream_t stream);
  // Records where a kernel ends a call, or the part of it that is queued now. False inside a
  // capture, which records nothing.
  bool record_end(cudaStream_t stream) const;
  // Queues a launch that is made again if ranks are lost (PeerLoss::kRepeat).
  template <class Launch>
  void launch_and_keep(
      void (*function)(const Launch&, cudaStream_t), const Launch& launch, cudaStream_t stream
  ) {
    function(launch, stream);
    if (repeats_) {
      PlanView followed;
      if constexpr (std::is_base_of_v<RowsLaunch, Launch>) {
        followed = launch.plan;
      }
      repeats_->keep([function, launch](cudaStream_t again) { function(launch, again); }, followed);
    }
  }
  // Marks the running call as not repeatable.
  void keep_none() {
    if (repeats_) {
      repeats_->keep({});
    }
  }
  [[nodiscard]] int sms_of(const CallOptions& call) const;

  // --- failures ---
  // While the host waits for the stream: throws if this rank's caller or a peer's wants to stop.
  void look_for_interrupts(cudaStream_t stream);
  // Makes `call` and all later ones wait for nothing and give peers nothing.
  void stop_kernels(uint32_t call);
  // Collective. Makes losses_ (losses.cpp); not with PeerLoss::kFail.
  void watch_for_losses(const Group& group);
  // If ranks are lost, waits for those that are left and throws Error (kRanksLost) when the next
  // call can be made without the lost ones. Returns if no rank is lost. `late` as for
  // LossWatch::settle().
  void look_for_losses(Op op, ErrorCode cause, std::optional<int> late = std::nullopt);
  // Throws Error (kRanksLost), as members have agreed to go on without the lost ranks.
  [[noreturn]] void raise_losses(Op op, const LossWatch::Agreement& agreed);
  // Waits until the last call has ended. Throws TimeoutError.
  void await_last_call() const;
  [[nodiscard]] LossWatch::Calls own_calls() const;
  // Goes on without `lost` after number `last_call`. `is_queue_void`: what has begun here is void.
  void go_on_without(uint32_t lost, uint64_t last_call, bool is_queue_void = true);
  [[nodiscard]] std::vector<int> lost_ranks() const;  // ascending
  void set_local(LocalState* to, const LocalState& now) const;
  // Returns the stream for what the host does while kernels are stopped.
  [[nodiscard]] cudaStream_t quiet_stream() const {
    return repeats_ ? repeats_->stream() : own_->stream.get();
  }
  // --- PeerLoss::kRepeat (losses.cpp) ---
  // Puts a gate behind the call just queued in the stream; a plan whose dispatch comes next shares
  // the gate behind that dispatch.
  void close_calls(cudaStream_t stream);
  // Returns whether the watch is agreeing on the calls, so that the caller has nothing to do.
  [[nodiscard]] bool is_watch_at_it() const;
  // Any thread: returns the rank that a call has waited for in vain.
  [[nodiscard]] std::optional<LossWatch::Late> late_rank() const;
  // Returns late_rank() as the fault record alone has it.
  [[nodiscard]] std::optional<LossWatch::Late> late_fault() const;
  // The watching thread: makes the calls again that this rank's gate holds, and opens the gate.
  void repeat_calls(const LossWatch::Agreement& agreed);
  // Opens all gates: calls are void until go_on_without().
  void release_gates() const;
  // Makes the caller wait while it is too many gates ahead.
  void await_gates(cudaStream_t stream);
  // Returns report() with the losses new to the caller, and marks them as heard.
  [[nodiscard]] CallReport take_news();
  // Tells the caller of ranks whose loss has ended no call.
  void hear_repeats();
  // --- ranks that come back (readmission.cpp) ---
  // Does the rest of the constructor for a rank of Group::rejoin().
  void rejoin(const Group& group, const Invitation& invitation);
  // Each is a LossWatch::Connect; both make the same calls on the group.
  void meet_as_newcomer(const Group& group, const Meeting& who);
  void meet_newcomers(const Group& group, const Meeting& who);
  void await_silence(std::span<const int> ranks) const;
  // Tells view_ where control regions are. Returns whether any has moved.
  bool find_control();
  // Makes calls captured so far do nothing, and say so.
  void retire_graphs();
  // Marks this rank's exchange as unusable.
  void set_broken();
  // Returns a text that names the peer that was interrupted in call `own` or before it; empty if
  // none was.
  [[nodiscard]] std::string interrupt_text(uint32_t own) const;
  [[nodiscard]] uint32_t running_call() const;
  // Throws an Error of `code` once the stream has stopped, or after 1 s.
  [[noreturn]] void break_off(ErrorCode code, std::string_view text, cudaStream_t stream);
  // Tells peers of a call that this rank does not make. Returns its number on the GPUs.
  uint32_t refuse_one(Op op, const Refusal& reason, cudaStream_t stream);
  // Returns whether, by peers' handshakes, a plan that this rank has refused had no dispatch there.
  // False if they refused it, too.
  [[nodiscard]] bool do_peers_only_plan(uint32_t epoch) const;
  // Does check() for calls in `stream` or before it, replays included; null: the stream is not
  // known.
  void check_behind(std::optional<cudaStream_t> stream);
  [[nodiscard]] std::optional<Refusal> awaited_reason(const FaultRecord& refused) const;
  // Throws what the fault record says. A refusal that harmed nothing is cleared first.
  void throw_fault(std::optional<cudaStream_t> stream);
  // Returns false if a peer has not come to a call since: the exchange is then unusable.
  bool clear_fault(uint32_t epoch, std::optional<cudaStream_t> stream);
  [[nodiscard]] ControlSurvey survey_control(uint32_t epoch) const;
  // Returns the ranks whose handshake of this rank's last call has not come.
  [[nodiscard]] std::vector<int> silent_ranks() const;
  // Reads a value in this GPU's memory by a copy, which takes another way than kernels.
  template <class T>
  [[nodiscard]] T read_gpu(const void* from) const {
    return read_gpu<T>(from, own_->stream.get());
  }
  template <class T>
  [[nodiscard]] T read_gpu(const void* from, cudaStream_t stream) const;

  // --- plans ---
  // A plan to be made, and the launch that makes it.
  struct PreparedPlan {
    PlanData data;
    PlanLaunch launch;
  };
  // Checks the arguments and takes memory. Throws Error (kInvalidArgument). `payload` is of the
  // dispatch that is made in the same launch; it is empty for a plan by itself.
  PreparedPlan prepare_plan(
      const Routing& routing,
      const PlanOptions& options,
      const PayloadFormat& payload,
      int64_t number,
      cudaStream_t stream
  );
  // Does make_plan(); `op` is what is refused if the arguments are.
  Plan make_plan_of(
      Op op, const Routing& routing, const PlanOptions& options, const CallOptions& call
  );
  // Checks what a plan with replicas needs besides. Throws Error (kInvalidArgument, kUnsupported).
  void check_balance_of(const Balancing& balancing, int topk);
  // Queues what comes before the plan kernel. `launch` comes as for a plan without replicas and
  // becomes the plan of physical experts.
  void queue_balance(const Balancing& balancing, PlanLaunch& launch, cudaStream_t stream);
  // Adds memory for `num_plans` plans.
  void add_plans(uint64_t num_plans);
  // Takes memory for one plan, grown if need be, which then belongs to `data`. Returns where peers
  // reach it.
  PeerAddress take_plan(PlanData& data, cudaStream_t stream);
  // Returns where a plan of this exchange lies.
  [[nodiscard]] PlanView view_of(const PlanData& plan) const;
  // Makes the kernel tell the host the shape of the plan's output.
  void ask_shape(PlanLaunch& launch);
  // Waits for that shape and fills it in.
  void hear_shape(PlanData& data, const PlanMap& map, cudaStream_t stream);
  void wait_shape(const volatile uint32_t* seen, cudaStream_t stream);

  // Returns the launch of a plan and its dispatch with replicas.
  [[nodiscard]] BalancedDispatchLaunch balanced(
      const RoutedDispatchLaunch& launch, const Balancing& balancing
  ) const;

  // --- rows ---
  // Returns the region, of at least `bytes`, where peers write this rank's arrivals when the output
  // is not in their reach. One that is too small grows to at least twice its size.
  const PeerRegion& staging_of(uint64_t bytes, cudaStream_t stream);
  // Fills in what every dispatch and combine by `plan` has.
  void prepare_rows(RowsLaunch& launch, const PlanData& plan, const PayloadFormat& payload) const;
  // `is_second`: this call follows its plan in dispatch_routed().
  void dispatch_by_plan(
      const Plan& plan,
      const DispatchInput& in,
      const DispatchOutput& out,
      const CallOptions& call,
      bool is_second = false
  );
  // Returns the launch that every dispatch by `plan` begins with, without the places where rows are
  // written.
  [[nodiscard]] DispatchLaunch prepare_dispatch(
      const PlanData& plan, const DispatchInput& in, const DispatchOutput& out
  ) const;
  // Queue a dispatch, prepared but for its places, by one kernel or by copy engines.
  void dispatch_by_stores(
      const PlanData& plan, DispatchLaunch& launch, const CallOptions& call, cudaStream_t stream
  );
  void dispatch_by_copies(
      const PlanData& plan, DispatchLaunch& launch, const CallOptions& call, cudaStream_t stream
  );
  // A combine that returns a row for each route, if the call and the room allow it; the call is
  // open afterwards if it is to be received later.
  [[nodiscard]] bool can_return_by_route(const PlanData& plan, const CombineLaunch& launch) const;
  void combine_by_route(
      const Plan& plan, CombineLaunch& launch, const CallOptions& call, cudaStream_t stream
  );
  // Queues the rest of a call that has only sent, if any. Every call begins so. Throws Error
  // (kUnsupported) where only one half is inside a capture: a replay would repeat half of a call.
  void receive_open(cudaStream_t stream);
  // Queue a combine likewise.
  void combine_by_stores(
      const PlanData& plan, CombineLaunch& launch, const CallOptions& call, cudaStream_t stream
  );
  void combine_by_copies(
      const PlanData& plan, CombineLaunch& launch, const CallOptions& call, cudaStream_t stream
  );
  // Calls by copy engines, in turn: whether `rows` go so; the next call's places; this rank's place
  // in a peer's memory; copies of each peer's arrivals, or of `most_arrivals` rows where only the
  // GPU knows.
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

  ExchangeConfig settings_;  // "auto" and 0 resolved
  Context context_;
  std::vector<int> rank_names_;  // [num_ranks] in messages; empty: as they are
  uint64_t id_;
  std::shared_ptr<PeerMemory> memory_;
  std::unique_ptr<RefusalBoard> refusals_;
  std::shared_ptr<CudaRankState> own_;
  DeviceControlMap control_map_;
  uint32_t fused_replicas_ = 0;  // of all ranks
  CudaBuffer<int32_t> plan_scratch_;
  CudaBuffer<int32_t> balance_scratch_;
  uint32_t checked_replicas_ = 0;  // bit R: plans with R replicas are possible
  PinnedBuffer<std::byte> host_shape_;
  RankView view_;
  std::shared_ptr<PlanPool> plans_;
  uint32_t num_plans_ = 0;  // that took memory; the serial of the last
  std::shared_ptr<BlockPool> buffers_;
  PeerRegion staging_;
  CudaBuffer<std::byte> packed_;  // what copy engines carry to the peers, if they may
  uint32_t num_copies_ = 0;       // calls by copy engines; does not begin at 0, as epochs
  // Outgrown staging: freeing memory waits for the whole GPU, where a peer's kernel may wait for
  // this rank.
  std::vector<PeerRegion> retired_;
  Op running_op_ = Op::kNone;
  uint32_t refused_plan_ = 0;  // the last call, if it was a plan that was given up
  bool is_launched_ = false;   // the running call has reached the GPU, so that peers hear of it
  // A call that has been sent and not received. The plan keeps its memory.
  struct OpenCall {
    Plan plan;
    std::variant<RoutedDispatchLaunch, CombineLaunch> launch;
    bool is_captured = false;
  };
  std::optional<OpenCall> open_;
  // The last call, if its output had too few rows.
  struct Unplaced {
    Plan plan;
    PayloadFormat payload;
  };
  std::optional<Unplaced> unplaced_;
  BlockChoice tuning_;
  bool picks_mover_ = true;    // Mover::kAuto
  int num_senders_ = 0;        // see set_num_senders()
  int num_gpu_sms_ = 0;        // that calls may occupy
  std::exception_ptr broken_;  // why the exchange can no longer be used
  bool has_thrown_fault_ = false;
  ExchangeStats counters_;
  uint32_t lost_ = 0;                  // ranks that take no part any more, a bit each
  Balancing balance_;                  // as given to the last plan
  uint32_t num_changes_ = 0;           // LocalState::members
  CudaBuffer<std::byte> nobodys_;      // in place of control regions of ranks that were never met
  int64_t void_calls_ = 0;             // CallReport's
  int64_t calls_behind_ = 0;           // likewise
  bool is_plan_alone_ = false;         // the running call: its dispatch comes next
  bool is_waiting_for_shape_ = false;  // the host, for a plan
  uint64_t num_queued_ = 0;            // calls since the last gate
  bool is_repeated_ = false;           // CallReport's
  std::vector<int> heard_;             // lost ranks that the caller knows of
  std::unique_ptr<CallRepeats> repeats_;  // PeerLoss::kRepeat
  std::unique_ptr<LossWatch> losses_;     // null: PeerLoss::kFail
};

template <class T>
T CudaExchange::read_gpu(const void* from, cudaStream_t stream) const {
  static_assert(sizeof(T) <= kShortCopyBytes);
  T value;
  read_short(&value, from, sizeof value, stream, context_);
  return value;
}

template <class Launch>
auto CudaExchange::run_call(Op op, const CallOptions& call, const Launch& launch, bool is_second) {
  const CudaDeviceGuard guard(settings_.device.index);
  const cudaStream_t stream = stream_of(call);
  if (!is_second) {
    await_gates(stream);
  }
  hear_repeats();
  running_op_ = op;
  is_launched_ = false;
  is_plan_alone_ = false;
  refused_plan_ = 0;
  if (losses_) {
    losses_->follow_caller();
  }
  const auto queue = [&] {
    if constexpr (std::is_void_v<decltype(launch(stream))>) {
      launch(stream);
      close_calls(stream);
    } else {
      auto result = launch(stream);
      close_calls(stream);
      return result;
    }
  };
  const auto launched = [&] {
    const CallRepeats::Lock lock(repeats_.get());
    try {
      receive_open(stream);
      unplaced_.reset();
      if (losses_ && !is_second) {
        if (losses_->has_news()) {
          record_end(stream);  // replays that are queued there are calls before this one
        }
        if (losses_->has_left() && !is_watch_at_it()) {
          look_for_losses(op, ErrorCode::kPeerFailed);
        }
      }
      if (!losses_ || !is_second || broken_) {
        // The call counts on every rank, whichever of them hears of a fault first.
        check_behind(stream);
      }
      return queue();
    } catch (const Error& error) {
      const bool counts = error.code() != ErrorCode::kRanksLost;
      if (!is_launched_ && counts && !refuse(op, error, call)) {
        throw untold(error);
      }
      throw;
    }
  };
  const auto end = [&] {
    if (call.stream == nullptr) {
      wait_for(stream);
      const CallRepeats::Lock lock(repeats_.get());
      check_behind(stream);
    }
  };
  if constexpr (std::is_void_v<decltype(launch(stream))>) {
    launched();
    end();
  } else {
    auto result = launched();
    end();
    return result;
  }
}

}  // namespace weft
