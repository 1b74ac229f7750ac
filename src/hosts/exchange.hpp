// SPDX-License-Identifier: Apache-2.0
// The CUDA executor in a group of several domains: a CPU executor of the whole group makes plans,
// swaps handshakes and owns the network; a CUDA executor of this domain moves rows between its
// GPUs. A call is some rounds of the latter: one with this rank's own tokens, then one with those
// of each source that this rank forwards. Operations: plan.cpp, dispatch.cpp, combine.cpp; their
// common parts: call.hpp.
//
// A dispatch or combine returns once all ranks have made it and its work is queued; a thread moves
// inter-node messages, and the caller's stream waits for these. The next call waits until they have
// passed, and throws what went wrong with them. make_plan() itself waits. None of the calls can be
// captured. Ranks of one process on one GPU wait in the call itself.
#pragma once

#include <atomic>
#include <exception>
#include <memory>
#include <optional>
#include <string_view>
#include <vector>

#include "core/gpu/driver.hpp"
#include "core/gpu/stream.hpp"
#include "cpu/network.hpp"
#include "cuda/exchange/exchange.hpp"
#include "hosts/call_memory.hpp"
#include "hosts/message_transfer.hpp"
#include "hosts/plan_image.hpp"

namespace weft {

class HostsPlan final : public DevicePlan {
 public:
  // `host` is the whole group's, `rounds` the domain's executor's, `index` lies in `index_memory`.
  HostsPlan(
      Plan host,
      std::vector<Plan> rounds,
      Buffer index_memory,
      InterNodeArrays<const int32_t*> index
  )
      : host_(std::move(host)),
        rounds_(std::move(rounds)),
        index_memory_(std::move(index_memory)),
        index_(std::move(index)) {}
  [[nodiscard]] const PlanData& on_host() const override { return contents_of(host_); }
  [[nodiscard]] const PlanData& shape_on_host() const override { return contents_of(host_); }
  [[nodiscard]] Plan::OnDevice on_device() const override { return rounds_[0].on_device(); }
  [[nodiscard]] const std::vector<Plan>& rounds() const { return rounds_; }
  [[nodiscard]] const InterNodeArrays<const int32_t*>& index() const { return index_; }

 private:
  Plan host_;
  std::vector<Plan> rounds_;
  Buffer index_memory_;
  InterNodeArrays<const int32_t*> index_;
};

inline constexpr int64_t kWeightBytes = sizeof(float);

// Memory that the network reads or writes.
struct WireMemory {
  std::byte* data = nullptr;
  uint64_t bytes = 0;
  RegionRef lent = {};  // to the network, if it is the GPU's
  std::shared_ptr<const void> owner;
  [[nodiscard]] bool is_lent() const { return lent.generation != 0; }
};

// Messages that pass over the network in a call, all of one kind.
struct Transfer {
  MessageFormat format;
  std::string_view what;
  std::vector<MessageSend> sends;
  std::vector<MessageReceive> receives;
  size_t number = 0;             // in its call
  std::vector<uint32_t> before;  // [receives] messages of earlier calls, see MessageCounts
};

// Returns what `check` throws, or null.
template <class Check>
[[nodiscard]] std::exception_ptr refusal_of(const Check& check) {
  try {
    check();
  } catch (const Error&) {
    return std::current_exception();
  }
  return nullptr;
}

inline void rethrow(const std::exception_ptr& refusal) {
  if (refusal) {
    std::rethrow_exception(refusal);
  }
}

class HostsExchange final : public Executor {
 public:
  // `domains` as Topology::domains, the same on every rank; others than the group's are for tests.
  // `lost`: ranks that take no part; the group speaks for them.
  HostsExchange(
      const Group& group,
      const ExchangeConfig& wanted,
      const std::vector<std::vector<int>>& domains,
      const std::vector<int>& lost = {}
  );
  ~HostsExchange() override;

