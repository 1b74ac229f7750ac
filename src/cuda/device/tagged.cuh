// SPDX-License-Identifier: Apache-2.0
// Words tagged with their call, in the RoutingMap of a rank: all routing of a source for a plan
// that every rank makes by itself (plan/swap_routing.cuh), or the weights of its tokens for a
// combine whose rows are eager (combine/sum.cuh sends them, combine/reduce.cuh reads them).
#pragma once

#include "cuda/device/wait.cuh"

namespace weft {

// Returns 64 bits with a value and, in the upper half, its call's epoch: a reader that sees the
// epoch has the value, so that neither end needs a fence.
__device__ __forceinline__ uint64_t tagged(uint32_t epoch, uint32_t value) {
  return uint64_t{epoch} << 32 | value;
}
__device__ __forceinline__ void store_tagged(uint64_t* to, uint32_t epoch, uint32_t value) {
  ptx::store_relaxed_sys(to, tagged(epoch, value));
}

__device__ __forceinline__ bool is_of_call(uint64_t word, uint32_t epoch) {
  return static_cast<uint32_t>(word >> 32) == epoch;
}

// Waits, by one thread, until *from is of the site's call; returns 0 if the call is given up. Not
// inlined, as it is called in many places, nearly always with the value there already.
__device__ __noinline__ inline uint64_t await_tagged(
    const RankView& me, const uint64_t* from, const WaitSite& site
) {
  // The handshakes are awaited elsewhere, and their timeout says more than one here: so this wait
  // is twice as long.
  constexpr uint32_t kTimes = 2;
  Patience patience(ptx::clock_now());
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
    if (patience.look(ptx::clock_now(), me.look_ns) > kTimes * me.timeout_ns) {
      raise_timeout(me, site, static_cast<uint32_t>(seen >> 32), site.epoch);
      return 0;
    }
    __nanosleep(me.poll_ns);
  }
}

// Gets, by one thread, the value at `from`, where it has read `seen`. Returns false if the call is
// given up.
__device__ __forceinline__ bool wait_tagged(
    const RankView& me, const uint64_t* from, const WaitSite& site, uint64_t seen, uint32_t& value
) {
  if (!is_of_call(seen, site.epoch)) {
    seen = await_tagged(me, from, site);
  }
  value = static_cast<uint32_t>(seen);
  return is_of_call(seen, site.epoch);
}

// Returns the address of the routing of `source` in the memory of `rank`.
__device__ __forceinline__ uint64_t* routing_of(
    const RankView& me, int rank, uint32_t epoch, int source
) {
  const uint64_t offset = me.map.routing_offset(epoch, static_cast<uint32_t>(source));
  return reinterpret_cast<uint64_t*>(control_of(me, rank) + offset);
}

}  // namespace weft
