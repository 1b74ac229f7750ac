// SPDX-License-Identifier: Apache-2.0
// The matrices of one case in the memory that an exchange works on, a CPU's or a GPU's, guard rows
// included: one copy there before the calls, one back after them.
#pragma once

#include <deque>
#include <memory>

#include "support/memory.hpp"
#include "weft/exchange.hpp"

namespace weft::test {

class CaseMemory {
 public:
  explicit CaseMemory(Exchange& exchange);

  // Place of a matrix, and what came back.
  class Placed {
   public:
    // Tensor as an exchange wants it; of no use before upload().
    [[nodiscard]] const Tensor& tensor() const { return tensor_; }
    // Content that came back, after download().
    [[nodiscard]] const Matrix& result() const { return host_; }

   private:
    friend CaseMemory;
    Matrix host_;
    Tensor tensor_;
    Buffer buffer_;        // if `is_direct`
    uint64_t offset_ = 0;  // otherwise: in the memory of all
  };

  // With its content; a matrix that is not given becomes a tensor that is not. `is_direct`: in
  // memory of Exchange::allocate.
  const Placed& add(Matrix content, bool is_direct = false);
  // A place for a result like this, filled with the canary.
  const Placed& add_output(const Matrix& like, bool is_direct = false);

  // Another content of the same shape at the same place, from the next upload() on.
  void replace(const Placed& placed, const Matrix& content);

  void upload();
  void download();

 private:
  // First byte of the front guard.
  [[nodiscard]] std::byte* begin_of(const Placed& placed) const;

  Exchange* exchange_;
  Device device_;
  std::deque<Placed> all_;  // references stay good
  uint64_t num_bytes_ = 0;
  std::vector<std::byte> host_;
  std::shared_ptr<std::byte> memory_;
};

}  // namespace weft::test
