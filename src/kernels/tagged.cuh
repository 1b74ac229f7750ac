// SPDX-License-Identifier: Apache-2.0
// A value of 32 bits and the epoch of the call that it is for, in one word: who sees the epoch has
// the value, so that neither end needs a fence. For the few values that a call waits for first.
#pragma once

#include "kernels/wait.cuh"

namespace weft {

__device__ __forceinline__ void store_tagged(uint64_t* to, uint32_t epoch, uint32_t value) {
  ptx::store_relaxed_sys(to, uint64_t{epoch} << 32 | value);
}

__device__ __forceinline__ bool is_of_call(uint64_t word, uint32_t epoch) {
  return static_cast<uint32_t>(word >> 32) == epoch;
}

// One thread: until *from is of the site's call; 0 if the call is given up. Apart from where it is
// called, which is many times and nearly always with the word there already.
__device__ __noinline__ uint64_t
await_tagged(const RankView& me, const uint64_t* from, const WaitSite& site) {
  // The call words are awaited elsewhere and say more than a deadline here.
  constexpr uint32_t kPatience = 2;
  const uint64_t begin = ptx::nanoseconds();
  for (;;) {
    uint64_t seen = 0;
    for (int i = 0; i < 32; ++i) {
      seen = ptx::load_relaxed_sys(from);
      if (is_of_call(seen, site.epoch)) {
        return seen;
      }
    }
    if (is_stopped(me)) {
      return 0;
    }
    if (ptx::nanoseconds() - begin > kPatience * me.timeout_ns) {
      raise_timeout(me, site, static_cast<uint32_t>(seen >> 32), site.epoch);
      return 0;
    }
    __nanosleep(me.poll_ns);
  }
}

// One thread: the value at `from`, where `seen` was read. False if the call is given up.
__device__ __forceinline__ bool wait_tagged(
    const RankView& me, const uint64_t* from, const WaitSite& site, uint64_t seen, uint32_t& value
) {
  if (!is_of_call(seen, site.epoch)) {
    seen = await_tagged(me, from, site);
  }
  value = static_cast<uint32_t>(seen);
  return is_of_call(seen, site.epoch);
}

}  // namespace weft
