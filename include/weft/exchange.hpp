// SPDX-License-Identifier: Apache-2.0
// Moves tokens to their experts and back. Previous in the data flow: calls.hpp.
//
// plan, dispatch and combine are collective: every rank of the group calls them in the same order,
// with T = 0 if it has no tokens. One thread per rank. Arguments are checked before anything is
// written; a rank that refuses a call makes all ranks throw, and the exchange stays usable. After
// TimeoutError or PeerError it is not: later calls rethrow the cause.
//
// On a GPU (ExchangeConfig::device) every tensor lies in that GPU's memory and a call with a stream
// returns once its kernel is queued there; what goes wrong on the device is thrown by the next call
// or by check(). All calls of an exchange go to one stream, or the caller orders its streams.
// plan() waits for the GPU unless the number of rows is given (PlanOptions::row_budget or
// expert_stride, with Overflow::kDrop); without that wait every call can be captured in a CUDA
// graph, if calls of the same size were made before.
//
// A token crosses to each other domain once in a group of several domains (Group::topology), and
// one row comes back from there. Combine then adds, over domains ascending, what the token's ranks
// of a domain add up to, rounded to the dtype; in one domain, over ranks ascending, what its rows
// on a rank add up to, rounded. So the bits depend on how ranks are grouped into domains, and on
// nothing else; with SumOrder::kTopk (plan.hpp) neither on that nor on the number of ranks. On GPUs
// a call then waits until all ranks have made it and the transfers of the call before are done,
// whose errors it throws; plan() always waits for the GPU, and a call inside a capture throws Error
// (kUnsupported).
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "weft/calls.hpp"
#include "weft/group.hpp"
#include "weft/plan.hpp"
#include "weft/routing.hpp"
#include "weft/tensor.hpp"