  Plan make_plan(const Routing& routing, const PlanOptions& options, const CallOptions& call)
      override;
  void dispatch(
      const Plan& plan, const DispatchInput& in, const DispatchOutput& out, const CallOptions& call
  ) override;
  void combine(
      const Plan& plan, const CombineInput& in, const CombineOutput& out, const CallOptions& call
  ) override;
  bool refuse(Op op, const Refusal& reason, const CallOptions& call) override;
  [[nodiscard]] bool is_outgrown() const override { return network_->is_outgrown(); }
  void check() override;
  void add_waits(int64_t* sums, int64_t times, const CallOptions& call) override;
  void set_num_senders(int count) override { node_->set_num_senders(count); }
  [[nodiscard]] Buffer allocate(const Tensor& shape) override { return node_->allocate(shape); }
  void release_pooled() override { node_->release_pooled(); }
  [[nodiscard]] const Context& context() const override { return network_->context(); }
  [[nodiscard]] const ExchangeConfig& config() const override { return settings_; }
  [[nodiscard]] ExchangeStats stats() const override;
  [[nodiscard]] Footprint footprint() const override;

  // --- for SurvivingHosts, which makes another exchange when ranks are lost (surviving.hpp) ---
  // Any thread: ends all waits of this rank for good, and the running call throws.
  void stop();
  // A kernel has found a fault. All ranks had agreed on the kernel's call before, so that some rank
  // cannot go on.
  [[nodiscard]] bool has_thrown_fault() const { return node_->has_thrown_fault(); }
  // Returns how many rounds of this domain calls have queued so far, calls that threw aside.
  [[nodiscard]] uint64_t num_queued_rounds() const { return num_rounds_; }
  // Returns how many queued rounds have ended well, one after the other, once all have ended;
  // nothing: not yet. No call is made meanwhile.
  [[nodiscard]] std::optional<uint64_t> num_whole_rounds() const;
  // Adds the waits of earlier exchanges, in seconds by rank, to those that this one counts.
  void count_waits_from(std::vector<double> seconds) { earlier_waits_ = std::move(seconds); }
  [[nodiscard]] const Network& network() const { return *network_; }

 private:
  friend class HostsCall;  // one dispatch or combine of this exchange

  // Collective. Brings a plan of the whole group to the GPUs of this domain.
  Plan bring_plan(const Plan& host, cudaStream_t stream);

  // --- one call ---
  // Runs a dispatch or combine, the HostsCall `OneCall`; `validate(header)` checks its arguments.
  template <class OneCall, class Validate, class In, class Out>
  void run_call(
      const Plan& plan,
      const Validate& validate,
      const In& in,
      const Out& out,
      const CallOptions& options
  );
  // Returns the stream of a call, which is this exchange's own if the caller gives none.
  [[nodiscard]] cudaStream_t stream_of(const CallOptions& call) const {
    return call.stream == nullptr ? own_stream_.get() : static_cast<cudaStream_t>(call.stream);
  }
  // Notes that a transfer has failed, so that no kernel reads what it has not brought.
  void set_failed();
  [[nodiscard]] bool has_failed() const {
    return std::atomic_ref(*has_failed_.get()).load(std::memory_order_acquire) != 0;
  }
  // Throws PeerError after stop().
  void check_stopped() const;
  // Throws Error (kUnsupported) inside a capture. Waits until earlier calls need no copies.
  void begin_call(Op op, cudaStream_t stream);
  // After the last launch; a call on the exchange's own stream waits for that.
  void end_call(const CallOptions& call, cudaStream_t stream);
  // Begins to pass what a call moves over the network; the call may return before that has ended.
  void start_transfer(Op op, Transfer transfer);
  // Waits for the stream, and tells all ranks of an interrupt.
  void wait_for(cudaStream_t stream);
  // Waits until all transfers have ended. Throws what went wrong; then the exchange is broken.
  void settle();
  // Returns the place in `message_counts_` of a receive, by its transfer's number in the call.
  [[nodiscard]] size_t place_of(size_t transfer, size_t receive) const {
    return transfer * max_receives_ + receive;
  }

