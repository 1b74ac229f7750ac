// SPDX-License-Identifier: Apache-2.0
#include "mpi/rival.hpp"

#include <array>
#include <cstring>
#include <numeric>

#include "cpu/combine/row_sum.hpp"
#include "weft/routing.hpp"

namespace weft::bench {
void MpiRival::Exchange::set_begins() {
  send_begin.resize(send_counts.size());
  recv_begin.resize(recv_counts.size());
  std::exclusive_scan(send_counts.begin(), send_counts.end(), send_begin.begin(), 0);
  std::exclusive_scan(recv_counts.begin(), recv_counts.end(), recv_begin.begin(), 0);
}

MpiRival::MpiRival(const RivalShape& shape)
    : shape_(shape),
      row_bytes_(static_cast<size_t>(shape.hidden * dtype_bytes(shape.dtype))),
      workers_(shape.num_threads) {
  MPI_Comm_size(MPI_COMM_WORLD, &num_ranks_);
  MPI_Comm_rank(MPI_COMM_WORLD, &rank_);
  num_local_experts_ = shape.num_experts / num_ranks_;
  const auto n = static_cast<size_t>(num_ranks_);
  exchange_.send_counts.resize(n);
  exchange_.recv_counts.resize(n);
  MPI_Type_contiguous(static_cast<int>(row_bytes_), MPI_BYTE, &row_type_);
  MPI_Type_commit(&row_type_);
}

MpiRival::~MpiRival() {
  MPI_Type_free(&row_type_);
}

void MpiRival::reserve(int64_t num_sent, int64_t num_received) {
  const auto grow = [&](Rows& rows, int64_t count) {
    const size_t bytes = static_cast<size_t>(count) * row_bytes_;
    if (rows.size() < bytes) {
      rows.resize(bytes);
    }
  };
  grow(send_, num_sent);
  grow(received_, num_received);
}

void MpiRival::place_experts(std::span<const int> counts) {
  const auto num_local = static_cast<size_t>(num_local_experts_);
  expert_begin_.assign(num_local + 1, 0);
  expert_rows_.assign(num_local, 0);
  for (size_t i = 0; i < counts.size(); ++i) {
    expert_rows_[i % num_local] += counts[i];
  }
  for (size_t e = 0; e < num_local; ++e) {
    const int64_t pad = shape_.pad_multiple;
    expert_begin_[e + 1] = expert_begin_[e] + (expert_rows_[e] + pad - 1) / pad * pad;
  }
  num_rows_ = expert_begin_.back();
}

void MpiRival::zero_padding(std::byte* rows) {
  for (size_t e = 0; e < expert_rows_.size(); ++e) {
    const auto begin = static_cast<size_t>(expert_begin_[e] + expert_rows_[e]) * row_bytes_;
    std::memset(rows + begin, 0, static_cast<size_t>(expert_begin_[e + 1]) * row_bytes_ - begin);
  }
}

void MpiRival::copy_rows(std::byte* to, int64_t to_row, const RowsAt& from, int64_t count) const {
  std::memcpy(
      to + static_cast<size_t>(to_row) * row_bytes_,
      from.data + static_cast<size_t>(from.row) * row_bytes_,
      static_cast<size_t>(count) * row_bytes_
  );
}

void MpiRival::send_rows() {
  MPI_Alltoallv(
      send_.data(),
      exchange_.send_counts.data(),
      exchange_.send_begin.data(),
      row_type_,
      received_.data(),
      exchange_.recv_counts.data(),
      exchange_.recv_begin.data(),
      row_type_,
      MPI_COMM_WORLD
  );
}

void MpiRival::return_rows() {
  MPI_Alltoallv(
      received_.data(),
      exchange_.recv_counts.data(),
      exchange_.recv_begin.data(),
      row_type_,
      send_.data(),
      exchange_.send_counts.data(),
      exchange_.send_begin.data(),
      row_type_,
      MPI_COMM_WORLD
  );
}

void MpiRival::sum_at(
    std::byte* x, int64_t row, const std::byte* rows, std::span<const int32_t> places
) const {
  std::byte* out = x + static_cast<size_t>(row) * row_bytes_;
  if (places.empty()) {
    std::memset(out, 0, row_bytes_);
    return;
  }
  static thread_local RowGroups terms;  // keeps its memory
  terms.clear();
  for (const int32_t place : places) {
    terms.rows.push_back(rows + static_cast<size_t>(place) * row_bytes_);
  }
  terms.group_ends.push_back(places.size());
  sum_groups(out, terms, shape_.dtype, shape_.hidden);
}

}  // namespace weft::bench
