// SPDX-License-Identifier: Apache-2.0
// Kernels that a framework runs around its all-to-all: rows of bf16 spread and summed on one GPU.
// One warp per row and 16 bytes per lane, several loads in flight: as fast as device memory allows.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace weft::bench {

// [num_lists, width] row numbers in device memory, -1 = none; width at most 32.
struct DeviceLists {
  const int32_t* rows = nullptr;
  int64_t num_lists = 0;
  int width = 1;
};

// All are asynchronous on the stream of the current GPU; the caller checks cudaGetLastError().
// Rows are `row_bytes` long, a multiple of 16.

// Reads each row i of `from` once and writes it to the rows lists[i] of `to`.
void spread_rows(
    void* to, const void* from, const DeviceLists& lists, int64_t row_bytes, cudaStream_t stream
);
// Fills the rows lists[i] of `to` with zeros.
void zero_rows(void* to, const DeviceLists& lists, int64_t row_bytes, cudaStream_t stream);
// Row i of `to` = the sum of the rows lists[i] of `from`, in fp32 in that order, rounded once.
void sum_rows(
    void* to, const void* from, const DeviceLists& lists, int64_t row_bytes, cudaStream_t stream
);
// Element [row, column] = pattern(seed, row, column).
void fill_rows(void* to, int64_t num_rows, int64_t row_bytes, uint32_t seed, cudaStream_t stream);

}  // namespace weft::bench