namespace weft {

// Rank that handles the several rows that a token has on one rank, where these rows lie in peers'
// reach (Exchange::allocate). The result is the same.
enum class FanOut : uint8_t {
  kAuto,  // kSource where all of the host's memory is equally near (one NUMA node), else kReceiver
  kSource,    // the token's rank stores every row in dispatch and reads every row in combine
  kReceiver,  // one row a token crosses each way; the experts' rank copies it and sums before
};

// How a GPU moves rows. The result is the same.
enum class Mover : uint8_t {
  kAuto,    // kBulk where the GPU has it, except in a combine of few tokens
  kVector,  // 16-byte loads and stores
  kBulk,    // the bulk copy engine, compute capability 9.0 and later
};

// Outcome of a call during which ranks die, leave, or let a deadline pass.
enum class PeerLoss : uint8_t {
  kFail,  // the call throws on all other ranks, and the exchange can no longer be used
  // CPU exchanges: the call ends without lost ranks, on all others with the same members and the
  // bits of an exchange of these alone. Lost ranks have no tokens, and a token's routes to
  // their experts give nothing, or go to replicas on ranks that are alive where a plan is given
  // some (Balancing::placement). A dispatch or combine by an older plan keeps its slots, routes to
  // lost ranks give nothing then; dispatch fills the rows of lost ranks with zeros, and combine
  // adds as in one domain. A rank that was given up and comes back gets a PeerError. Threads of one
  // process are lost only by leaving. A process is late when nothing was heard of it for the
  // timeout; a wait for ranks that are all heard of ends after twice that, and the exchange with
  // it, as with kFail. Between domains it takes more than half of the members to go on without
  // ranks that may still live, so that of two sides of a cut link one at most does; the others end
  // as with kFail. WEFT_FABRIC_ADDRESS must be set where the ranks are on several hosts.
  // GPUs: the kernels that wait end at once, and the next call, or check(), of every rank that is
  // left throws a PeerError of code kRanksLost once all of these have come to it. The last
  // CallReport::void_calls calls of a rank are void then; the exchange goes on without the lost
  // ranks, captured graphs too, and plans from before are refused. Between domains buffers from
  // before cost a copy more.
  kShrink,
  // Calls go on among the rest as with kShrink, but on the GPUs of one domain none is void: a call
  // ends only once all ranks have all that they need of it, and one during which ranks are lost is
  // made again among the rest, with what lies in the caller's memory then, before anything queued
  // behind it runs. This takes a launch more in each call. A captured call, one that is received
  // later, and a plan whose number of rows the host waits for are not made again: if one of these
  // is cut short, all is as with kShrink.
  kRepeat,
};

[[nodiscard]] constexpr bool goes_on_without_lost(PeerLoss loss) {
  return loss != PeerLoss::kFail;
}

struct CallReport;

// Same on every rank, except num_threads, num_sms, mover, fan_out, timeout and on_loss.
struct ExchangeConfig {
  int64_t hidden = 0;      // elements of a token; hidden * dtype bytes must be a multiple of 16
  int64_t max_tokens = 0;  // most tokens a rank ever passes in one call
  int num_experts =
      0;  // divisible by the number of ranks; expert e lives on rank e / (num_experts / num_ranks)
  int max_topk = 8;  // at most kMaxTopk
  Device device = {};
  std::string transport = "auto";  // "auto", or a name listed by `weft info`
  int num_threads = 0;  // workers of a rank; 0: its share of the cores, 4 between domains of GPUs
  int num_sms = 0;      // GPU: multiprocessors a call may occupy; 0: by the measured table
  Mover mover = Mover::kAuto;  // GPU
  FanOut fan_out = FanOut::kAuto;
  // GPUs of one domain: room for calls by copy engines (CallOptions::copy_engines), about three
  // times the rows that a rank can get.
  bool copy_engines = false;
  std::chrono::milliseconds timeout = std::chrono::seconds(30);  // of every wait
  PeerLoss on_peer_loss = PeerLoss::kFail;
  // With kShrink: called by the thread of a call that has lost ranks, before the call returns or,
  // on GPUs, throws.
  std::function<void(const CallReport&)> on_loss = {};
};

// Members, with PeerLoss::kShrink: equal on all ranks that are left when a call is over.
struct CallReport {
  uint64_t epoch = 0;      // how often the members have changed
  std::vector<int> alive;  // ascending
  std::vector<int> lost;   // by the last call, ascending
  // Experts that no rank alive has, ascending: those of lost ranks, but for those of which the last
  // plan was given a replica elsewhere (Balancing::placement).
  std::vector<int> lost_experts = {};
  // GPUs: when ranks were lost, so many of this rank's last calls had to be made again, those of
  // replayed graphs included, to be where the others are. A plan is one call, as are a dispatch, a
  // combine, and a plan and the dispatch by it in one launch.
  int64_t void_calls = 0;
  // GPUs: the rank furthest ahead had ended so many calls more by then, counted likewise. A rank
  // that makes no call again leaves out as many instead.
  int64_t calls_behind = 0;
  // GPUs, PeerLoss::kRepeat: the calls cut short have been made again, and plans from before hold.
  bool is_repeated = false;
};

// Rows in memory that peers can write: dispatch into it needs no staging copy. Returns to the
// exchange's pool when destroyed.
class Buffer {
 public:
  Buffer() = default;
  Buffer(Tensor tensor, std::shared_ptr<void> owner) : tensor_(tensor), owner_(std::move(owner)) {}
  [[nodiscard]] const Tensor& tensor() const { return tensor_; }

