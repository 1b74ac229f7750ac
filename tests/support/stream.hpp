// SPDX-License-Identifier: Apache-2.0
// A stream of the caller's own for calls on a GPU. stream_cuda.cpp or stream_none.cpp.
#pragma once

#include <memory>

#include "weft/tensor.hpp"

namespace weft::test {

class TestStream {
 public:
  // Does not wait for the legacy default stream.
  explicit TestStream(const Device& device);
  [[nodiscard]] void* get() const { return stream_.get(); }  // a cudaStream_t
  void wait() const;

 private:
  std::shared_ptr<void> stream_;  // waited for at the end
  Device device_;
};

}  // namespace weft::test
