// SPDX-License-Identifier: Apache-2.0
// What copying can reach on this machine: the yardstick of every percentage that Weft prints.
// docs/benchmarks.md has the formulas.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

namespace weft::program {

// The memory traffic of a dispatch without its bookkeeping: every rank reads rows of its own
// private memory and writes each of them `copies` times into the shared memory of all ranks in
// turn, its own included, spread over as many write streams as there would be experts.
struct CopyShape {
  int num_ranks = 1;
  int threads_per_rank = 0;  // 0: the usable cores shared among the ranks
  int64_t row_bytes = 4096;
  int64_t source_bytes = 8 << 20;  // per rank
  int copies = 8;

  friend auto operator<=>(const CopyShape&, const CopyShape&) = default;
};

enum class CopyMethod : uint8_t {
  kMemcpy,
  kStream,  // stores that bypass the caches
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
  ~CopyRig();
  // GB/s (1e9) of all ranks together, the best of the rounds; a byte that is read once and written
  // once counts once.
  [[nodiscard]] double measure(const CopySettings& settings);

 private:
  struct State;
  std::unique_ptr<State> state_;
};

// The better of both methods on unpinned threads, GB/s of all ranks together. Takes less than half
// a second for each new shape and is remembered by the process.
[[nodiscard]] double copy_limit_gbps(const CopyShape& shape);
[[nodiscard]] double copy_limit_gbps(int num_ranks, int64_t row_bytes);

// Bytes of all ranks together, for the limits below.
struct ExchangeBytes {
  double logical = 0;  // rows that receivers hold, own ones included
  double wire = 0;     // rows that crossed a rank boundary
  double tokens = 0;   // rows at the sources
};

// Least time, in microseconds, at `gbps`. Dispatch writes every row that a receiver holds once.
[[nodiscard]] double dispatch_limit_us(const ExchangeBytes& bytes, double gbps);
// Combine reads all those rows, writes and reads one row per crossing and writes the tokens; bytes
// read and written differ, half a copy each.
[[nodiscard]] double combine_limit_us(const ExchangeBytes& bytes, double gbps);

}  // namespace weft::program
