// SPDX-License-Identifier: Apache-2.0
// The CUDA executor in a group of several domains: a CPU executor of the whole group makes plans,
// swaps call words and owns the network; a CUDA executor of this domain moves rows between its
// GPUs. A call is some rounds of the latter: one with this rank's own tokens, then one with those
// of each source that it carries. Operations: plan_domains_cuda.cpp, dispatch_domains_cuda.cpp,
// combine_domains_cuda.cpp.
//
// A dispatch or combine returns once all ranks have made it and its work is queued; a thread moves
// what crosses, and the caller's stream waits for that. The next call waits until it has passed,
// and throws what went wrong with it. A plan waits. None can be captured. Ranks of one process on
// one GPU wait in the call itself.
#pragma once

#include <exception>
#include <memory>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

#include "core/gpu/driver.hpp"
#include "cpu/network.hpp"
#include "cuda/exchange/exchange.hpp"
#include "hosts/crossing_index.hpp"
#include "hosts/crossing_memory.hpp"
#include "hosts/crossing_rows.hpp"
#include "hosts/crossing_transfer.hpp"
#include "hosts/message_counts.hpp"
#include "hosts/plan_image.hpp"
#include "hosts/transfer_thread.hpp"

namespace weft {

class DomainsPlan final : public DevicePlan {
 public:
  // `host` is the whole group's.
  explicit DomainsPlan(Plan host) : host_(std::move(host)) {}
  [[nodiscard]] const PlanData& on_host() const override { return contents_of(host_); }
  [[nodiscard]] Plan::OnDevice on_device() const override { return rounds[0].on_device(); }

  std::vector<Plan> rounds;  // of the domain's executor
  std::shared_ptr<const Block> index_block;
  CrossingArrays<const int32_t*> index;

 private:
  Plan host_;
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

// What passes over the network in a call, all of one kind.
struct Transfer {
  CrossingChunk chunk;
  std::string_view what;
  std::vector<CrossingSend> sends;
  std::vector<CrossingReceive> receives;
  size_t number = 0;             // in its call
  std::vector<uint32_t> before;  // [receives] messages of earlier calls, see MessageCounts
};

// What `check` throws, or null.
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

struct DomainsCudaExchange final : Exchange::State {
  // `domains` as Topology::domains; others than the group's are for tests. The same on every rank.
  DomainsCudaExchange(
      const Group& group, const ExchangeConfig& wanted, const std::vector<std::vector<int>>& domains
  );
  ~DomainsCudaExchange() override;

  Plan make_plan(const Routing& routing, const PlanOptions& options, const CallOptions& call)
      override;
  void dispatch(
      const Plan& plan, const DispatchInput& in, const DispatchOutput& out, const CallOptions& call
  ) override;
  void combine(
      const Plan& plan, const CombineInput& in, const CombineOutput& out, const CallOptions& call
  ) override;
  bool refuse(Op op, std::string_view reason, const CallOptions& call) override;
  void check() override;
  [[nodiscard]] Buffer allocate(const Tensor& shape) override { return near->allocate(shape); }
  void release_pooled() override { near->release_pooled(); }
  [[nodiscard]] int rank() const override { return network->context().rank; }
  [[nodiscard]] int num_ranks() const override { return network->context().num_ranks; }
  [[nodiscard]] const ExchangeConfig& config() const override { return settings; }
  [[nodiscard]] ExchangeStats stats() const override;
  [[nodiscard]] Footprint footprint() const override;

  // A plan of the whole group to the GPUs of this domain. Collective.
  Plan bring_plan(const Plan& host, cudaStream_t stream);

  // --- one call ---
  // The stream of a call; of this exchange's own if the caller has none.
  [[nodiscard]] cudaStream_t stream_of(const CallOptions& call) const;
  // Throws Error (kUnsupported) inside a capture. Waits until earlier calls need no copies.
  void begin_call(std::string_view op, cudaStream_t stream);
  // Work in the copy stream goes on behind what is in the caller's, and the other way round.
  void let_copies_follow(cudaStream_t stream);
  void let_follow_copies(cudaStream_t stream);
  // After the last launch; a call on its own stream waits for it.
  void end_call(const CallOptions& call, cudaStream_t stream);
  // Of a call that may return before it has ended.
  void start_transfer(std::string_view op, Transfer transfer);
  // Until all have. Throws what went wrong; then the exchange is broken.
  void settle();
  // Of `message_counts`, for a call's transfers by number.
  [[nodiscard]] size_t place_of(size_t transfer, size_t receive) const {
    return transfer * max_receives + receive;
  }
  // The rounds [first, last) do not run: near ranks must hear of it instead of waiting.
  void refuse_rounds(
      Op op, size_t first, size_t last, std::string_view reason, cudaStream_t stream
  );

  // --- memory ---
  // Decides is_direct, and tells why not.
  void choose_wire_memory();
  // Pages of its own for what is pinned.
  static constexpr uint64_t kLeastBytes = uint64_t{1} << 20U;
  void reserve_image(uint64_t bytes);
  // Ahead of a call that moves so many bytes for a token, as all ranks do or none. To make room is
  // collective and waits for the stream: CUDA waits for the whole GPU then, where kernels of others
  // may wait for this rank. Throws Error (kInvalidArgument) if some rank refuses the call.
  void make_room(Call call, int64_t bytes_of_token, cudaStream_t stream);
  void reserve(int64_t bytes_of_token);
  // What peers write and the GPU copies from.
  void reserve_staging(uint64_t bytes);
  void reserve_messages(uint64_t bytes);
  // The GPU's own, if the network can reach that.
  [[nodiscard]] std::optional<WireMemory> take_direct(std::string_view what, uint64_t bytes);
  // Nobody uses it any more; it is freed with the exchange.
  void retire(WireMemory& memory);

  ExchangeConfig settings;
  // Before `network`, which they outlive. What the GPU packs and the network reads, and if it
  // is the GPU's, what the network writes (pinned memory for that is the network's own).
  WireMemory messages;
  WireMemory direct_staging;
  std::unique_ptr<Network> network;
  std::unique_ptr<CudaExchange> near;
  GpuStream own_stream;
  GpuStream copies;
  CudaEvent caller_event;
  CudaEvent copy_event;
  CudaEvent last_use;       // of `work` by the caller's stream
  int64_t token_bytes = 0;  // that there is room for
  CrossingRoom room;
  const std::byte* pinned_staging = nullptr;
  bool is_direct = false;  // wire memory is the GPU's, where that can be had
  RemoteWrites remote_writes = RemoteWrites::kUnknown;
  std::unique_ptr<PinnedBuffer<uint32_t>> done;    // a word for each message that is packed
  uint64_t retired_bytes = 0;                      // of wire memory
  uint32_t number = 0;                             // of the last packing, which `done` gets
  std::unique_ptr<PinnedBuffer<std::byte>> image;  // of a plan, on its way
  uint64_t image_bytes = 0;
  std::shared_ptr<const Block> work;  // what has come, and sums on their way
  // Outgrown: see CudaExchange::retired.
  std::vector<std::shared_ptr<const void>> retired;
  // Where several ranks of a process share a GPU: a stream of one that waits may keep back work of
  // another's that it waits for, as the GPU has fewer queues than they have streams.
  bool waits_on_host = false;
  size_t max_receives = 0;  // of a transfer
  PinnedBuffer<uint32_t> arrived;
  std::optional<MessageCounts> message_counts;
  Op last_op = Op::kPlan;                  // whose transfers they are
  std::unique_ptr<TransferThread> thread;  // last: its job uses the others
};

}  // namespace weft
