// SPDX-License-Identifier: Apache-2.0
// Kernels that move blocks between GPUs and do nothing else, and what timing them needs.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

namespace weft::program {

inline constexpr int kMaxLinkPeers = 32;

// Blocks of `bytes_each` that a kernel copies at the same time, one per peer.
struct LinkBlocks {
  const std::byte* from[kMaxLinkPeers] = {};
  std::byte* to[kMaxLinkPeers] = {};
  int num_blocks = 0;
  int64_t bytes_each = 0;
};

// Asynchronous on the stream of the current GPU, one thread block on each of `sms` SMs; the caller
// checks cudaGetLastError(). Each returns the bytes that it leaves out at the end of each block.

// 16-byte loads and stores, in units of 128 KiB.
int64_t copy_by_words(const LinkBlocks& blocks, int sms, cudaStream_t stream);
// The bulk copy engine, through shared memory, pieces of 4,096 or 14,336 B. Needs compute
// capability 9.0.
int64_t copy_by_small_pieces(const LinkBlocks& blocks, int sms, cudaStream_t stream);
int64_t copy_by_large_pieces(const LinkBlocks& blocks, int sms, cudaStream_t stream);

// Raises `theirs` (a peer's memory) from `begin` by ones and waits for `mine` to follow, `count`
// times in turn with the same on the peer, where `is_first` is false. Both words hold `begin`
// before. Ends after a second at the latest.
void exchange_signals(
    uint32_t* theirs,
    uint32_t* mine,
    uint32_t begin,
    uint32_t count,
    bool is_first,
    cudaStream_t stream
);

// All ranks of a domain leave together: raises signals[rank] of every peer to `round`, which grows
// by one from call to call, and waits until its own are. `regions` is PeerMemory::table(). Ends
// after 20 seconds at the latest.
void meet_peers(
    std::byte* const* regions, int rank, int num_ranks, uint32_t round, cudaStream_t stream
);

// Ends when *gate (pinned host memory) has reached `wanted`, or after a second.
void hold_stream(const uint32_t* gate, uint32_t wanted, cudaStream_t stream);

}  // namespace weft::program
