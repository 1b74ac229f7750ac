// SPDX-License-Identifier: Apache-2.0
#include "core/gpu/driver.hpp"

#include <cuda.h>

#include "core/gpu/check.hpp"

namespace weft {
namespace {

constexpr unsigned kDriverVersion = 12000;

}  // namespace

void* driver_function(const char* name) {
  void* function = nullptr;
  auto found = cudaDriverEntryPointSymbolNotFound;
  const cudaError_t status =
      cudaGetDriverEntryPointByVersion(name, &function, kDriverVersion, cudaEnableDefault, &found);
  if (status != cudaSuccess) {
    static_cast<void>(cudaGetLastError());  // leave no error behind for the next call
  }
  return status == cudaSuccess && found == cudaDriverEntryPointSuccess ? function : nullptr;
}

RemoteWrites remote_writes_of(int device, const Context& context) {
  int order = 0;
  int can_flush = 0;
  WEFT_CUDA(
      context, cudaDeviceGetAttribute(&order, cudaDevAttrGPUDirectRDMAWritesOrdering, device)
  );
  WEFT_CUDA(context, cudaDeviceGetAttribute(&can_flush, cudaDevAttrCanFlushRemoteWrites, device));
  if (order >= cudaGPUDirectRDMAWritesOrderingOwner) {
    return RemoteWrites::kInOrder;
  }
  return can_flush != 0 ? RemoteWrites::kAfterFlush : RemoteWrites::kUnknown;
}

void wait_for_word(
    cudaStream_t stream,
    const uint32_t* word,
    uint32_t value,
    RemoteWrites writes,
    const Context& context
) {
  const unsigned flags =
      CU_STREAM_WAIT_VALUE_GEQ |
      (writes == RemoteWrites::kAfterFlush ? unsigned{CU_STREAM_WAIT_VALUE_FLUSH} : 0U);
  const auto place = reinterpret_cast<CUdeviceptr>(word);
  WEFT_CUDA(context, WEFT_DRIVER(cuStreamWaitValue32)(stream, place, value, flags));
}

void write_word(cudaStream_t stream, uint32_t* word, uint32_t value, const Context& context) {
  const unsigned flags = CU_STREAM_WRITE_VALUE_DEFAULT;  // behind a barrier for all memory
  const auto place = reinterpret_cast<CUdeviceptr>(word);
  WEFT_CUDA(context, WEFT_DRIVER(cuStreamWriteValue32)(stream, place, value, flags));
}

}  // namespace weft
