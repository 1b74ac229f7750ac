// SPDX-License-Identifier: Apache-2.0
#include "link_rig_cuda.hpp"

#include <algorithm>
#include <array>
#include <numeric>
#include <span>

#include "core/check.hpp"
#include "core/check_cuda.hpp"
#include "measure.hpp"

namespace weft::program {
namespace {

constexpr int64_t kCheckedBytes = 64 << 10;  // at the end of each block that arrives
constexpr int kPerSample = 2;                // passes, so that starting does not count
constexpr uint32_t kSignals = 1000;

size_t at(int64_t index) {
  return static_cast<size_t>(index);
}

void reach_peer(int gpu, int peer) {
  int can_access = 0;
  WEFT_CUDA(Context{}, cudaDeviceCanAccessPeer(&can_access, gpu, peer));
  WEFT_CHECK(
      Context{},
      can_access != 0,
      ErrorCode::kNotAvailable,
      "limits: GPU {} cannot reach the memory of GPU {}",
      gpu,
      peer
  );
  WEFT_CUDA(Context{}, cudaSetDevice(gpu));
  const cudaError_t status = cudaDeviceEnablePeerAccess(peer, 0);
  if (status == cudaErrorPeerAccessAlreadyEnabled) {
    static_cast<void>(cudaGetLastError());
  } else {
    WEFT_CUDA(Context{}, status);
  }
}

}  // namespace

void DeviceFree::operator()(void* data) const {
  static_cast<void>(cudaFree(data));
}

DeviceBytes allocate(int gpu, int64_t bytes, int fill) {
  void* data = nullptr;
  WEFT_CUDA(Context{}, cudaSetDevice(gpu));
  WEFT_CUDA(Context{}, cudaMalloc(&data, at(bytes)));
  DeviceBytes owner(static_cast<std::byte*>(data));
  WEFT_CUDA(Context{}, cudaMemset(data, fill, at(bytes)));
  return owner;
}

LinkRig::LinkRig(int num_gpus, int64_t bytes_each) : num_gpus_(num_gpus), bytes_each_(bytes_each) {
  WEFT_CHECK_ARG(
      Context{},
      num_gpus >= 1 && num_gpus <= kMaxLinkPeers,
      "limits: {} GPUs (1 to {})",
      num_gpus,
      kMaxLinkPeers
  );
  for (int gpu = 0; gpu < num_gpus; ++gpu) {
    for (int w = 0; w < num_peers(); ++w) {
      reach_peer(gpu, neighbour(gpu, w));
    }
    const int64_t bytes = std::max(num_peers(), 1) * bytes_each;
    sources_.push_back(allocate(gpu, bytes, gpu + 1));
    targets_.push_back(allocate(gpu, bytes, 0));
    WEFT_CUDA(
        Context{}, cudaStreamCreateWithFlags(&streams_.emplace_back(), cudaStreamNonBlocking)
    );
  }
  synchronize();
  std::vector<int> gpus(at(num_gpus));
  std::iota(gpus.begin(), gpus.end(), 0);
  timer_.emplace(gpus, streams_);
}

LinkRig::~LinkRig() {
  for (const cudaStream_t stream : streams_) {
    static_cast<void>(cudaStreamDestroy(stream));
  }
}

LinkRate LinkRig::measure(LinkWay way, int sms) {
  clear();
  int64_t left_out = 0;
  const auto us = timer_->measure(kLinkWarmup, kLinkSamples, [&](int) {
    for (int gpu = 0; gpu < num_gpus_; ++gpu) {
      WEFT_CUDA(Context{}, cudaSetDevice(gpu));
      for (int pass = 0; pass < kPerSample; ++pass) {
        left_out = enqueue(way, gpu, sms);
        WEFT_CUDA(Context{}, cudaGetLastError());
      }
    }
  });
  check_arrived(way, left_out);
  LinkRate rate = {way, sms, static_cast<double>(num_peers() * (bytes_each_ - left_out))};
  rate.us_p50 = percentile(us, 50) / kPerSample;
  rate.us_p99 = percentile(us, 99) / kPerSample;
  return rate;
}

double LinkRig::measure_signal() {
  const std::array<DeviceBytes, 2> memory = {allocate(0, 256, 0), allocate(1, 256, 0)};
  synchronize();
  std::array<uint32_t*, 2> words = {};
  for (size_t gpu = 0; gpu < 2; ++gpu) {
    words[gpu] = reinterpret_cast<uint32_t*>(memory[gpu].get());
  }
  GpuTimer timer(std::array{0, 1}, std::span(streams_).first(2));
  const auto us = timer.measure(1, 3, [&](int call) {
    for (int gpu = 0; gpu < 2; ++gpu) {
      WEFT_CUDA(Context{}, cudaSetDevice(gpu));
      const size_t mine = at(gpu);
      const uint32_t begin = static_cast<uint32_t>(call) * kSignals;
      exchange_signals(words[1 - mine], words[mine], begin, kSignals, gpu == 0, streams_[mine]);
      WEFT_CUDA(Context{}, cudaGetLastError());
    }
  });
  return percentile(us, 50) / kSignals;
}

void LinkRig::synchronize() {
  for (int gpu = 0; gpu < num_gpus_; ++gpu) {
    WEFT_CUDA(Context{}, cudaSetDevice(gpu));
    WEFT_CUDA(Context{}, cudaDeviceSynchronize());
  }
}

void LinkRig::clear() {
  for (int gpu = 0; gpu < num_gpus_; ++gpu) {
    WEFT_CUDA(Context{}, cudaSetDevice(gpu));
    const size_t bytes = at(num_peers() * bytes_each_);
    WEFT_CUDA(Context{}, cudaMemset(targets_[at(gpu)].get(), 0, bytes));
  }
  synchronize();
}

LinkBlocks LinkRig::stores_of(int gpu) const {
  LinkBlocks blocks;
  blocks.num_blocks = num_peers();
  blocks.bytes_each = bytes_each_;
  for (int w = 0; w < num_peers(); ++w) {
    const int peer = neighbour(gpu, w);
    blocks.from[w] = sources_[at(gpu)].get() + w * bytes_each_;
    blocks.to[w] = targets_[at(peer)].get() + place(gpu, peer) * bytes_each_;
  }
  return blocks;
}

LinkBlocks LinkRig::loads_of(int gpu) const {
  LinkBlocks blocks;
  blocks.num_blocks = num_peers();
  blocks.bytes_each = bytes_each_;
  for (int w = 0; w < num_peers(); ++w) {
    const int peer = neighbour(gpu, w);
    blocks.from[w] = sources_[at(peer)].get() + place(gpu, peer) * bytes_each_;
    blocks.to[w] = targets_[at(gpu)].get() + w * bytes_each_;
  }
  return blocks;
}

int64_t LinkRig::enqueue(LinkWay way, int gpu, int sms) {
  const cudaStream_t stream = streams_[at(gpu)];
  switch (way) {
    case LinkWay::kStores:
      return copy_by_words(stores_of(gpu), sms, stream);
    case LinkWay::kLoads:
      return copy_by_words(loads_of(gpu), sms, stream);
    case LinkWay::kBulkStoresSmall:
      return copy_by_small_pieces(stores_of(gpu), sms, stream);
    case LinkWay::kBulkStoresLarge:
      return copy_by_large_pieces(stores_of(gpu), sms, stream);
    case LinkWay::kBulkLoadsSmall:
      return copy_by_small_pieces(loads_of(gpu), sms, stream);
    case LinkWay::kBulkLoadsLarge:
      return copy_by_large_pieces(loads_of(gpu), sms, stream);
    default:
      break;
  }
  const LinkBlocks blocks = stores_of(gpu);
  for (int w = 0; w < num_peers(); ++w) {
    WEFT_CUDA(
        Context{},
        cudaMemcpyPeerAsync(
            blocks.to[w], neighbour(gpu, w), blocks.from[w], gpu, at(bytes_each_), stream
        )
    );
  }
  return 0;
}

void LinkRig::check_arrived(LinkWay way, int64_t left_out) {
  std::vector<std::byte> bytes(at(kCheckedBytes));
  for (int gpu = 0; gpu < num_gpus_; ++gpu) {
    WEFT_CUDA(Context{}, cudaSetDevice(gpu));
    for (int w = 0; w < num_peers(); ++w) {
      const std::byte* end =
          targets_[at(gpu)].get() + (w + 1) * bytes_each_ - left_out - kCheckedBytes;
      WEFT_CUDA(Context{}, cudaMemcpy(bytes.data(), end, bytes.size(), cudaMemcpyDeviceToHost));
      const auto sent = static_cast<std::byte>(neighbour(gpu, w) + 1);
      WEFT_CHECK(
          Context{},
          std::ranges::all_of(bytes, [&](std::byte byte) { return byte == sent; }),
          ErrorCode::kInternal,
          "limits: {} from GPU {} to GPU {} left wrong bytes",
          link_way_name(way),
          neighbour(gpu, w),
          gpu
      );
    }
  }
}

}  // namespace weft::program
