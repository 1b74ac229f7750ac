// SPDX-License-Identifier: Apache-2.0
// Warps of a block that work on the same rows, each on its own slice of the columns. Many warps on
// few rows finish a chunk soon, so that whoever waits for its signal can begin: with a row for each
// warp the first signals would come when half of all rows are through.
#pragma once

#include "kernels/row_mover.cuh"

namespace weft {

inline constexpr int kMaxTeamWarps = 8;
inline constexpr int kMaxTeams = 16;  // of a block

struct Team {
  int index = 0;  // among the teams of the role
  int count = 1;
  int warp = 0;  // in the team
  int warps = 1;
  int in_block = 0;
};

// Slices of about two kilobytes; half of one where few tokens make latency count.
__device__ __forceinline__ int team_warps(int64_t row_bytes, int64_t num_tokens) {
  const int64_t slice = num_tokens <= 512 ? 1024 : 2048;
  int warps = 1;
  while (warps < kMaxTeamWarps && row_bytes > slice * warps) {
    warps *= 2;
  }
  return warps;
}

// `block` of the `num_blocks` of a role. Neighbouring teams sit on different multiprocessors.
__device__ __forceinline__ Team make_team(int warps, int block, int num_blocks) {
  const int per_block = static_cast<int>(blockDim.x) / kWarpLanes / warps;
  Team team;
  team.warps = warps;
  team.warp = warp_in_block() % warps;
  team.in_block = warp_in_block() / warps;
  team.index = block + team.in_block * num_blocks;
  team.count = per_block * num_blocks;
  return team;
}

// A warp's columns of every row, cut into pieces.
struct Slice {
  int32_t offset = 0;
  Pieces pieces;
};

__device__ __forceinline__ Slice slice_of(const Team& team, int64_t row_bytes, int32_t most) {
  const Pieces parts = cut_row_into(row_bytes, team.warps);
  Slice slice;
  slice.offset = team.warp * parts.each;
  const int32_t bytes = max(0, parts.bytes(team.warp));
  slice.pieces = bytes == 0 ? Pieces{} : cut_row(bytes, most);
  return slice;
}

// In shared memory, zero at first: how far each team has come. Whoever completes a chunk signals
// it.
struct TeamProgress {
  uint32_t done[kMaxTeams][kMaxTeamWarps];  // chunks finished by each warp
  uint32_t signalled[kMaxTeams];
};

__device__ __forceinline__ void clear_progress(TeamProgress& progress) {
  auto* words = reinterpret_cast<uint32_t*>(&progress);
  for (uint32_t i = threadIdx.x; i < sizeof(TeamProgress) / sizeof(uint32_t); i += blockDim.x) {
    words[i] = 0;
  }
}

// One warp, all lanes, when its part of the team's next chunk is stored: calls signal(ordinal) for
// each chunk that is now complete in all warps and that no other warp has taken.
template <class Signal>
__device__ __forceinline__ void finish_chunk(
    TeamProgress& progress, const Team& team, uint32_t finished, const Signal& signal
) {
  __syncwarp();
  volatile uint32_t* done = progress.done[team.in_block];
  if (lane_index() == 0) {
    __threadfence_block();
    done[team.warp] = finished;
    __threadfence_block();
  }
  __syncwarp();
  for (;;) {
    const uint32_t mine = lane_index() < team.warps ? done[lane_index()] : 0xffffffffU;
    const uint32_t complete = __reduce_min_sync(kAllLanes, mine);
    uint32_t taken = 0xffffffffU;
    if (lane_index() == 0) {
      __threadfence_block();
      const uint32_t next = *static_cast<volatile uint32_t*>(&progress.signalled[team.in_block]);
      if (next < complete &&
          atomicCAS(&progress.signalled[team.in_block], next, next + 1) == next) {
        taken = next;
      } else if (next < complete) {
        taken = 0xfffffffeU;  // another warp took it; look again
      }
    }
    taken = __shfl_sync(kAllLanes, taken, 0);
    if (taken == 0xffffffffU) {
      return;
    }
    if (taken != 0xfffffffeU) {
      signal(static_cast<int>(taken));
    }
  }
}

}  // namespace weft
