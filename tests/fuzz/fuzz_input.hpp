// SPDX-License-Identifier: Apache-2.0
// Shared by the fuzz targets: values out of the fuzzer's bytes, and a check that ends the run.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <span>

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size);

namespace weft::fuzz {

// Aborts unless `truth`, which must hold of every input, so that the fuzzer keeps the input.
inline void require(bool truth, const char* what) {
  if (!truth) {
    std::fprintf(stderr, "fuzz: broken: %s\n", what);
    std::abort();
  }
}

// Hands out the input byte by byte; zeros once it is used up.
class FuzzInput {
 public:
  FuzzInput(const uint8_t* data, size_t size) : left_(data, size) {}

  uint8_t byte() {
    if (left_.empty()) {
      return 0;
    }
    const uint8_t value = left_.front();
    left_ = left_.subspan(1);
    return value;
  }
  int between(int low, int high) { return low + byte() % (high - low + 1); }
  bool coin() { return (byte() & 1) != 0; }
  [[nodiscard]] std::span<const uint8_t> rest() const { return left_; }

 private:
  std::span<const uint8_t> left_;
};

}  // namespace weft::fuzz
