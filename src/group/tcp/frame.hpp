// SPDX-License-Identifier: Apache-2.0
// Frames that proven ranks send each other: a header and its payload, numbers little-endian.
//
//   | kind u32 | code u32 | bytes u64 | payload ... |
#pragma once

#include <bit>
#include <optional>
#include <string>

#include "group/control_plane.hpp"
#include "group/tcp/socket.hpp"

namespace weft {

static_assert(std::endian::native == std::endian::little, "frames are little-endian");

enum class FrameKind : uint32_t {
  kWelcome = 1,  // rank 0: the group is complete
  kBlock = 2,    // to rank 0: this rank's block
  kBlocks = 3,   // from rank 0: all blocks, see pack_blocks
  kFailure = 4,  // from rank 0: the group has ended; code is an ErrorCode, the payload says why
  // Between ranks that go on without lost ones, see survive/messages.hpp.
  kBeat = 5,
  kLeft = 6,
  kArrived = 7,
  kVote = 8,
  kAgreed = 9,
  kMail = 10,
  kAsk = 11,
  kLast = kAsk,
};

struct FrameHeader {
  FrameKind kind = {};
  uint32_t code = 0;
  uint64_t bytes = 0;
};

struct Frame {
  FrameHeader header;
  Bytes payload;
};

// Takes a frame in as its bytes come.
class FrameReader {
 public:
  // kDone: frame() is complete. kClosed: the peer is gone or sent what is not a frame.
  [[nodiscard]] IoState read_some(const Socket& socket);
  [[nodiscard]] const Frame& frame() const { return frame_; }
  [[nodiscard]] Frame take();  // makes room for the next

 private:
  Frame frame_;
  size_t header_done_ = 0;
  size_t payload_done_ = 0;
};

[[nodiscard]] IoState send_frame(
    const Socket& socket,
    FrameKind kind,
    std::span<const std::byte> payload,
    const Deadline& deadline,
    uint32_t code = 0
);
// Best effort: a peer that cannot be told will see the connection close.
void send_failure(const Socket& socket, const Failure& failure);
// Returns the failure in a kFailure frame; nothing for any other frame.
[[nodiscard]] std::optional<Failure> failure_in(const Frame& frame);

// Waits for the next frame of one peer.
[[nodiscard]] IoState receive_frame(const Socket& socket, Frame& frame, const Deadline& deadline);

// Packs blocks as | bytes u64 of each block | blocks ... |
[[nodiscard]] Bytes pack_blocks(std::span<const Bytes> blocks);
// Returns the blocks; nothing if the bytes are not `num_blocks` packed blocks.
[[nodiscard]] std::optional<std::vector<Bytes>> unpack_blocks(
    std::span<const std::byte> packed, int num_blocks
);

}  // namespace weft
