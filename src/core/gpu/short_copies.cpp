// SPDX-License-Identifier: Apache-2.0
#include "core/gpu/short_copies.hpp"

#include <bit>
#include <cstdint>
#include <cstring>
#include <mutex>
#include <semaphore>

#include "core/gpu/check.hpp"

namespace weft {
namespace {

constexpr int kSlots = 32;  // copies at a time, of all ranks of the process

class Slots {
 public:
  Slots() {
    const RelaxedCapture no_capture;
    void* data = nullptr;
    WEFT_CUDA(Context{}, cudaHostAlloc(&data, kSlots * kShortCopyBytes, cudaHostAllocPortable));
    data_ = static_cast<std::byte*>(data);
  }

  [[nodiscard]] int take() {
    available_.acquire();
    const std::lock_guard lock(mutex_);
    const int slot = std::countr_zero(free_);
    free_ &= free_ - 1;
    return slot;
  }

  void give_back(int slot) {
    {
      const std::lock_guard lock(mutex_);
      free_ |= 1U << static_cast<uint32_t>(slot);
    }
    available_.release();
  }

  [[nodiscard]] std::byte* at(int slot) const {
    return data_ + static_cast<size_t>(slot) * kShortCopyBytes;
  }

 private:
  std::byte* data_ = nullptr;
  std::counting_semaphore<kSlots> available_{kSlots};
  std::mutex mutex_;
  uint32_t free_ = ~0U;  // a bit for each
};

Slots& slots() {
  static auto& instance = *new Slots;  // never destroyed: exchanges may outlive static objects
  return instance;
}

class Slot {
 public:
  Slot() : index_(slots().take()) {}
  ~Slot() { slots().give_back(index_); }
  Slot(const Slot&) = delete;
  Slot& operator=(const Slot&) = delete;
  [[nodiscard]] std::byte* data() const { return slots().at(index_); }

 private:
  int index_;
};

void copy(
    void* to,
    const void* from,
    size_t bytes,
    cudaMemcpyKind kind,
    cudaStream_t stream,
    const Context& context
) {
  WEFT_CUDA(context, cudaMemcpyAsync(to, from, bytes, kind, stream));
  WEFT_CUDA(context, cudaStreamSynchronize(stream));
}

}  // namespace

void reserve_short_copies() {
  static_cast<void>(slots());
}

void read_short(
    void* to, const void* from, size_t bytes, cudaStream_t stream, const Context& context
) {
  const Slot slot;
  copy(slot.data(), from, bytes, cudaMemcpyDeviceToHost, stream, context);
  std::memcpy(to, slot.data(), bytes);
}

void write_short(
    void* to, const void* from, size_t bytes, cudaStream_t stream, const Context& context
) {
  const Slot slot;
  std::memcpy(slot.data(), from, bytes);
  copy(to, slot.data(), bytes, cudaMemcpyHostToDevice, stream, context);
}

}  // namespace weft
