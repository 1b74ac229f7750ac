// SPDX-License-Identifier: Apache-2.0
#include "core/driver_cuda.hpp"

#include <cuda.h>

#include <string_view>

#include "core/check.hpp"
#include "core/check_cuda.hpp"

namespace weft {
namespace {

constexpr unsigned kDriverVersion = 12000;

// Null if the driver has none of this name.
template <class Function>
Function* driver_function(const char* name, const Context& context) {
  void* function = nullptr;
  auto found = cudaDriverEntryPointSymbolNotFound;
  WEFT_CUDA(
      context,
      cudaGetDriverEntryPointByVersion(name, &function, kDriverVersion, cudaEnableDefault, &found)
  );
  return found == cudaDriverEntryPointSuccess ? reinterpret_cast<Function*>(function) : nullptr;
}

void check_driver(CUresult status, std::string_view name, const Context& context) {
  WEFT_CHECK(
      context,
      status == CUDA_SUCCESS,
      ErrorCode::kCuda,
      "{}: the driver answers {}",
      name,
      static_cast<int>(status)
  );
}

}  // namespace

std::optional<const std::byte*> allocation_begin(const std::byte* data, const Context& context) {
  using GetAddressRange = CUresult(CUdeviceptr*, size_t*, CUdeviceptr);
  static auto* const ask = driver_function<GetAddressRange>("cuMemGetAddressRange", context);
  CUdeviceptr begin = 0;
  size_t bytes = 0;
  if (ask == nullptr || ask(&begin, &bytes, reinterpret_cast<CUdeviceptr>(data)) != CUDA_SUCCESS) {
    return {};
  }
  return reinterpret_cast<const std::byte*>(begin);
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
  using WaitValue = CUresult(CUstream, CUdeviceptr, cuuint32_t, unsigned);
  // To find it takes longer than all the rest.
  static auto* const wait = driver_function<WaitValue>("cuStreamWaitValue32", context);
  const unsigned flags =
      CU_STREAM_WAIT_VALUE_GEQ |
      (writes == RemoteWrites::kAfterFlush ? unsigned{CU_STREAM_WAIT_VALUE_FLUSH} : 0U);
  const CUresult status = wait == nullptr
                              ? CUDA_ERROR_NOT_FOUND
                              : wait(stream, reinterpret_cast<CUdeviceptr>(word), value, flags);
  check_driver(status, "cuStreamWaitValue32", context);
}

void write_word(cudaStream_t stream, uint32_t* word, uint32_t value, const Context& context) {
  using WriteValue = CUresult(CUstream, CUdeviceptr, cuuint32_t, unsigned);
  static auto* const write = driver_function<WriteValue>("cuStreamWriteValue32", context);
  const unsigned flags = CU_STREAM_WRITE_VALUE_DEFAULT;  // behind a barrier for all memory
  const CUresult status = write == nullptr
                              ? CUDA_ERROR_NOT_FOUND
                              : write(stream, reinterpret_cast<CUdeviceptr>(word), value, flags);
  check_driver(status, "cuStreamWriteValue32", context);
}

}  // namespace weft
