// SPDX-License-Identifier: Apache-2.0
#include "group/tcp/frame.hpp"

#include <algorithm>

namespace weft {
namespace {

constexpr uint64_t kMaxFrameBytes = uint64_t{1} << 32;
// A frame's memory grows by this much as its bytes come, so that a header alone takes none.
constexpr uint64_t kGrowth = uint64_t{1} << 20;
constexpr auto kFailureSendTime = std::chrono::seconds(1);

bool is_sound(const FrameHeader& header) {
  return header.kind >= FrameKind::kWelcome && header.kind <= FrameKind::kLast &&
         header.bytes <= kMaxFrameBytes;
}

}  // namespace

IoState FrameReader::read_some(const Socket& socket) {
  const auto header = std::as_writable_bytes(std::span(&frame_.header, 1));
  if (header_done_ < header.size()) {
    const IoState state = receive_some(socket, header, header_done_);
    if (state != IoState::kDone) {
      return state;
    }
    if (!is_sound(frame_.header)) {
      return IoState::kClosed;
    }
  }
  while (payload_done_ < frame_.header.bytes) {
    frame_.payload.resize(std::min(frame_.header.bytes, payload_done_ + kGrowth));
    const IoState state = receive_some(socket, frame_.payload, payload_done_);
    if (state != IoState::kDone) {
      return state;
    }
  }
  return IoState::kDone;
}

Frame FrameReader::take() {
  header_done_ = 0;
  payload_done_ = 0;
  return std::exchange(frame_, {});
}

IoState send_frame(
    const Socket& socket,
    FrameKind kind,
    std::span<const std::byte> payload,
    const Deadline& deadline,
    uint32_t code
) {
  const FrameHeader header = {kind, code, payload.size()};
  const IoState state = send_all(socket, std::as_bytes(std::span(&header, 1)), deadline);
  return state == IoState::kDone ? send_all(socket, payload, deadline) : state;
}

void send_failure(const Socket& socket, const Failure& failure) {
  const auto text = std::as_bytes(std::span(failure.text));
  const auto code = static_cast<uint32_t>(failure.code);
  const Deadline deadline(kFailureSendTime);
  static_cast<void>(send_frame(socket, FrameKind::kFailure, text, deadline, code));
}

std::optional<Failure> failure_in(const Frame& frame) {
  if (frame.header.kind != FrameKind::kFailure) {
    return std::nullopt;
  }
  const auto last = static_cast<uint32_t>(ErrorCode::kInterrupted);
  const auto* text = reinterpret_cast<const char*>(frame.payload.data());
  return Failure{
      static_cast<ErrorCode>(std::min(frame.header.code, last)), {text, frame.payload.size()}};
}

IoState receive_frame(const Socket& socket, Frame& frame, const Deadline& deadline) {
  FrameReader reader;
  while (true) {
    const IoState state = reader.read_some(socket);
    if (state == IoState::kDone) {
      frame = reader.take();
    }
    if (state != IoState::kMore || !wait_readable(socket, deadline)) {
      return state;
    }
  }
}

Bytes pack_blocks(std::span<const Bytes> blocks) {
  Bytes packed;
  for (const Bytes& block : blocks) {
    const uint64_t size = block.size();
    const auto bytes = std::as_bytes(std::span(&size, 1));
    packed.insert(packed.end(), bytes.begin(), bytes.end());
  }
  for (const Bytes& block : blocks) {
    packed.insert(packed.end(), block.begin(), block.end());
  }
  return packed;
}

std::optional<std::vector<Bytes>> unpack_blocks(std::span<const std::byte> packed, int num_blocks) {
  std::vector<uint64_t> sizes(static_cast<size_t>(num_blocks));
  const auto table = std::as_writable_bytes(std::span(sizes));
  if (packed.size() < table.size()) {
    return std::nullopt;
  }
  std::ranges::copy(packed.first(table.size()), table.begin());
  packed = packed.subspan(table.size());
  std::vector<Bytes> blocks;
  for (const uint64_t size : sizes) {
    if (size > packed.size()) {
      return std::nullopt;
    }
    blocks.emplace_back(packed.begin(), packed.begin() + static_cast<ptrdiff_t>(size));
    packed = packed.subspan(size);
  }
  return packed.empty() ? std::optional(std::move(blocks)) : std::nullopt;
}

}  // namespace weft
