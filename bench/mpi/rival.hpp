// SPDX-License-Identifier: Apache-2.0
// The usual way to move tokens to experts and back: permute, MPI_Alltoallv, permute. Written with
// the care that a good MPI programmer takes: buffers made once, rows moved by memcpy, whole blocks
// where they are adjacent, sums by the same vector code that Weft uses.
#pragma once

#include <mpi.h>

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "cpu/protocol/worker_pool.hpp"
#include "weft/tensor.hpp"

namespace weft::bench {

struct RivalShape {
  int64_t max_tokens = 0;
  int64_t hidden = 0;
  DType dtype = DType::kBFloat16;
  int num_experts = 0;
  int topk = 0;
  int64_t pad_multiple = 1;
  int num_threads = 1;
};

// A matrix of rows of the rival's dtype.
using Rows = std::vector<std::byte>;

// Base of both ways: counts, the receiver's expert blocks, one MPI type for a row.
class MpiRival {
 public:
  explicit MpiRival(const RivalShape& shape);
  virtual ~MpiRival();
  MpiRival(const MpiRival&) = delete;
  MpiRival& operator=(const MpiRival&) = delete;

  [[nodiscard]] virtual const char* name() const = 0;
  // All collective. `topk_idx` is [num_tokens, topk], -1 = no route.
  virtual void plan(std::span<const int32_t> topk_idx) = 0;
  // `rows`: [num_rows(), hidden], grouped by expert and padded, as Layout::kExpertMajor.
  virtual void dispatch(const std::byte* x, std::byte* rows) = 0;
  // `x`: [num_tokens, hidden], the plain sums of each token's rows.
  virtual void combine(const std::byte* rows, std::byte* x) = 0;

  [[nodiscard]] int64_t num_rows() const { return num_rows_; }

 protected:
  // Rows to and from each rank, in MPI's form.
  struct Exchange {
    std::vector<int> send_counts;
    std::vector<int> send_begin;
    std::vector<int> recv_counts;
    std::vector<int> recv_begin;
    void set_begins();
    [[nodiscard]] int64_t num_sent() const { return send_begin.back() + send_counts.back(); }
    [[nodiscard]] int64_t num_received() const { return recv_begin.back() + recv_counts.back(); }
  };

  // Starts of the experts' blocks from [num_ranks][num_local_experts] rows.
  void place_experts(std::span<const int> counts);
  void zero_padding(std::byte* rows);
  // Runs `body(first, last)` on every thread over its share of 0 .. count.
  template <class Body>
  void parallel(int64_t count, const Body& body) {
    const int64_t n = workers_.num_workers();
    workers_.run([&](int worker) { body(count * worker / n, count * (worker + 1) / n); });
  }
  struct RowsAt {
    const std::byte* data = nullptr;
    int64_t row = 0;
  };
  void copy_rows(std::byte* to, int64_t to_row, const RowsAt& from, int64_t count) const;
  // Row `row` of x = the sum of the rows at `places`, in that order; zeros if there are none.
  void sum_at(std::byte* x, int64_t row, const std::byte* rows, std::span<const int32_t> places)
      const;
  void reserve(int64_t num_sent, int64_t num_received);
  void send_rows();    // send_ here to received_ there
  void return_rows();  // received_ here to send_ there

  RivalShape shape_;
  int num_ranks_ = 1;
  int rank_ = 0;
  int num_local_experts_ = 0;
  size_t row_bytes_ = 0;
  int64_t num_tokens_ = 0;
  int64_t num_rows_ = 0;
  Exchange exchange_;
  std::vector<int64_t> expert_begin_;  // [num_local_experts + 1]
  std::vector<int64_t> expert_rows_;   // [num_local_experts] without padding
  Rows send_;
  Rows received_;

 private:
  MPI_Datatype row_type_;
  WorkerPool workers_;
};

// One row travels for every route.
class PerRouteRival final : public MpiRival {
 public:
  using MpiRival::MpiRival;
  [[nodiscard]] const char* name() const override { return "MPI_Alltoallv, one row per route"; }
  void plan(std::span<const int32_t> topk_idx) override;
  void dispatch(const std::byte* x, std::byte* rows) override;
  void combine(const std::byte* rows, std::byte* x) override;

 private:
  void place_blocks(std::span<const int> received_counts);

  struct Block {  // adjacent in what was received and in the output
    int64_t received = 0;
    int64_t slot = 0;
    int64_t rows = 0;
  };
  std::vector<int32_t> token_of_;    // [num_sent], in expert order
  std::vector<int32_t> sent_place_;  // [num_tokens, topk], -1 = no route
  std::vector<Block> blocks_;
};

// One row travels for every (token, rank); the receiver copies it to all its slots and sums before
// sending back.
class PerRankRival final : public MpiRival {
 public:
  using MpiRival::MpiRival;
  [[nodiscard]] const char* name() const override { return "MPI_Alltoallv, one row per rank"; }
  void plan(std::span<const int32_t> topk_idx) override;
  void dispatch(const std::byte* x, std::byte* rows) override;
  void combine(const std::byte* rows, std::byte* x) override;

 private:
  void choose_arrivals(std::span<const int32_t> topk_idx);
  void place_received();
  [[nodiscard]] std::span<const int32_t> slots_of(int64_t received) const {
    const auto begin = static_cast<size_t>(slot_begin_[static_cast<size_t>(received)]);
    const auto end = static_cast<size_t>(slot_begin_[static_cast<size_t>(received) + 1]);
    return {slots_.data() + begin, end - begin};
  }

  std::vector<int32_t> token_of_;      // [num_sent], by rank, then token
  std::vector<int32_t> sent_begin_;    // [num_tokens + 1] into sent_places_
  std::vector<int32_t> sent_places_;   // where each token's partial sums come back, by rank
  std::vector<int32_t> sent_experts_;  // [num_sent, topk]
  std::vector<int32_t> experts_;       // [num_received, topk]
  std::vector<int32_t> slot_begin_;    // [num_received + 1] into slots_
  std::vector<int32_t> slots_;
};

}  // namespace weft::bench