 private:
  Tensor tensor_ = {};
  std::shared_ptr<void> owner_;
};

struct ExchangeStats {
  int64_t num_plans = 0;
  int64_t num_dispatches = 0;
  int64_t num_combines = 0;
  int64_t num_copied = 0;  // dispatches and combines by copy engines, of these
  // Calls that graphs hold. While one of these is replayed, the exchange must live.
  int64_t num_captured = 0;
  std::vector<double> wait_seconds;  // [num_ranks] time this rank waited for each peer
  double host_wait_seconds = 0;  // from a GPU plan's launch until its host knew the number of rows
  // Bytes of rows and scales that this rank has put to other domains, and what they would have been
  // with a row for each arrival there.
  int64_t crossing_bytes = 0;
  int64_t crossing_bytes_by_arrival = 0;
};

struct Footprint {
  // Signals, counts, records, and on a GPU rows of short calls and of calls by copy engines.
  int64_t control_bytes = 0;
  int64_t staging_bytes = 0;
  int64_t buffer_bytes = 0;  // in use by the caller, or for rows that cross to and from GPUs
  int64_t pooled_bytes = 0;  // kept for the next allocate()
};

class Executor;

class Exchange {
 public:
  // Collective. Throws Error (kInvalidArgument) on every rank if any rank's config is wrong or
  // differs.
  Exchange(const Group& group, const ExchangeConfig& config);
  ~Exchange();
  Exchange(Exchange&&) noexcept;
  Exchange& operator=(Exchange&&) noexcept;

  [[nodiscard]] Plan plan(
      const Routing& routing, const PlanOptions& options = {}, const CallOptions& call = {}
  );
  void dispatch(
      const Plan& plan,
      const DispatchInput& in,
      const DispatchOutput& out,
      const CallOptions& call = {}
  );
  // Plans and dispatches by that plan, with the result of two calls. On GPUs of one domain one
  // launch makes both if ExchangeConfig::max_tokens is at most 512, all ranks' max_tokens *
  // max_topk at most 32,768 and the routing is topk_idx, for rows of up to 16 bits an element: rows
  // then travel while the plan is made, or with replicas once these are planned, if they and the
  // experts are not too many for a GPU's shared memory. Where ranks differ in what decides between
  // one launch and two (dtype, a map, copy_engines), all throw, and those with a stream cannot go
  // on.
  //
  // `options` say the number of rows: by row_budget or expert_stride, with Overflow::kDrop. Or they
  // leave it open, where writes_alone(): the host waits for it, and `out` has memory for any number
  // of rows, which may differ among ranks. Where plan.num_rows() is more than that, none of the
  // rows, weights, scales, sources and experts may be read, and place_rows() stores them.
  Plan dispatch(
      const Routing& routing,
      const PlanOptions& options,
      const DispatchInput& in,
      const DispatchOutput& out,
      const CallOptions& call = {}
  );
  // Local. Returns whether dispatch() of a routing is one launch, in which no peer writes this
  // rank's output: memory of allocate() gains nothing then. Where options leave the number of rows
  // open, only without replicas.
  [[nodiscard]] bool writes_alone(
      const Routing& routing,
      const PlanOptions& options,
      const DispatchInput& in,
      const CallOptions& call = {}
  ) const;
  // Local. Stores the rows of the exchange's last call, which made `plan` of `in` with too small an
  // output, in `out` of plan.num_rows() rows; counts are not written again. Throws Error
  // (kInvalidArgument) for another plan, where the call's output has the rows, and for tensors of
  // other sizes or types than the call's.
  void place_rows(
      const Plan& plan,
      const DispatchInput& in,
      const DispatchOutput& out,
      const CallOptions& call = {}
  );
  // Local. Ends the call with CallOptions::receives_later that made `plan`, or combined by it:
  // waits for the other ranks and places or sums the rows, in call.stream behind the call. Until
  // then nothing of the call's output may be read, neither may a plan that it makes, and the output
  // and source weights must live. Nothing is done if the call is received already. One call is open
  // at a time: the next one of the exchange receives it first, whatever it is.
  void receive(const Plan& plan, const CallOptions& call = {});
  // Local. Returns whether receive() has a call of `plan` to end.
  [[nodiscard]] bool is_open(const Plan& plan) const;
  void combine(
      const Plan& plan,
      const CombineInput& in,
      const CombineOutput& out,
      const CallOptions& call = {}
  );

  // Stands for a call that the other ranks make and this one cannot: they throw `reason` (of which
  // 511 bytes travel) and name this rank, and the exchange stays usable. Collective like the call.
  // Inside a capture no other rank can hear of it: throws Error (kUnsupported).
  void refuse(Op op, std::string_view reason, const CallOptions& call = {});

