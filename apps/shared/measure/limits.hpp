// SPDX-License-Identifier: Apache-2.0
// Rates that copying can reach on this machine: the yardstick of every percentage that Weft prints.
// docs/benchmarks.md has the formulas.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "group/shared_memory.hpp"
#include "weft/calls.hpp"

namespace weft::program {

// The memory traffic of an exchange without its bookkeeping. Scatter, as in dispatch: every rank
// reads rows of its own private memory and writes each of them `copies` times into the shared
// memory of all ranks in turn, its own included, spread over as many streams as there would be
// experts. Gather, as in combine: the same copies backwards, `copies` rows onto each private one.
struct CopyShape {
  int num_ranks = 1;
  int threads_per_rank = 0;  // 0: the usable cores shared among the ranks
  int64_t row_bytes = 4096;
  int64_t source_bytes = 8 << 20;  // per rank
  int copies = 8;
};

enum class CopyMethod : uint8_t {
  kMemcpy,
  kStream,  // stores that bypass the caches
  kGather,  // memcpy from the shared rows to the private ones
};

struct CopySettings {
  CopyMethod method = CopyMethod::kMemcpy;
  bool is_pinned = false;  // each thread to one core
  double seconds = 0.1;    // to spend, once the memory is warm
};

// Holds the memory of a shape, warm, so that several ways of copying share it.
class CopyRig {
 public:
  explicit CopyRig(const CopyShape& shape);
  // GB/s (1e9) of all ranks together, the best of the rounds; a byte that is read once and written
  // once counts once.
  [[nodiscard]] double measure(const CopySettings& settings);

 private:
  // Row of a receiver's memory that a copy goes to.
  struct Target {
    int32_t rank = 0;
    int32_t row = 0;
  };
  [[nodiscard]] int64_t rows_per_stream() const;
  [[nodiscard]] std::vector<Target> make_targets(int rank) const;
  void copy(int rank, int thread, CopyMethod method);

  CopyShape shape_;
  int64_t num_sources_;  // rows per rank
  std::vector<std::vector<std::byte>> sources_;
  std::vector<std::vector<Target>> targets_;
  std::vector<SharedMemory> receivers_;
};

// GB/s of all ranks together on unpinned threads; zero: not measured.
struct CopyRates {
  double scatter = 0;  // the better of memcpy and streaming
  double gather = 0;

  // Least time, in microseconds, of an exchange of so many bytes in rows that receivers hold.
  // Dispatch scatters: it writes every such row once. Combine gathers: it reads all of them once.
  [[nodiscard]] double limit_us(Op op, double logical_bytes) const {
    return logical_bytes / (op == Op::kCombine ? gather : scatter) / 1e3;
  }
};

// Takes less than half a second.
[[nodiscard]] CopyRates copy_rates(const CopyShape& shape);

// Bytes of all ranks together.
struct ExchangeBytes {
  double logical = 0;  // rows that receivers hold, own ones included
  double wire = 0;     // rows that crossed a rank boundary
  double tokens = 0;   // rows at the sources
};

}  // namespace weft::program
