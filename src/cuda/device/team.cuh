// SPDX-License-Identifier: Apache-2.0
// Teams of warps in a block: a team shares each row, one slice of the columns per warp. With
// several warps to a row the first chunks finish soon, so that ranks that wait for their signals
// can begin; with one warp to a row the first signals would come when half of all rows are through.
// One more warp of each block raises the signals.
//
// The roles of dispatch and combine divide their work by these functions.
#pragma once

#include "cuda/device/row_mover.cuh"

namespace weft {

inline constexpr int kMaxTeamWarps = 8;  // as many as kMoverWarps
inline constexpr int kMoverWarps = 8;    // of a block; one more signals. A guess
inline constexpr int kMaxTeams = kMoverWarps;
inline constexpr int kRoleThreads = (kMoverWarps + 1) * kWarpLanes;

// A kernel that moves rows is compiled once for each of the two ways to move them, Mover::kVector
// and Mover::kBulk, which these types stand for. Each warp makes its own, with the index of its
// stages among the block's and kBarriers words of shared memory.
struct VectorMover {
  static constexpr bool kIsCompiled = true;
  static constexpr int kBarriers = 1;  // an array has at least one; they are not used
  static constexpr int kSharedBytes = 0;
  static constexpr int32_t kPiece = kVectorPiece;

  __device__ __forceinline__ VectorMover(const RankView&, int /*index*/, uint64_t* /*full*/) {}
  static __device__ __forceinline__ void finish() {}
};

extern __shared__ __align__(128) std::byte dynamic_shared[];

struct BulkMover : BulkRing {
  static constexpr bool kIsCompiled = ptx::kHasBulkCopies;
  static constexpr int kBarriers = kBulkStages;
  static constexpr int kSharedBytes = kMoverWarps * kBulkStages * kBulkPiece;
  static constexpr int32_t kPiece = kBulkPiece;

