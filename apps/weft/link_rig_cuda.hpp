// SPDX-License-Identifier: Apache-2.0
// GPUs that all send to all, in every way that a link can be driven.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "gpu_timer_cuda.hpp"
#include "limits_cuda.hpp"
#include "link_copies_cuda.hpp"

namespace weft::program {

inline constexpr int kLinkWarmup = 2;
inline constexpr int kLinkSamples = 7;

struct DeviceFree {
  void operator()(void* data) const;
};
using DeviceBytes = std::unique_ptr<std::byte, DeviceFree>;

// On `gpu`, which is then the current one, every byte `fill`. Throws Error (kCuda).
[[nodiscard]] DeviceBytes allocate(int gpu, int64_t bytes, int fill);

// A block of each GPU for each other one, and where it arrives. GPU g's neighbour w is
// (g + 1 + w) % num_gpus. Changes the current GPU; throws Error (kCuda, kNotAvailable, kInternal
// for wrong bytes).
class LinkRig {
 public:
  LinkRig(int num_gpus, int64_t bytes_each);
  ~LinkRig();
  LinkRig(const LinkRig&) = delete;
  LinkRig& operator=(const LinkRig&) = delete;

  [[nodiscard]] int num_peers() const { return num_gpus_ - 1; }

  [[nodiscard]] LinkRate measure(LinkWay way, int sms);
  // Microseconds between GPUs 0 and 1, there and back.
  [[nodiscard]] double measure_signal();

 private:
  [[nodiscard]] int neighbour(int gpu, int w) const { return (gpu + 1 + w) % num_gpus_; }
  // The number of `gpu` among the neighbours of `of`.
  [[nodiscard]] int place(int gpu, int of) const { return (gpu - of - 1 + num_gpus_) % num_gpus_; }
  void synchronize();
  void clear();
  [[nodiscard]] LinkBlocks stores_of(int gpu) const;
  [[nodiscard]] LinkBlocks loads_of(int gpu) const;
  // Bytes left out of each block.
  int64_t enqueue(LinkWay way, int gpu, int sms);
  // The last bytes of each block that arrived are its sender's.
  void check_arrived(LinkWay way, int64_t left_out);

  int num_gpus_;
  int64_t bytes_each_;
  std::vector<DeviceBytes> sources_;
  std::vector<DeviceBytes> targets_;
  std::vector<cudaStream_t> streams_;
  std::optional<GpuTimer> timer_;
};

}  // namespace weft::program
