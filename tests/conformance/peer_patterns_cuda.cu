// SPDX-License-Identifier: Apache-2.0
#include "conformance/peer_patterns_cuda.hpp"
#include "cuda/device/wait.cuh"
#include "cuda/layout/control.hpp"

namespace weft::test {
namespace {

constexpr int kThreads = 256;

// Returns the place as kernels of an exchange find it: an entry may not be in the table yet.
__device__ uint32_t* words_at(const PatternPlace& place) {
  RankView me;
  me.regions = place.table;
  me.new_regions = place.new_table;
  std::byte* const data = region_of(me, place.owner, place.region);
  return reinterpret_cast<uint32_t*>(data + place.offset);
}

__global__ void write_kernel(PatternPlace place, int writer) {
  const uint32_t i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < place.num_words) {
    words_at(place)[i] = pattern_word(writer, place.owner, i);
  }
}

__global__ void check_kernel(PatternPlace place, int writer, uint32_t* num_wrong) {
  const uint32_t i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < place.num_words && words_at(place)[i] != pattern_word(writer, place.owner, i)) {
    atomicAdd(num_wrong, 1U);
  }
}

__global__ void spin_kernel(const volatile uint32_t* flag, uint64_t at_most_ns) {
  uint64_t begin;
  uint64_t now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(begin));
  do {
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  } while (*flag == 0 && now - begin < at_most_ns);
}

uint32_t num_blocks(const PatternPlace& place) {
  return (place.num_words + kThreads - 1) / kThreads;
}

}  // namespace

void write_pattern(const PatternPlace& place, int writer, cudaStream_t stream) {
  write_kernel<<<num_blocks(place), kThreads, 0, stream>>>(place, writer);
}

void check_pattern(
    const PatternPlace& place, int writer, uint32_t* num_wrong, cudaStream_t stream
) {
  check_kernel<<<num_blocks(place), kThreads, 0, stream>>>(place, writer, num_wrong);
}

void spin_on_flag(const uint32_t* flag, uint64_t at_most_ns, cudaStream_t stream) {
  spin_kernel<<<1, 1, 0, stream>>>(flag, at_most_ns);
}

}  // namespace weft::test
