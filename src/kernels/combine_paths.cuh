// SPDX-License-Identifier: Apache-2.0
// How rows come to the warps that add them, and the kernels made for each way.
#pragma once

#include "core/check_cuda.hpp"
#include "kernels/launch.hpp"
#include "kernels/row_pipeline.cuh"

namespace weft {

// The less a row has, the fewer warps can share it without waiting more than they add.
using ShortRows = PipelineShape<5, 2>;
using LongRows = PipelineShape<3, 4>;

// How rows come to the warps that add.
enum class RowPath : uint8_t { kVector, kShortRows, kLongRows };

inline RowPath path_of(Mover mover, int64_t row_bytes) {
  if (mover != Mover::kBulk) {
    return RowPath::kVector;
  }
  return row_bytes <= ShortRows::kPiece ? RowPath::kShortRows : RowPath::kLongRows;
}

struct CombineKernel {
  void (*function)(CombineLaunch);
  unsigned threads;  // of a block
  int shared_bytes;
};

inline void prepare(const CombineKernel& kernel) {
  cudaFuncAttributes attributes{};
  WEFT_CUDA(Context{}, cudaFuncGetAttributes(&attributes, kernel.function));
  if (kernel.shared_bytes != 0 && attributes.binaryVersion >= 90) {
    WEFT_CUDA(
        Context{},
        cudaFuncSetAttribute(
            kernel.function, cudaFuncAttributeMaxDynamicSharedMemorySize, kernel.shared_bytes
        )
    );
  }
}

inline void launch(
    const CombineKernel& kernel, unsigned blocks, const CombineLaunch& call, cudaStream_t stream
) {
  const auto shared_bytes = static_cast<size_t>(kernel.shared_bytes);
  kernel.function<<<blocks, kernel.threads, shared_bytes, stream>>>(call);
  WEFT_CUDA(Context{}, cudaGetLastError());
}

}  // namespace weft
