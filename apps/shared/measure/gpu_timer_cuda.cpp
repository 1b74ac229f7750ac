// SPDX-License-Identifier: Apache-2.0
#include "measure/gpu_timer_cuda.hpp"

#include <algorithm>
#include <atomic>

#include "core/gpu/check.hpp"
#include "measure/link_copies_cuda.hpp"

namespace weft::program {

template <class Step>
void GpuTimer::on_each(const Step& step) {
  for (size_t i = 0; i < gpus_.size(); ++i) {
    WEFT_CUDA(Context{}, cudaSetDevice(gpus_[i]));
    step(i);
  }
}

GpuTimer::GpuTimer(std::span<const int> gpus, std::span<const cudaStream_t> streams)
    : gpus_(gpus.begin(), gpus.end()),
      streams_(streams.begin(), streams.end()),
      begins_(gpus.size()),
      ends_(gpus.size()) {
  void* gate = nullptr;
  WEFT_CUDA(Context{}, cudaHostAlloc(&gate, sizeof(uint32_t), cudaHostAllocPortable));
  gate_ = static_cast<uint32_t*>(gate);
  *gate_ = 0;
  on_each([&](size_t i) {
    WEFT_CUDA(Context{}, cudaEventCreate(&begins_[i]));
    WEFT_CUDA(Context{}, cudaEventCreate(&ends_[i]));
  });
}

GpuTimer::~GpuTimer() {
  for (size_t i = 0; i < gpus_.size(); ++i) {
    static_cast<void>(cudaEventDestroy(begins_[i]));
    static_cast<void>(cudaEventDestroy(ends_[i]));
  }
  static_cast<void>(cudaFreeHost(gate_));
}

double GpuTimer::sample(const std::function<void()>& work, bool is_held) {
  ++num_held_;
  std::atomic_ref gate(*gate_);
  if (!is_held) {
    gate.store(num_held_);
  }
  on_each([&](size_t i) {
    hold_stream(gate_, num_held_, streams_[i]);
    WEFT_CUDA(Context{}, cudaGetLastError());
    WEFT_CUDA(Context{}, cudaEventRecord(begins_[i], streams_[i]));
  });
  work();
  on_each([&](size_t i) { WEFT_CUDA(Context{}, cudaEventRecord(ends_[i], streams_[i])); });
  gate.store(num_held_);
  float slowest_ms = 0;
  on_each([&](size_t i) {
    float ms = 0;
    WEFT_CUDA(Context{}, cudaEventSynchronize(ends_[i]));
    WEFT_CUDA(Context{}, cudaEventElapsedTime(&ms, begins_[i], ends_[i]));
    slowest_ms = std::max(slowest_ms, ms);
  });
  return 1e3 * static_cast<double>(slowest_ms);
}

std::vector<double> GpuTimer::measure(
    int warmup, int samples, const std::function<void(int)>& work
) {
  std::vector<double> times;
  for (int i = 0; i < warmup + samples; ++i) {
    // First calls may allocate or load code, which a held stream would stop.
    const double us = sample([&] { work(i); }, i >= warmup);
    if (i >= warmup) {
      times.push_back(us);
    }
  }
  return times;
}

}  // namespace weft::program
