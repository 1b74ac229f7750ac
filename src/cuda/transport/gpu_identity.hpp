// SPDX-License-Identifier: Apache-2.0
// Which process and which GPU each rank has, and whether one GPU can reach another.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "weft/group.hpp"

namespace weft {

// Trivially copyable; travels between ranks.
struct GpuIdentity {
  uint64_t pid = 0;
  uint64_t process_id = 0;  // random, for processes of one number in different containers
  int32_t device = -1;      // as its process counts; -1: see problem
  int32_t padding = 0;
  std::array<std::byte, 16> uuid = {};
  std::array<char, 224> problem = {};  // why this rank has no such GPU

  [[nodiscard]] bool is_same_process(const GpuIdentity& other) const {
    return pid == other.pid && process_id == other.process_id;
  }
  [[nodiscard]] bool is_same_gpu(const GpuIdentity& other) const { return uuid == other.uuid; }
};

// GPU `device` of this process; never throws for lack of one.
[[nodiscard]] GpuIdentity identify_gpu(int device);
// Collective: everybody's, by rank.
[[nodiscard]] std::vector<GpuIdentity> gather_identities(const Group& group, int device);

// Why the GPU of `own` cannot reach that of rank `other_rank`, as far as can be known without
// trying; empty: nothing speaks against it.
[[nodiscard]] std::string reach_obstacle(
    const GpuIdentity& own, const GpuIdentity& other, int other_rank
);
// This process's number of the GPU; -1: not visible here.
[[nodiscard]] int find_device(const GpuIdentity& gpu);

}  // namespace weft
