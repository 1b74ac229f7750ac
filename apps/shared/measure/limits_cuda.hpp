// SPDX-License-Identifier: Apache-2.0
// What the links between the GPUs of this machine can carry, and their own memory. One process
// drives all GPUs. limits_cuda.cpp or limits_none.cpp answers.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace weft::program {

enum class LinkWay : uint8_t {
  kCopyEngine,       // large blocks
  kStores,           // 16-byte stores to peers
  kLoads,            // 16-byte loads from peers
  kBulkStoresSmall,  // by the bulk copy engine, 4,096 B pieces
  kBulkStoresLarge,  // 14,336 B pieces
  kBulkLoadsSmall,
  kBulkLoadsLarge,
  kLocalCopy,  // inside one GPU
};

[[nodiscard]] std::string link_way_name(LinkWay way);  // "bulk stores 4 KB"

// All GPUs send to all others at once; the slowest GPU counts.
struct LinkRate {
  LinkWay way = LinkWay::kCopyEngine;
  int sms = 0;       // on each GPU; 0: none
  double bytes = 0;  // leaving each GPU; read and written by kLocalCopy
  double us_p50 = 0;
  double us_p99 = 0;

  [[nodiscard]] double gbps() const { return us_p50 > 0 ? bytes / us_p50 / 1e3 : 0; }
};

struct GpuLinkLimits {
  int num_gpus = 0;
  double copy_engine_gbps = 0;  // leaving each GPU; 0 with one GPU
  double local_copy_gbps = 0;   // read + written
  double signal_us = 0;         // there and back between GPUs 0 and 1; 0 with one GPU
  std::vector<LinkRate> rates;  // of everything measured, ascending SMs within a way
};

// GPUs 0 .. num_gpus - 1; with one only what is inside it is measured. `is_quick` measures a few SM
// counts for tests, else takes a few seconds. Throws Error: kNotAvailable if a GPU cannot reach
// another, kOutOfMemory, kCuda, kInternal if bytes arrive wrong.
[[nodiscard]] GpuLinkLimits measure_gpu_limits(int num_gpus, bool is_quick);

// The yardstick of all percentages on GPUs, GB/s: what the copy engines move out of each GPU when
// all send to all. Takes less than a second, is remembered by the process; 0 with fewer than two
// GPUs, or where one cannot reach another.
[[nodiscard]] double all_to_all_limit_gbps();
// Read + written by a copy inside GPU 0; likewise. 0 without a GPU.
[[nodiscard]] double local_copy_limit_gbps();

}  // namespace weft::program