  // Local, but the same on all ranks. Returns whether all refused the last call, a plan, since some
  // rank has more tokens or choices than there is room for, and for no other reason: a larger
  // exchange, or grow(), makes room. Throws Error (kInvalidArgument) where this rank had no room
  // and another had another reason.
  [[nodiscard]] bool is_outgrown() const;

  // Local. Throws the error of a call that has finished on the GPU; on a CPU why the exchange can
  // no longer be used.
  void check();

  // Local. Returns what the last call found; with PeerLoss::kFail all ranks are alive.
  [[nodiscard]] CallReport report() const;
  // Local. Makes the next call, of all ranks, end without `ranks`, as if they had died. Those among
  // them that live get a PeerError. Throws Error: kInvalidArgument for this rank and for ranks out
  // of range, kUnsupported without PeerLoss::kShrink and for threads of this process that have not
  // left.
  void mask(std::span<const int> ranks);
  // Returns the text by which a new process takes the place of a rank that is lost (Group::rejoin);
  // keep it as secret as the group's. Local. Throws Error (kUnsupported) without PeerLoss::kShrink;
  // so do readmit() and grow().
  [[nodiscard]] std::string invitation() const;
  // Takes lost ranks in again, whose new processes make the exchange by an invitation meanwhile.
  // All ranks that are left call this, between the same two calls. Then all go on together, and
  // plans from before are refused. Throws Error (kInvalidArgument) for ranks that are not lost;
  // TimeoutError naming those that have not come within the timeout, PeerError if they are lost
  // again: the same on all ranks that are left, with the same members, and the exchange can be used
  // on. On GPUs replays must have ended, and in one domain the last process in the place: throws
  // Error (kRanksLost) where a rank was lost before all had called this, and TimeoutError for a
  // process that lives on. Graphs captured before go on where the GPU transport keeps addresses
  // (vmm); elsewhere a replay does nothing, and check() throws kInvalidArgument.
  void readmit(std::span<const int> ranks);
  // Lets later calls have as many tokens on a rank, and choices of a token, as any rank has asked
  // for here. All ranks that are left call this, between the same two calls. Plans from before go
  // on. Returns false if calls could have as many before. Throws Error: kInvalidArgument on every
  // rank for too many, kUnsupported as invitation() and on GPUs.
  bool grow(int64_t max_tokens, int max_topk);

  // Local. To `sums`, int64 [1, num_ranks] on the exchange's device, adds `times` the microseconds
  // that this rank has waited for each peer since the exchange was made, as stats() has them: with
  // -1 before a call and 1 behind it they grow by what the call has waited. Of several workers or
  // blocks of a GPU that wait at the same time, each counts. On a GPU it is queued in `stream` (a
  // cudaStream_t; null: as for calls) and may be captured; a call between domains has counted there
  // what it waited for rows only when it has ended.
  void add_waits(const Tensor& sums, int64_t times, void* stream = nullptr);

  // Local. Allocates [rows, cols], contents undefined. On a GPU any thread may during a call.
  [[nodiscard]] Buffer allocate(int64_t rows, int64_t cols, DType dtype);
  // Gives unused pool memory back to the system. On a GPU while no rank runs or begins a call.
  void release_pooled();

  [[nodiscard]] int rank() const;
  [[nodiscard]] int num_ranks() const;
  [[nodiscard]] const ExchangeConfig& config() const;  // with "auto" and 0 resolved
  // Allowed during a call, too, in its thread while that waits (core/interrupt.hpp); so are
  // report() and is_open().
  [[nodiscard]] ExchangeStats stats() const;
  [[nodiscard]] Footprint footprint() const;

 private:
  // For the library itself, see call/executor.hpp.
  friend class Executor;

  explicit Exchange(std::unique_ptr<Executor> executor);
  std::unique_ptr<Executor> executor_;
};

}  // namespace weft