  __device__ __forceinline__ BulkMover(const RankView& me, int index, uint64_t* full)
      : BulkRing(me, dynamic_shared + index * kBulkStages * kBulkPiece, full) {}
  // Completes a thread's stores; all threads of a kernel call it before the kernel ends.
  static __device__ __forceinline__ void finish() { ptx::wait_stores<0>(); }
};

// The `index`-th of the `count` blocks of a role.
struct RoleBlock {
  int index = 0;
  int count = 1;
};

struct Team {
  int index = 0;  // among the teams of the role
  int count = 1;
  int warp = 0;  // in the team
  int warps = 1;
  int in_block = 0;
};

// Returns how many warps share a row: as many as leave each a slice of at most 2 KiB, or 1 KiB in
// short calls, where latency counts. Both sizes are guesses.
WEFT_HD inline int team_warps(int64_t row_bytes, int64_t num_tokens) {
  const int64_t slice = is_short_call(num_tokens) ? 1024 : 2048;
  int warps = 1;
  while (warps < kMaxTeamWarps && row_bytes > slice * warps) {
    warps *= 2;
  }
  return warps;
}

// Returns how many warps share a row where no rank waits for the first rows, at most `most`: the
// fewer share it, the fewer instructions it takes. But each team of the role's blocks still has
// some chunks, so that all end at about the same time; how many is a guess.
WEFT_HD inline int least_team_warps(int most, int num_chunks, int num_blocks) {
  constexpr int kLeastChunks = 3;
  int warps = most;
  while (warps > 1 && num_chunks * warps >= kLeastChunks * 2 * kMoverWarps * num_blocks) {
    warps /= 2;
  }
  return warps;
}

__device__ __forceinline__ int team_index(int block, int num_blocks, int in_block) {
  return block + in_block * num_blocks;
}

// Returns the number of first, first + step, ... below `end`.
__device__ __forceinline__ int count_from(int first, int step, int end) {
  return first < end ? (end - 1 - first) / step + 1 : 0;
}

// Returns this warp's team in `block` of a role. Neighbouring teams sit on different
// multiprocessors.
__device__ __forceinline__ Team make_team(int warps, int block, int num_blocks) {
  const int per_block = kMoverWarps / warps;
  Team team;
  team.warps = warps;
  team.warp = warp_in_block() % warps;
  team.in_block = warp_in_block() % kMoverWarps / warps;  // warps beyond the movers: the first
  team.index = team_index(block, num_blocks, team.in_block);
  team.count = per_block * num_blocks;
  return team;
}

// A warp's columns of every row, cut into pieces.
struct Slice {
  int32_t offset = 0;
  Pieces pieces;
};

// Returns the `part`-th slice of `num_parts`.
__device__ __forceinline__ Slice
slice_of(int part, int num_parts, int64_t row_bytes, int32_t most) {
  const Pieces parts = cut_row_into(row_bytes, num_parts);
  Slice slice;
  slice.offset = part * parts.each;
  const int32_t bytes = max(0, parts.bytes(part));
  slice.pieces = bytes == 0 ? Pieces{} : cut_row(bytes, most);
  return slice;
}

__device__ __forceinline__ Slice slice_of(const Team& team, int64_t row_bytes, int32_t most) {
  return slice_of(team.warp, team.warps, row_bytes, most);
}

// How many chunks each warp of each team has stored, in shared memory, zero at first.
struct TeamProgress {
  uint32_t done[kMaxTeams][kMaxTeamWarps];
};

__device__ __forceinline__ void clear_progress(TeamProgress& progress) {
  auto* words = reinterpret_cast<uint32_t*>(&progress);
  for (uint32_t i = threadIdx.x; i < sizeof(TeamProgress) / sizeof(uint32_t); i += blockDim.x) {
    words[i] = 0;
  }
}

// Reports, by all lanes of a warp, that its part of `finished` chunks is stored.
__device__ __forceinline__ void report_progress(
    TeamProgress& progress, const Team& team, uint32_t finished
) {
  __syncwarp();
  if (lane_index() == 0) {
    __threadfence_block();
    atomicExch(&progress.done[team.in_block][team.warp], finished);
  }
}

// Calls, by the block's last warp, signal(team in block, n) for a team's n-th chunk once all of the
// team's warps have stored it. One fence covers all chunks complete by then; warps that move rows
// never wait for the fence. chunks_of(team in block) is the number of a team's chunks.
template <class ChunksOf, class Signal>
__device__ __forceinline__ void signal_chunks(
    const RankView& me,
    TeamProgress& progress,
    int teams,
    int warps_per_team,
    const ChunksOf& chunks_of,
    const Signal& signal
) {
  const int lane = lane_index();
  const uint32_t total = lane < teams ? chunks_of(lane) : 0;
  uint32_t sent = 0;
  uint32_t round = 0;
  while (__any_sync(kAllLanes, sent < total)) {
    uint32_t complete = total;
    for (int warp = 0; lane < teams && warp < warps_per_team; ++warp) {
      const uint32_t done = atomicOr(&progress.done[lane][warp], 0U);
      complete = done < complete ? done : complete;
    }
    uint32_t left = __ballot_sync(kAllLanes, complete > sent);
    if (left == 0) {
      // Both numbers, of looks between looks at the stop flag and of nanoseconds, are guesses.
      if (++round % 256 == 0 && is_stopped(me)) {
        return;
      }
      __nanosleep(40);
      continue;
    }
    __threadfence_block();
    __syncwarp();  // the lane that signals is not the one that saw the count
    ptx::fence_sys();
    while (left != 0) {
      const int team = __ffs(static_cast<int>(left)) - 1;
      left &= left - 1;
      const uint32_t end = __shfl_sync(kAllLanes, complete, team);
      for (uint32_t n = __shfl_sync(kAllLanes, sent, team); n < end; ++n) {
        signal(team, static_cast<int>(n));
      }
    }
    sent = complete;
  }
}

}  // namespace weft
