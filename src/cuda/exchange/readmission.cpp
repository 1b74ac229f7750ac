// SPDX-License-Identifier: Apache-2.0
// Takes new processes into the places of lost ranks, and joins as one of them.
#include "cuda/exchange/readmission.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <thread>
#include <utility>
#include <vector>

#include "core/clock.hpp"
#include "cuda/exchange/exchange.hpp"
#include "group/agree.hpp"
#include "group/control_plane.hpp"

namespace weft {

std::string CudaExchange::invitation() const {
  return losses_ ? losses_->invitation("peer") : Executor::invitation();
}

Facts gather_facts(const Group& group, const Meeting& who, const Facts& own) {
  const std::vector<Facts> all = gather_values(group, own);
  Facts known = own;
  for (const int rank : who.ranks) {
    const Facts& theirs = all[static_cast<size_t>(rank)];
    // Some may have gone on already, when another was lost before all had.
    const bool is_ahead = theirs.last_call != kUnknownCalls && theirs.last_call > known.last_call;
    known = known.last_call == kUnknownCalls || is_ahead ? theirs : known;
  }
  const Context context = context_of(group, "peer");
  WEFT_CHECK(
      context,
      known.last_call != kUnknownCalls,
      ErrorCode::kPeerFailed,
      "rejoin: nobody is left of those who know of the calls before"
  );
  WEFT_CHECK_ARG(
      context,
      known.config == own.config,
      "rejoin: hidden, max_tokens, num_experts, max_topk, copy_engines = {} (those of the others: "
      "{})",
      fmt::join(own.config, ", "),
      fmt::join(known.config, ", ")
  );
  return known;
}

std::array<int64_t, 5> sizes_of(const ExchangeConfig& config) {
  return {
      config.hidden, config.max_tokens, config.num_experts, config.max_topk, config.copy_engines};
}

namespace {

uint32_t all_but(const Meeting& who, int num_ranks) {
  uint32_t lost = 0;
  for (int rank = 0; rank < num_ranks; ++rank) {
    lost |= who.has(rank) ? 0U : 1U << static_cast<uint32_t>(rank);
  }
  return lost;
}

}  // namespace

// Makes everything again, so that nothing of a rank lost meanwhile is left.
void CudaExchange::meet_as_newcomer(const Group& group, const Meeting& who) {
  own_.reset();
  plans_.reset();
  buffers_.reset();
  staging_ = {};
  memory_.reset();
  const Facts facts = gather_facts(group, who, {.config = sizes_of(settings_)});
  const int gpu = settings_.device.index;
  fused_replicas_ = static_cast<uint32_t>(facts.fused_replicas);
  WEFT_CHECK_ARG(
      context_,
      (fused_replicas_ & ~fused_replicas(shared_bytes())) == 0,
      "rejoin: the other GPUs have more shared memory than GPU {}",
      gpu
  );
  memory_ =
      std::make_shared<PeerMemory>(group, gpu, control_map_.num_bytes(), std::string_view(), who);
  refusals_ = std::make_unique<RefusalBoard>(group);
  agree(group, [&] {
    set_up(facts.stamp);
    find_control();
    go_on_without(all_but(who, context_.num_ranks), facts.last_call);
  });
}

void CudaExchange::meet_newcomers(const Group& group, const Meeting& who) {
  const Facts own = {
      .last_call = own_calls().last,
      .stamp = view_.stamp,
      .fused_replicas = fused_replicas_,
      .config = sizes_of(settings_)};
  const Facts facts = gather_facts(group, who, own);
  memory_->meet(group, who);
  refusals_ = std::make_unique<RefusalBoard>(group);
  agree(group, [&] {
    if (find_control()) {
      retire_graphs();
    }
    go_on_without(all_but(who, context_.num_ranks), facts.last_call);
    balance_ = {};  // newcomers know of none
  });
}

// A lost rank that was never connected gets dummy memory here, where kernels may store.
bool CudaExchange::find_control() {
  bool has_moved = false;
  for (int rank = 0; rank < context_.num_ranks; ++rank) {
    std::byte* control = memory_->control_of(rank);
    if (control == nullptr) {
      if (nobodys_.get() == nullptr) {
        nobodys_.create(control_map_.num_bytes(), own_->stream.get(), context_);
      }
      control = nobodys_.get();
    }
    has_moved = has_moved || control != view_.control[rank];
    view_.control[rank] = control;
  }
  return has_moved;
}

// Graphs that were captured so far keep their LocalState, by which all ranks are lost to them.
void CudaExchange::retire_graphs() {
  CudaBuffer<LocalState> fresh;
  fresh.create(1, own_->stream.get(), context_);
  const size_t at = offsetof(LocalState, wait_ns);
  WEFT_CUDA(
      context_,
      cudaMemcpyAsync(
          reinterpret_cast<std::byte*>(fresh.get()) + at,
          reinterpret_cast<const std::byte*>(own_->local.get()) + at,
          sizeof(LocalState) - at,
          cudaMemcpyDeviceToDevice,
          own_->stream.get()
      )
  );
  own_->retired.push_back(std::exchange(own_->local, std::move(fresh)));
  view_.local = own_->local.get();
  // State of a rank that broke off calls ago and says and stores nothing any more.
  constexpr uint32_t kLongAgo = 16;
  LocalState none;
  none.stopped = StopState::kBroken;
  none.broken_epoch = none.epoch - kLongAgo;
  none.lost = ~uint32_t{0};
  set_local(own_->retired.back().get(), none);
}

void CudaExchange::rejoin(const Group& group, const Invitation& invitation) {
  WEFT_CHECK_ARG(
      context_,
      goes_on_without_lost(settings_.on_peer_loss),
      "rejoin: on_peer_loss = fail (expected shrink or repeat, as on the others)"
  );
  WEFT_CHECK_ARG(
      context_,
      invitation.transport == "peer",
      "rejoin: the others' exchange is by transport {}, and not on GPUs",
      invitation.transport
  );
  WEFT_CUDA(context_, cudaFree(nullptr));        // so that no rank waits for CUDA to begin
  const CallRepeats::Lock lock(repeats_.get());  // the watch does not answer before all is there
  watch_for_losses(group);
  losses_->meet([this](const Group& members, const Meeting& who) { meet_as_newcomer(members, who); }
  );
  losses_->resume();
}

// Ends like a call: in the same way and with the same members on all ranks that are left.
void CudaExchange::readmit(std::span<const int> ranks) {
  if (!losses_) {
    Executor::readmit(ranks);
    return;
  }
  losses_->follow_caller();
  check();
  losses_->check_lost(ranks);
  if (ranks.empty()) {
    return;
  }
  const CudaDeviceGuard guard(settings_.device.index);
  const RelaxedCapture no_capture;
  WEFT_CHECK(
      context_,
      !open_ || open_->is_captured,
      ErrorCode::kUnsupported,
      "readmit: a call has been sent and not received"
  );
  await_last_call();
  WEFT_CUDA(context_, cudaDeviceSynchronize());  // replays, too
  check();
  await_silence(ranks);
  const CallRepeats::Lock lock(repeats_.get());  // the watch does not answer meanwhile
  void_calls_ = calls_behind_ = 0;
  const LossWatch::Calls own = own_calls();
  std::optional<LossWatch::Agreement> agreed;
  std::vector<int> missing;
  try {
    agreed = losses_->assemble("readmit", own);
  } catch (const Error&) {
    set_broken();
    throw;
  }
  if (agreed) {  // others are in a call that has lost ranks
    raise_losses(running_op_, *agreed);
  }
  try {
    missing = losses_->readmit(ranks, [this](const Group& members, const Meeting& who) {
      meet_newcomers(members, who);
    });
  } catch (const Error&) {
    set_broken();
    throw;
  }
  losses_->resume();
  if (const CallReport now = report(); settings_.on_loss && !now.lost.empty()) {
    settings_.on_loss(now);
  }
  losses_->check_back(ranks, missing);
}

// Waits until the last processes in the places of `ranks` no longer store, on any GPU.
void CudaExchange::await_silence(std::span<const int> ranks) const {
  const Deadline deadline(settings_.timeout);
  for (const int rank : ranks) {
    while (!losses_->has_ended(rank) || !memory_->is_unmapped_by(rank)) {
      WEFT_CHECK(
          context_,
          !deadline.has_passed(),
          ErrorCode::kTimeout,
          "readmit: the last process in the place of rank {} has not ended within {}, and may "
          "still "
          "write to this GPU (end it first)",
          rank,
          seconds_text(settings_.timeout)
      );
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
  }
}

}  // namespace weft
