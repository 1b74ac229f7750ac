// SPDX-License-Identifier: Apache-2.0
#include "measure/limits_cuda.hpp"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <array>
#include <memory>
#include <numeric>
#include <optional>
#include <span>

#include "core/gpu/check.hpp"
#include "core/gpu/devices.hpp"
#include "core/gpu/stream.hpp"
#include "measure/gpu_timer_cuda.hpp"
#include "measure/link_copies_cuda.hpp"
#include "measure/measure.hpp"

namespace weft::program {
namespace {

constexpr int64_t kMiB = int64_t{1} << 20;
constexpr int kWarmup = 2;
constexpr int kSamples = 7;
constexpr int64_t kCheckedBytes = 64 << 10;  // at the end of each block that arrives
constexpr int kPerSample = 2;                // passes, so that starting does not count
constexpr uint32_t kSignals = 1000;

// How SMs move bytes between GPUs.
struct Way {
  const char* name;
  int64_t (*copy)(const LinkBlocks& blocks, int sms, cudaStream_t stream);
  bool is_load = false;
  bool is_bulk = false;
};
constexpr std::array<Way, 6> kWays = {
    {{"stores 16 B", copy_by_words},
     {"loads 16 B", copy_by_words, true},
     {"bulk stores 4 KB", copy_by_small_pieces, false, true},
     {"bulk stores 14 KB", copy_by_large_pieces, false, true},
     {"bulk loads 4 KB", copy_by_small_pieces, true, true},
     {"bulk loads 14 KB", copy_by_large_pieces, true, true}}};

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

struct DeviceFree {
  void operator()(void* data) const { static_cast<void>(cudaFree(data)); }
};
using DeviceBytes = std::unique_ptr<std::byte, DeviceFree>;

// On `gpu`, which is then the current one, every byte `fill`.
DeviceBytes allocate(int gpu, int64_t bytes, int fill) {
  void* data = nullptr;
  WEFT_CUDA(Context{}, cudaSetDevice(gpu));
  WEFT_CUDA(Context{}, cudaMalloc(&data, at(bytes)));
  DeviceBytes owner(static_cast<std::byte*>(data));
  WEFT_CUDA(Context{}, cudaMemset(data, fill, at(bytes)));
  return owner;
}

// A block of each GPU for each other one, and where it arrives: all send to all. GPU g's neighbour
// w is (g + 1 + w) % num_gpus. Changes the current GPU; throws Error (kCuda, kNotAvailable,
// kInternal for wrong bytes).
class LinkRig {
 public:
  LinkRig(int num_gpus, int64_t bytes_each) : num_gpus_(num_gpus), bytes_each_(bytes_each) {
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
      streams_.push_back(owners_.emplace_back(gpu).get());
    }
    synchronize();
    std::vector<int> gpus(at(num_gpus));
    std::iota(gpus.begin(), gpus.end(), 0);
    timer_.emplace(gpus, streams_);
  }

  // Without a way: by the copy engines, which need no SMs.
  LinkRate measure(const Way* way = nullptr, int sms = 0) {
    clear();
    int64_t left_out = 0;
    const auto us = timer_->measure(kWarmup, kSamples, [&](int) {
      for (int gpu = 0; gpu < num_gpus_; ++gpu) {
        WEFT_CUDA(Context{}, cudaSetDevice(gpu));
        for (int pass = 0; pass < kPerSample; ++pass) {
          left_out = enqueue(way, gpu, sms);
          WEFT_CUDA(Context{}, cudaGetLastError());
        }
      }
    });
    const char* name = way == nullptr ? "copy engine" : way->name;
    check_arrived(name, left_out);
    LinkRate rate = {name, sms, static_cast<double>(num_peers() * (bytes_each_ - left_out))};
    rate.us_p50 = percentile(us, 50) / kPerSample;
    rate.us_p99 = percentile(us, 99) / kPerSample;
    return rate;
  }

