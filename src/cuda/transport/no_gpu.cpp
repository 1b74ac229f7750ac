// SPDX-License-Identifier: Apache-2.0
// Replaces ipc.cpp and vmm.cpp in a build without CUDA, which then knows the GPU transports' names,
// too.
#include "core/check.hpp"
#include "cuda/transport/gpu_transport.hpp"

namespace weft {

std::unique_ptr<GpuTransport> make_ipc_transport(const GpuTransportOptions& options) {
  raise_error(ErrorCode::kNotAvailable, options.context, "open: this build has no CUDA");
}

std::unique_ptr<GpuTransport> make_vmm_transport(
    const GpuTransportOptions& options, VmmHandle /*handle*/
) {
  return make_ipc_transport(options);
}

}  // namespace weft
