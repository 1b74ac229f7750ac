// SPDX-License-Identifier: Apache-2.0
// The data that travels with a write and tells the target which signal grows by how much.
//
//   bit 0 ........ signal_bits ............... 31 or 63
//   | signal       | amount                          |
#pragma once

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>

namespace weft::ofi {

class Immediate {
 public:
  // `data_bytes`: what the provider carries with a write, at least 4.
  Immediate(uint32_t num_signals, size_t data_bytes)
      : signal_bits_(static_cast<unsigned>(std::bit_width(num_signals))),
        amount_bits_(data_bytes >= 8 ? 32U : 32U - signal_bits_) {}

  // Puts that one write may stand for; 0: the signals do not fit.
  [[nodiscard]] uint64_t max_amount() const { return (uint64_t{1} << amount_bits_) - 1; }
  [[nodiscard]] uint64_t encode(uint32_t signal, uint64_t amount) const {
    return signal | (amount << signal_bits_);
  }
  [[nodiscard]] uint32_t signal(uint64_t data) const {
    return static_cast<uint32_t>(data & ((uint64_t{1} << signal_bits_) - 1));
  }
  [[nodiscard]] uint64_t amount(uint64_t data) const {
    return (data >> signal_bits_) & max_amount();
  }

 private:
  unsigned signal_bits_;
  unsigned amount_bits_;
};

}  // namespace weft::ofi
