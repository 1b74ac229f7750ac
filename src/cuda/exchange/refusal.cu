// SPDX-License-Identifier: Apache-2.0
// Tells peers of a call that this rank refuses before its kernel, so that none waits.
#include "cuda/device/kernel.cuh"
#include "cuda/device/wait.cuh"
#include "cuda/layout/launch.hpp"

namespace weft {
namespace {

__global__ void refuse(const __grid_constant__ RankView me, Op op) {
  const uint32_t epoch = current_epoch(me);
  DeviceHandshake word;
  word.op = op;
  word.stamp = me.stamp;
  const WordStatus own = own_status(me, epoch);
  word.status = own == WordStatus::kGood ? WordStatus::kRefused : own;
  post_word_by_thread(me, epoch, word);
  // The words of all ranks are awaited as by every kernel: a word lives for two calls.
  const int peer = static_cast<int>(threadIdx.x);
  if (peer < me.num_ranks) {
    const auto slot = me.map.signals().word(epoch, static_cast<uint32_t>(peer));
    const WaitSite site = {op, epoch, peer, WaitFor::kWord};
    static_cast<void>(wait_reached(me, signal_of(me, me.rank, slot), epoch, site));
  }
  finish_call(me, epoch);
}

}  // namespace

void prepare_refusal() {
  load(refuse);
}

void launch_refusal(const RankView& me, Op op, cudaStream_t stream) {
  refuse<<<1, kMaxDomainRanks, 0, stream>>>(me, op);
  WEFT_CUDA(Context{}, cudaGetLastError());
}

}  // namespace weft
