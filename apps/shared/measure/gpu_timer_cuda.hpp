// SPDX-License-Identifier: Apache-2.0
// Times work on several GPUs that start together: every stream is held back until the host has
// handed out all of a sample's work, so that neither launching nor the host's pace is measured.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <functional>
#include <span>
#include <vector>

namespace weft::program {

class GpuTimer {
 public:
  // streams[i] belongs to GPU gpus[i]; only these are held back and timed.
  GpuTimer(std::span<const int> gpus, std::span<const cudaStream_t> streams);
  ~GpuTimer();
  GpuTimer(const GpuTimer&) = delete;
  GpuTimer& operator=(const GpuTimer&) = delete;

  // Microseconds of each sample, slowest GPU. `work(i)` enqueues call i of warmup + samples; it
  // must not wait for the GPUs.
  [[nodiscard]] std::vector<double> measure(
      int warmup, int samples, const std::function<void(int)>& work
  );

 private:
  double sample(const std::function<void()>& work, bool is_held);
  // Runs `step` for each stream, on its GPU.
  template <class Step>
  void on_each(const Step& step);

  std::vector<int> gpus_;
  std::vector<cudaStream_t> streams_;
  std::vector<cudaEvent_t> begins_;
  std::vector<cudaEvent_t> ends_;
  uint32_t* gate_ = nullptr;  // pinned; streams pass once it has reached the number they wait for
  uint32_t num_held_ = 0;
};

}  // namespace weft::program
