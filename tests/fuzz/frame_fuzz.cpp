// SPDX-License-Identifier: Apache-2.0
// Whatever a proven rank sends is frames, or ends the connection; it takes no more memory than its
// bytes do, and blocks return from what they were packed into.
#include <sys/socket.h>
#include <unistd.h>

#include "fuzz/fuzz_input.hpp"
#include "group/tcp/frame.hpp"

namespace {

constexpr size_t kRoom = size_t{2} << 20;  // that a frame may take beyond what has come

// Both ends of a connection that never blocks.
struct Connection {
  Connection() {
    int ends[2] = {-1, -1};
    weft::fuzz::require(
        ::socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK, 0, ends) == 0, "a pair of sockets"
    );
    near = weft::Socket(ends[0]);
    far = weft::Socket(ends[1]);
  }
  weft::Socket near;
  weft::Socket far;
};

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using weft::fuzz::require;
  weft::fuzz::FuzzInput input(data, size);
  const int num_blocks = input.between(0, 8);
  const auto bytes = std::as_bytes(input.rest());
  const Connection connection;
  size_t sent = 0;
  while (sent < bytes.size()) {
    const auto count = ::send(connection.near.get(), bytes.data() + sent, bytes.size() - sent, 0);
    if (count <= 0) {
      break;  // the socket is full: that much will do
    }
    sent += static_cast<size_t>(count);
  }
  ::shutdown(connection.near.get(), SHUT_WR);

  weft::FrameReader reader;
  weft::IoState state = weft::IoState::kDone;
  while ((state = reader.read_some(connection.far)) == weft::IoState::kDone) {
    const weft::Frame frame = reader.take();
    require(frame.payload.size() == frame.header.bytes, "a frame has all of its bytes");
    const bool is_failure = frame.header.kind == weft::FrameKind::kFailure;
    require(failure_in(frame).has_value() == is_failure, "only a failure is one");
    if (const auto blocks = weft::unpack_blocks(frame.payload, num_blocks)) {
      require(weft::pack_blocks(*blocks) == frame.payload, "blocks return from their bytes");
    }
  }
  require(state == weft::IoState::kClosed, "the end of what was sent closes the connection");
  require(reader.frame().payload.size() <= sent + kRoom, "a header by itself takes no memory");
  return 0;
}
