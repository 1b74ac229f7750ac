// SPDX-License-Identifier: Apache-2.0
// The plan kernels of several ranks on one GPU, in one process and without an exchange: each rank
// has a stream, a control region and a plan block of its own.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "cuda/layout/launch.hpp"
#include "support/case_data.hpp"

namespace weft::test {

class PlanWorld {
 public:
  // Throws Error if CUDA does not give the memory.
  PlanWorld(const ExchangeSetup& setup, int num_blocks, uint64_t timeout_ns = 20'000'000'000U);
  ~PlanWorld();
  PlanWorld(const PlanWorld&) = delete;
  PlanWorld& operator=(const PlanWorld&) = delete;

  // Copies the ranks' routing to the GPU.
  void load(const CaseData& data);
  [[nodiscard]] PlanLaunch& launch_of(int rank);
  // Starts the kernel of one rank; all ranks must start before any can end.
  void start(int rank);
  // Start only the swap of all ranks' counts, which swapped() then gives as [num_ranks,
  // num_experts], and the second half of that call; otherwise like start().
  void start_swap(int rank);
  void start_second(int rank);
  [[nodiscard]] std::vector<int32_t> swapped(int rank) const;
  void wait();

  // Returns the first difference of what the device made of the loaded case from the reference
  // plan, in any array; empty if none.
  [[nodiscard]] std::string difference(const CaseData& data);
  // Returns the fault of one rank, after wait(); kNone if all went well.
  [[nodiscard]] FaultRecord fault(int rank) const;

  // Mean microseconds of a plan of the loaded case, from `count` in a row.
  [[nodiscard]] double microseconds(int count);

 private:
  struct Rank;
  [[nodiscard]] std::string internals_difference(const CaseData& data, int rank);

  ExchangeSetup setup_;
  std::vector<std::unique_ptr<Rank>> ranks_;
};

}  // namespace weft::test
