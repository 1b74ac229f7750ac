// SPDX-License-Identifier: Apache-2.0
// The GPU kernels for inter-node tokens: one packs rows into messages for the network, one adds up
// the partial sums that other domains send back, one tells what is known of rows, and one ends what
// has nothing to work on. Before:
// hosts/dispatch.cpp and hosts/combine.cpp, which launch them; after: hosts/message_transfer.cpp,
// which sends the messages, and for sums the caller.
#include <algorithm>

#include "cuda/combine/coded_rows.cuh"
#include "cuda/device/elements.cuh"
#include "cuda/device/kernel.cuh"
#include "cuda/device/lanes.cuh"
#include "cuda/device/ptx/memory.cuh"
#include "hosts/message_rows.hpp"

namespace weft {
namespace {

constexpr int kThreads = 512;        // of a block; a guess
constexpr int64_t kSumBlocks = 264;  // at most: two for each of the 132 multiprocessors of an H200

__device__ void copy_row(std::byte* to, const std::byte* from, int64_t bytes) {
  const auto vectors = static_cast<int>(bytes / static_cast<int64_t>(sizeof(uint4)));
#pragma unroll 4
  for (int i = lane_index(); i < vectors; i += kWarpLanes) {
    reinterpret_cast<uint4*>(to)[i] = ptx::load_16(reinterpret_cast<const uint4*>(from) + i);
  }
}

__device__ void pack_token(
    const PackLaunch& call, std::byte* message, int64_t num, int64_t place, int64_t token
) {
  const int lane = lane_index();
  const MessageFormat& format = call.format;
  copy_row(
      message + place * format.row_bytes, call.rows + token * format.row_bytes, format.row_bytes
  );
  if (call.weights != nullptr && lane < call.topk) {
    const int32_t column =
        call.weight_column == nullptr ? lane : call.weight_column[token * call.topk + lane];
    auto* out = reinterpret_cast<float*>(message + format.weights_at(num)) + place * call.topk;
    out[lane] = column < 0 ? 0.0F : call.weights[token * call.weight_cols + column];
  }
  std::byte* scales = message + format.scales_at(num) + place * format.scale_bytes;
  for (int64_t i = lane; i < format.scale_bytes; i += kWarpLanes) {
    scales[i] = call.scales[token * format.scale_bytes + i];
  }
}

// Packs whole messages by block, so that the first ones can leave while others are packed.
__global__ void __launch_bounds__(kThreads) pack_kernel(const __grid_constant__ PackLaunch call) {
  const int64_t num_chunks = call.format.num_chunks(call.count);
  const int warp = warp_in_block();
  for (int64_t c = blockIdx.x; c < num_chunks; c += gridDim.x) {
    std::byte* message = call.messages + c * call.format.stride();
    const int64_t first = call.format.first_row(c);
    const int64_t num = call.format.num_rows(c, call.count);
    for (int64_t i = warp; i < num; i += kThreads / kWarpLanes) {
      const int64_t token = call.index == nullptr ? first + i : call.index[first + i];
      pack_token(call, message, num, i, token);
    }
    __syncthreads();
    if (call.done != nullptr && threadIdx.x == 0) {
      const auto* stopped = reinterpret_cast<const volatile StopState*>(call.stopped);
      if (stopped == nullptr || *stopped == StopState::kRunning) {
        ptx::fence_sys();
        ptx::store_relaxed_sys(call.done + c, call.number);
      }
    }
  }
}

template <class Element>
__device__ void sum_token(const SumPartsLaunch& call, int64_t token) {
  const auto vectors = static_cast<int>(call.row_bytes / static_cast<int64_t>(sizeof(uint4)));
  const int32_t first = call.begin[token];
  const int32_t last = call.begin[token + 1];
  auto* out = reinterpret_cast<uint4*>(call.out + token * call.row_bytes);
  for (int v = lane_index(); v < vectors; v += kWarpLanes) {
    uint4 bits = {0, 0, 0, 0};
    if (first < last) {
      const auto load = [&](int32_t i) {
        return ptx::load_16(call.parts + call.row[i] * call.row_bytes + v * sizeof(uint4));
      };
      float sum[Element::kPerVector];
      unpack<Element>(load(first), sum);
      for (int32_t i = first + 1; i < last; ++i) {
        float term[Element::kPerVector];
        unpack<Element>(load(i), term);
#pragma unroll
        for (int e = 0; e < Element::kPerVector; ++e) {
          sum[e] += term[e];
        }
      }
      bits = pack<Element>(sum);
    }
    out[v] = bits;
  }
}

// Sums a token's coded parts.
template <Wire kWire>
__device__ void sum_coded_token(const SumPartsLaunch& call, int64_t token) {
  const auto hidden = static_cast<int32_t>(call.row_bytes / static_cast<int64_t>(sizeof(uint16_t)));
  const int32_t last = call.begin[token + 1];
  for (int first = 0; first < hidden; first += kPieceElements) {
    int32_t i = call.begin[token];
    const auto next = [&](float& /*factor*/) {
      return call.parts + call.row[i++] * call.part_bytes;
    };
    add_entry<false>(
        CodedRows<kWire>{hidden},
        PlainRows(),
        {first, hidden},
        last - i,
        call.out + token * call.row_bytes,
        next
    );
  }
}

__device__ void return_weights(const SumPartsLaunch& call, int64_t token) {
  const int lane = lane_index();
  float* out = call.out_weights + token * call.weight_cols;
  if (call.weight_column != nullptr) {
    for (int column = lane; column < call.weight_cols; column += kWarpLanes) {
      out[column] = 0.0F;
    }
    __syncwarp();
  }
  if (lane < call.topk) {
    const int64_t route = token * call.topk + lane;
    const int32_t column = call.weight_column == nullptr ? lane : call.weight_column[route];
    const int64_t row = call.weight_row[route];
    if (column >= 0) {
      out[column] = row < 0 ? 0.0F : call.part_weights[row * call.topk + lane];
    }
  }
}

template <class Element, Wire kWire>
__global__ void __launch_bounds__(kThreads)
    sum_parts_kernel(const __grid_constant__ SumPartsLaunch call) {
  constexpr int kWarps = kThreads / kWarpLanes;
  const int64_t warp = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / kWarpLanes;
  for (int64_t token = warp; token < call.num_tokens; token += gridDim.x * kWarps) {
    if constexpr (kWire == Wire::kNone) {
      sum_token<Element>(call, token);
    } else {
      sum_coded_token<kWire>(call, token);
    }
    if (call.part_weights != nullptr) {
      return_weights(call, token);
    }
  }
}

__global__ void __launch_bounds__(kThreads)
    tell_rows_kernel(const __grid_constant__ TellRowsLaunch call) {
  const int64_t first = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  const int64_t step = static_cast<int64_t>(gridDim.x) * kThreads;
  if (call.sources != nullptr) {
    for (int64_t i = first; i < call.count; i += step) {
      const int32_t* one = call.list + 3 * i;
      int32_t* out = call.sources + 2 * static_cast<int64_t>(one[0]);
      out[0] = one[1];
      out[1] = one[2];
    }
  }
  if (call.experts != nullptr) {
    for (int64_t i = first; i < call.num_rows * call.topk; i += step) {
      call.experts[i] = i < call.count * call.topk ? call.row_experts[i] : -1;
    }
  }
}

// Stops the GPU's calls if a transfer has failed, as wait.cuh does for a fault of the call that
// comes next; the transfer tells the host.
__global__ void stop_kernel(const __grid_constant__ StopLaunch call) {
  if (ptx::load_acquire_sys(call.has_failed) != 0 && call.local->stopped != StopState::kBroken) {
    call.local->broken_epoch = call.local->epoch + 1;
    __threadfence();
    atomicMax(
        reinterpret_cast<uint32_t*>(&call.local->stopped), static_cast<uint32_t>(StopState::kBroken)
    );
  }
}

Kernel<SumPartsLaunch> sum_kernel_of(DType dtype, Wire wire) {
  if (wire == Wire::kFp8) {
    return {sum_parts_kernel<BFloat16, Wire::kFp8>, kThreads};
  }
  if (wire == Wire::kLogFmt10) {
    return {sum_parts_kernel<BFloat16, Wire::kLogFmt10>, kThreads};
  }
  return with_element(dtype, []<class Element>(Element) -> Kernel<SumPartsLaunch> {
    return {sum_parts_kernel<Element, Wire::kNone>, kThreads};
  });
}

}  // namespace

void launch_pack(const PackLaunch& call, cudaStream_t stream) {
  const int64_t blocks = std::min<int64_t>(call.format.num_chunks(call.count), kPackBlocks);
  if (blocks > 0) {
    launch(Kernel<PackLaunch>{pack_kernel, kThreads}, static_cast<int>(blocks), call, stream);
  }
}

void launch_sum_parts(const SumPartsLaunch& call, cudaStream_t stream) {
  constexpr int64_t kTokensPerBlock = kThreads / kWarpLanes;
  const int64_t wanted = (call.num_tokens + kTokensPerBlock - 1) / kTokensPerBlock;
  const int64_t blocks = std::min(wanted, kSumBlocks);
  if (blocks > 0) {
    launch(sum_kernel_of(call.dtype, call.wire), static_cast<int>(blocks), call, stream);
  }
}

void launch_tell_rows(const TellRowsLaunch& call, cudaStream_t stream) {
  const int64_t num_rows = std::max(call.count, call.experts == nullptr ? 0 : call.num_rows);
  const int64_t wanted = (num_rows + kThreads - 1) / kThreads;
  const int64_t blocks = std::min<int64_t>(wanted, kPackBlocks);
  if (blocks > 0) {
    const Kernel<TellRowsLaunch> kernel = {tell_rows_kernel, kThreads};
    launch(kernel, static_cast<int>(blocks), call, stream);
  }
}

void launch_stop(const StopLaunch& call, cudaStream_t stream) {
  launch(Kernel<StopLaunch>{stop_kernel, 1}, 1, call, stream);
}

void prepare_message_rows() {
  load(pack_kernel);
  load(stop_kernel);
  load(tell_rows_kernel);
  for (const DType dtype : {DType::kBFloat16, DType::kFloat16, DType::kFloat32}) {
    prepare(sum_kernel_of(dtype, Wire::kNone));
  }
  for (const Wire wire : {Wire::kFp8, Wire::kLogFmt10}) {
    prepare(sum_kernel_of(DType::kBFloat16, wire));
  }
}

}  // namespace weft
