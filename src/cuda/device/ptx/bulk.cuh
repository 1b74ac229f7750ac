// SPDX-License-Identifier: Apache-2.0
// The bulk copy engine of compute capability 9.0 and later (cp.async.bulk): it copies between
// shared memory and global memory, this GPU's or a peer's. Sizes and addresses are multiples of 16.
// The engine works through the async proxy; handing memory over to ordinary accesses, or taking it
// from them, needs the fences below.
#pragma once

#include <cstdint>

namespace weft::ptx {

// True if this pass of the compiler may use the engine; if false, no kernel may call what follows.
#if __CUDA_ARCH__ >= 900
inline constexpr bool kHasBulkCopies = true;
#else
inline constexpr bool kHasBulkCopies = false;
#endif

__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// Inits a barrier whose phase is complete after `arrivals` and the bytes they announced.
__device__ __forceinline__ void init_barrier(uint64_t* barrier, uint32_t arrivals = 1) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)),
               "r"(arrivals)
               : "memory");
}

// Arrives; releases what this thread did before to all that wait for the phase.
__device__ __forceinline__ void arrive(uint64_t* barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier))
               : "memory");
}

// Fences between ordinary accesses of shared memory, loads included, and an arrival after which the
// engine may touch it. An arrival alone does not wait until loads have returned: it overtakes loads
// that a busy multiprocessor delays, and the engine writes over what they are to read.
__device__ __forceinline__ void fence_async_proxy_shared() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// Called after init_barrier(), before the copy engine first uses the barrier.
__device__ __forceinline__ void publish_barriers() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  fence_async_proxy_shared();
}

// Loads; the barrier completes a phase when all bytes have come.
__device__ __forceinline__ void bulk_load(
    void* shared, const void* global, uint32_t bytes, uint64_t* barrier
) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier
               )),
               "r"(bytes)
               : "memory");
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(shared_address(shared)),
      "l"(global),
      "r"(bytes),
      "r"(shared_address(barrier))
      : "memory"
  );
}

// Returns whether the phase is over; the hardware's own time-out bounds the wait: callers loop.
__device__ __forceinline__ bool try_wait_barrier(uint64_t* barrier, uint32_t parity) {
  uint32_t done = 0;
  asm volatile(
      "{.reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p;}"
      : "=r"(done)
      : "r"(shared_address(barrier)), "r"(parity)
      : "memory"
  );
  return done != 0;
}

__device__ __forceinline__ void bulk_store(void* global, const void* shared, uint32_t bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(global),
               "r"(shared_address(shared)),
               "r"(bytes)
               : "memory");
}

// Closes a group of this thread's bulk stores; a group may be empty.
__device__ __forceinline__ void commit_stores() {
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

// Waits until all but the latest kPending groups have read their shared memory.
template <int kPending>
__device__ __forceinline__ void wait_stores_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
}

// Waits until the writes of all but the latest kPending groups are complete and visible to this
// thread.
template <int kPending>
__device__ __forceinline__ void wait_stores() {
  asm volatile("cp.async.bulk.wait_group %0;" ::"n"(kPending) : "memory");
}

// Fences between an acquire and bulk loads of the global memory made visible. A fence for all
// memory would wait for whatever else this thread has asked for.
__device__ __forceinline__ void fence_async_proxy() {
#if __CUDA_ARCH__ >= 900
  asm volatile("fence.proxy.async.global;" ::: "memory");
#endif
}

}  // namespace weft::ptx