  // --- memory ---
  // Decides is_direct_, and logs why not.
  void choose_wire_memory();
  // Pinned memory has pages of its own.
  static constexpr uint64_t kLeastBytes = uint64_t{1} << 20U;
  void reserve_image(uint64_t bytes);
  // Makes room for a call that moves so many bytes for a token, as all ranks do or none. Growing is
  // collective and waits for the stream: CUDA waits for the whole GPU then, where others' kernels
  // may wait for this rank. Throws Error (kInvalidArgument) if some rank refuses the call.
  void make_room(Call call, int64_t bytes_of_token, cudaStream_t stream);
  void reserve(int64_t bytes_of_token);
  // Reserves the memory that peers write and the GPU copies from.
  void reserve_staging(uint64_t bytes);
  void reserve_messages(uint64_t bytes);
  // Takes memory of the GPU and lends it to the network, if that can reach it.
  [[nodiscard]] std::optional<WireMemory> take_direct(std::string_view what, uint64_t bytes);
  // Keeps unused memory until the exchange is freed.
  void retire(WireMemory& memory);
  // Takes memory of this GPU.
  [[nodiscard]] Buffer take_bytes(uint64_t bytes) {
    return node_->allocate({.dtype = DType::kByte, .rows = 1, .cols = static_cast<int64_t>(bytes)});
  }

  ExchangeConfig settings_;
  // Both are before `network_`, to outlive it. The GPU packs and the network reads the first; the
  // network writes the second, if it is the GPU's (pinned memory for that is the network's own).
  WireMemory messages_;
  WireMemory direct_staging_;
  // Set by a failed transfer. Before `node_`, which at its end waits for the kernels that read it.
  PinnedBuffer<uint32_t> has_failed_;
  std::unique_ptr<Network> network_;
  std::unique_ptr<CudaExchange> node_;
  GpuStream own_stream_;
  GpuStream copies_;
  CudaEvent caller_event_;
  CudaEvent copy_event_;
  CudaEvent last_use_;       // of `work_` by the caller's stream
  int64_t token_bytes_ = 0;  // that there is room for
  CallRoom room_;
  const std::byte* pinned_staging_ = nullptr;
  bool is_direct_ = false;  // wire memory is the GPU's, where that can be had
  RemoteWrites remote_writes_ = RemoteWrites::kUnknown;
  std::unique_ptr<PinnedBuffer<uint32_t>> done_;    // a word for each message that is packed
  uint64_t retired_bytes_ = 0;                      // of wire memory
  uint32_t number_ = 0;                             // of the last packing, which `done_` gets
  std::unique_ptr<PinnedBuffer<std::byte>> image_;  // of a plan, on its way
  uint64_t image_bytes_ = 0;
  Buffer work_;  // what has come, and sums on their way
  // Outgrown: to free it would wait for the whole GPU, where kernels of others may wait for this
  // rank.
  std::vector<std::shared_ptr<const void>> retired_;
  // True where several ranks of a process share a GPU: a waiting stream of one rank may keep back
  // work of another rank that it waits for, as the GPU has fewer queues than they have streams.
  bool waits_on_host_ = false;
  size_t max_receives_ = 0;  // of a transfer
  PinnedBuffer<uint32_t> arrived_;
  std::optional<MessageCounts> message_counts_;
  Op last_op_ = Op::kPlan;                    // whose transfers run
  std::atomic<bool> is_interrupted_ = false;  // by this rank's caller: the thread stops
  std::atomic<bool> is_stopped_ = false;
  uint64_t first_round_ = 0;  // calls of node_ before the rounds
  uint64_t num_rounds_ = 0;
  std::vector<double> earlier_waits_;               // [num_ranks], or empty
  std::atomic<uint64_t> num_whole_ = ~uint64_t{0};  // before a call whose transfer has failed
  std::unique_ptr<TransferThread> thread_;          // last: its job uses the others
};

}  // namespace weft
