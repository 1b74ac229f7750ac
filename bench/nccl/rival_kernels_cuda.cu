// SPDX-License-Identifier: Apache-2.0
#include <cuda_bf16.h>

#include "nccl/rival_kernels_cuda.hpp"
#include "rival_pattern.hpp"

namespace weft::bench {
namespace {

constexpr int kWarps = 8;  // of a block
constexpr int kThreads = kWarps * 32;

__device__ int lane() {
  return static_cast<int>(threadIdx.x % 32);
}

// The warp's list, one entry per lane, -1 beyond the width.
__device__ int32_t my_entry(const DeviceLists& lists, int64_t list) {
  return lane() < lists.width ? lists.rows[list * lists.width + lane()] : -1;
}

__global__ void spread(uint4* to, const uint4* from, DeviceLists lists, int64_t row_vecs) {
  constexpr int kInFlight = 4;
  const int64_t list = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32;
  if (list >= lists.num_lists) {
    return;
  }
  const int32_t entry = my_entry(lists, list);
  const unsigned targets = __ballot_sync(~0U, entry >= 0);
  if (targets == 0) {
    return;
  }
  const uint4* source = from == nullptr ? nullptr : from + list * row_vecs;
  constexpr int kStep = 32 * kInFlight;
  for (int64_t begin = blockIdx.y * kStep; begin < row_vecs; begin += gridDim.y * kStep) {
    const int64_t first = begin + lane();
    uint4 values[kInFlight] = {};
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) {
      if (source != nullptr && first + i * 32 < row_vecs) {
        values[i] = __ldcs(source + first + i * 32);
      }
    }
    for (unsigned left = targets; left != 0; left &= left - 1) {
      uint4* target = to + __shfl_sync(~0U, entry, __ffs(left) - 1) * row_vecs;
#pragma unroll
      for (int i = 0; i < kInFlight; ++i) {
        if (first + i * 32 < row_vecs) {
          __stcs(target + first + i * 32, values[i]);
        }
      }
    }
  }
}

// Two bf16 of a word, as fp32.
__device__ float2 unpack(uint32_t word) {
  return {__uint_as_float(word << 16), __uint_as_float(word & 0xffff0000U)};
}

__device__ void add(float2 (&sums)[4], uint4 value) {
  const uint32_t words[4] = {value.x, value.y, value.z, value.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 pair = unpack(words[i]);
    sums[i].x += pair.x;
    sums[i].y += pair.y;
  }
}

__device__ uint4 pack(const float2 (&sums)[4]) {
  uint32_t words[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const __nv_bfloat162 pair = __float22bfloat162_rn(sums[i]);
    words[i] = *reinterpret_cast<const uint32_t*>(&pair);
  }
  return {words[0], words[1], words[2], words[3]};
}

// Loads kRows rows of kColumns * 512 bytes at a time before it adds any.
template <int kRows, int kColumns>
__global__ void sum(uint4* to, const uint4* from, DeviceLists lists, int64_t row_vecs) {
  const int64_t list = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32;
  if (list >= lists.num_lists) {
    return;
  }
  const int32_t entry = my_entry(lists, list);
  constexpr int kStep = 32 * kColumns;
  for (int64_t part = blockIdx.y * kStep; part < row_vecs; part += gridDim.y * kStep) {
    const int64_t first = part + lane();
    float2 sums[kColumns][4] = {};
    for (int begin = 0; begin < lists.width; begin += kRows) {
      uint4 values[kRows][kColumns];
#pragma unroll
      for (int k = 0; k < kRows; ++k) {
        const int32_t row = __shfl_sync(~0U, entry, (begin + k) % 32);
        const bool is_row = begin + k < lists.width && row >= 0;
#pragma unroll
        for (int c = 0; c < kColumns; ++c) {
          values[k][c] = is_row && first + c * 32 < row_vecs
                             ? __ldcs(from + row * row_vecs + first + c * 32)
                             : uint4{};
        }
      }
#pragma unroll
      for (int k = 0; k < kRows; ++k) {
#pragma unroll
        for (int c = 0; c < kColumns; ++c) {
          add(sums[c], values[k][c]);
        }
      }
    }
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      if (first + c * 32 < row_vecs) {
        __stcs(to + list * row_vecs + first + c * 32, pack(sums[c]));
      }
    }
  }
}

__global__ void fill(uint16_t* to, int64_t num_rows, int64_t columns, uint32_t seed) {
  for (int64_t row = blockIdx.x; row < num_rows; row += gridDim.x) {
    for (int64_t column = threadIdx.x; column < columns; column += blockDim.x) {
      to[row * columns + column] =
          pattern(seed, static_cast<uint32_t>(row), static_cast<uint32_t>(column));
    }
  }
}

// A warp per list; few lists are cut into four parts of the row, or a GPU would not be full.
dim3 grid_of(int64_t num_lists) {
  constexpr int64_t kFew = 16384;
  return {static_cast<unsigned>((num_lists + kWarps - 1) / kWarps), num_lists < kFew ? 4U : 1U};
}

}  // namespace

void spread_rows(
    void* to, const void* from, const DeviceLists& lists, int64_t row_bytes, cudaStream_t stream
) {
  if (lists.num_lists > 0) {
    spread<<<grid_of(lists.num_lists), kThreads, 0, stream>>>(
        static_cast<uint4*>(to), static_cast<const uint4*>(from), lists, row_bytes / 16
    );
  }
}

void zero_rows(void* to, const DeviceLists& lists, int64_t row_bytes, cudaStream_t stream) {
  spread_rows(to, nullptr, lists, row_bytes, stream);
}

void sum_rows(
    void* to, const void* from, const DeviceLists& lists, int64_t row_bytes, cudaStream_t stream
) {
  if (lists.num_lists == 0) {
    return;
  }
  auto* kernel = lists.width == 1   ? sum<1, 4>
                 : lists.width == 2 ? sum<2, 4>
                 : lists.width <= 4 ? sum<4, 2>
                                    : sum<8, 1>;
  kernel<<<grid_of(lists.num_lists), kThreads, 0, stream>>>(
      static_cast<uint4*>(to), static_cast<const uint4*>(from), lists, row_bytes / 16
  );
}

void fill_rows(void* to, int64_t num_rows, int64_t row_bytes, uint32_t seed, cudaStream_t stream) {
  fill<<<1024, 256, 0, stream>>>(static_cast<uint16_t*>(to), num_rows, row_bytes / 2, seed);
}

}  // namespace weft::bench