  // Microseconds between GPUs 0 and 1, there and back.
  double measure_signal() {
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

 private:
  [[nodiscard]] int num_peers() const { return num_gpus_ - 1; }
  [[nodiscard]] int neighbour(int gpu, int w) const { return (gpu + 1 + w) % num_gpus_; }
  // The number of `gpu` among the neighbours of `of`.
  [[nodiscard]] int place(int gpu, int of) const { return (gpu - of - 1 + num_gpus_) % num_gpus_; }

  void synchronize() {
    for (int gpu = 0; gpu < num_gpus_; ++gpu) {
      WEFT_CUDA(Context{}, cudaSetDevice(gpu));
      WEFT_CUDA(Context{}, cudaDeviceSynchronize());
    }
  }

  void clear() {
    for (int gpu = 0; gpu < num_gpus_; ++gpu) {
      WEFT_CUDA(Context{}, cudaSetDevice(gpu));
      const size_t bytes = at(num_peers() * bytes_each_);
      WEFT_CUDA(Context{}, cudaMemset(targets_[at(gpu)].get(), 0, bytes));
    }
    synchronize();
  }

  // Blocks that `gpu` stores to its peers, or loads from them.
  [[nodiscard]] LinkBlocks blocks_of(int gpu, bool is_load) const {
    LinkBlocks blocks;
    blocks.num_blocks = num_peers();
    blocks.bytes_each = bytes_each_;
    for (int w = 0; w < num_peers(); ++w) {
      const int peer = neighbour(gpu, w);
      const int from = is_load ? peer : gpu;
      const int to = is_load ? gpu : peer;
      blocks.from[w] = sources_[at(from)].get() + place(to, from) * bytes_each_;
      blocks.to[w] = targets_[at(to)].get() + place(from, to) * bytes_each_;
    }
    return blocks;
  }

  // Bytes left out of each block.
  int64_t enqueue(const Way* way, int gpu, int sms) {
    const cudaStream_t stream = streams_[at(gpu)];
    if (way != nullptr) {
      return way->copy(blocks_of(gpu, way->is_load), sms, stream);
    }
    const LinkBlocks blocks = blocks_of(gpu, false);
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

  // The last bytes of each block that arrived are its sender's.
  void check_arrived(const char* way, int64_t left_out) {
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
            way,
            neighbour(gpu, w),
            gpu
        );
      }
    }
  }

  int num_gpus_;
  int64_t bytes_each_;
  std::vector<DeviceBytes> sources_;
  std::vector<DeviceBytes> targets_;
  std::vector<GpuStream> owners_;
  std::vector<cudaStream_t> streams_;
  std::optional<GpuTimer> timer_;
};

LinkRate measure_local_copy() {
  constexpr int64_t kBytes = 512 * kMiB;
  const DeviceBytes from = allocate(0, kBytes, 1);
  const DeviceBytes to = allocate(0, kBytes, 0);
  WEFT_CUDA(Context{}, cudaDeviceSynchronize());
  const GpuStream stream(0);
  GpuTimer timer(std::array{0}, std::array{stream.get()});
  const auto us = timer.measure(kWarmup, kSamples, [&](int) {
    constexpr auto kKind = cudaMemcpyDeviceToDevice;
    WEFT_CUDA(Context{}, cudaMemcpyAsync(to.get(), from.get(), at(kBytes), kKind, stream.get()));
  });
  return {"copy inside a GPU", 0, 2.0 * kBytes, percentile(us, 50), percentile(us, 99)};
}

std::vector<int> sm_counts(int num_sms, bool is_quick) {
  std::vector<int> counts = {4, 8, 12, 16, 24, 32, 48, 64, 96};
  if (is_quick) {
    counts = {8, 24};
  }
  std::erase_if(counts, [&](int count) { return count >= num_sms; });
  counts.push_back(num_sms);
  return counts;
}

}  // namespace

GpuLinkLimits measure_gpu_limits(int num_gpus, bool is_quick) {
  const CudaDeviceGuard guard(0);
  const GpuInfo gpu = list_gpus().gpus.front();
  GpuLinkLimits limits;
  limits.num_gpus = num_gpus;
  limits.local_copy = measure_local_copy();
  if (num_gpus < 2) {
    return limits;
  }
  LinkRig rig(num_gpus, (is_quick ? 32 : 256) * kMiB);
  limits.copy_engine = rig.measure();
  for (const Way& way : kWays) {
    for (const int sms : sm_counts(gpu.num_sms, is_quick)) {
      if (!way.is_bulk || gpu.major >= 9) {
        limits.by_sms.push_back(rig.measure(&way, sms));
      }
    }
  }
  limits.signal_us = rig.measure_signal();
  return limits;
}

double all_to_all_limit_gbps() {
  static const double gbps = [] {
    const CudaDeviceGuard guard(0);
    const int num_gpus = std::min(static_cast<int>(list_gpus().gpus.size()), kMaxLinkPeers);
    const auto has_gap = [](const auto& row) { return std::ranges::count(row, kNoReach) > 0; };
    if (num_gpus < 2 || std::ranges::any_of(gpu_reach(), has_gap)) {
      return 0.0;
    }
    return LinkRig(num_gpus, 128 * kMiB).measure().gbps();
  }();
  return gbps;
}

double local_copy_limit_gbps() {
  const CudaDeviceGuard guard(0);
  static const double gbps = measure_local_copy().gbps();
  return gbps;
}

}  // namespace weft::program
