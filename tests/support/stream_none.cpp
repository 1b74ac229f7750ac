// SPDX-License-Identifier: Apache-2.0
#include "core/check.hpp"
#include "support/stream.hpp"

namespace weft::test {

TestStream::TestStream(const Device& device) : device_(device) {
  raise_error(ErrorCode::kUnsupported, Context{}, "stream: this build has no CUDA");
}

void TestStream::wait() const {}

}  // namespace weft::test
