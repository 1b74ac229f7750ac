// SPDX-License-Identifier: Apache-2.0
// The bytes of a routing file; docs/routing_file.md says the same in words. Little-endian, packed.
#pragma once

#include <bit>
#include <cstdint>

namespace weft::routing_format {

static_assert(std::endian::native == std::endian::little);

inline constexpr uint64_t kMagic = 0x54554f5254464557;  // "WEFTROUT"
inline constexpr uint32_t kVersion = 1;
inline constexpr uint32_t kRecordMark = 0x43455257;  // "WREC"
inline constexpr int kMaxRanks = 1 << 16;
inline constexpr int kMaxExperts = 1 << 20;
// Indices take two bytes where every expert fits.
inline constexpr int kMaxNarrowExperts = 1 << 15;

struct Header {
  uint64_t magic = kMagic;
  uint32_t version = kVersion;
  uint32_t num_ranks = 0;
  uint32_t num_experts = 0;
  uint32_t topk = 0;
  uint32_t index_bytes = 0;
  uint32_t checksum = 0;  // of the bytes before it
};
static_assert(sizeof(Header) == 32);

struct RecordHeader {
  uint32_t mark = kRecordMark;
  uint32_t checksum = 0;  // of all bytes of the record after this field
  uint64_t bytes = 0;     // of the whole record, this header included
  int64_t step = 0;
  uint32_t layer = 0;
  uint32_t zero = 0;
};
static_assert(sizeof(RecordHeader) == 32);
inline constexpr uint64_t kChecksumEnd = 8;  // where the checked bytes of a record begin

// Then u64 num_tokens[num_ranks], then each rank's indices [num_tokens, topk].
constexpr uint64_t record_bytes(const Header& header, uint64_t num_tokens) {
  return sizeof(RecordHeader) + uint64_t{header.num_ranks} * sizeof(uint64_t) +
         num_tokens * header.topk * header.index_bytes;
}

}  // namespace weft::routing_format
