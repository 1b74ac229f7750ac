// SPDX-License-Identifier: Apache-2.0
// Files of real routing: what the routers of a model chose, step by step and layer by layer, on all
// ranks. docs/routing_file.md describes the bytes in words.
#pragma once

#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <istream>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "core/descriptor.hpp"
#include "plan/build.hpp"

namespace weft {

inline constexpr auto kCrc32Table = [] {
  std::array<uint32_t, 256> table{};
  for (uint32_t i = 0; i < 256; ++i) {
    table[i] = i;
    for (int bit = 0; bit < 8; ++bit) {
      table[i] = (table[i] & 1) != 0 ? 0xedb88320U ^ table[i] >> 1 : table[i] >> 1;
    }
  }
  return table;
}();

// The CRC-32 of ISO 3309 (zip, PNG): finds torn and flipped bytes, proves nothing about authors.
constexpr uint32_t crc32(std::span<const std::byte> bytes) {
  uint32_t value = 0xffffffffU;
  for (const std::byte byte : bytes) {
    value = kCrc32Table[(value ^ static_cast<uint32_t>(byte)) & 0xffU] ^ value >> 8;
  }
  return ~value;
}

namespace routing_format {  // the bytes: little-endian, packed

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

// Behind RecordHeader: u64 num_tokens[num_ranks], each rank's indices [num_tokens, topk].
constexpr uint64_t record_bytes(const Header& header, uint64_t num_tokens) {
  return sizeof(RecordHeader) + uint64_t{header.num_ranks} * sizeof(uint64_t) +
         num_tokens * header.topk * header.index_bytes;
}

}  // namespace routing_format

struct RoutingFileShape {
  int num_ranks = 0;
  int num_experts = 0;
  int topk = 0;
  friend bool operator==(const RoutingFileShape&, const RoutingFileShape&) = default;
};

struct RoutingRecord {
  int64_t step = 0;
  int layer = 0;
  std::vector<RouteTable> routes;  // [num_ranks], without weights
};

// Appends records; each is one write, so a process that dies leaves all earlier ones readable.
// Throws Error (kFile); after a failed append the file ends with the last whole record.
class RoutingFileWriter {
 public:
  enum class Mode : uint8_t {
    kNew,       // replaces what is there
    kContinue,  // goes on behind the last whole record of a file of the same shape, or a new one
  };
  RoutingFileWriter(std::string path, const RoutingFileShape& shape, Mode mode = Mode::kNew);

  // Appends `routes` by rank, of the file's topk.
  void append(int64_t step, int layer, std::span<const RouteTable> routes);

 private:
  void write_at_end(std::span<const std::byte> bytes);
  std::string path_;
  routing_format::Header header_;
  Descriptor fd_;
  int64_t end_ = 0;  // of the last whole record
};

// One thread at a time. Throws Error (kFile) naming file, byte and what was expected.
class RoutingFileReader {
 public:
  enum class Tail : uint8_t {
    kRefuse,  // a fault anywhere in the chain of records throws
    kIgnore,  // the records before the fault are offered; tail_fault() tells
  };
  explicit RoutingFileReader(const std::string& path, Tail tail = Tail::kRefuse);
  // `name` stands for the path in errors.
  RoutingFileReader(std::unique_ptr<std::istream> in, std::string name, Tail tail);

  [[nodiscard]] const RoutingFileShape& shape() const { return shape_; }
  [[nodiscard]] int64_t num_records() const { return static_cast<int64_t>(begin_.size()); }
  // Checks the record's checksum and every index.
  [[nodiscard]] RoutingRecord read(int64_t record);
  [[nodiscard]] const std::string& tail_fault() const { return tail_fault_; }
  // Byte at which the next record would begin.
  [[nodiscard]] int64_t end() const { return static_cast<int64_t>(end_); }

 private:
  void read_header();
  void find_records(Tail tail);
  [[nodiscard]] std::string record_fault(uint64_t& bytes);
  void read_at(uint64_t offset, std::span<std::byte> into);
  template <class T>
  [[nodiscard]] T value_at(uint64_t offset) {
    T value;
    read_at(offset, std::as_writable_bytes(std::span(&value, 1)));
    return value;
  }
  [[nodiscard]] std::vector<std::byte> read_bytes(int64_t record);
  void check_indices(const RouteTable& table, uint64_t at) const;
  template <class... Args>
  [[noreturn]] void fail(uint64_t offset, fmt::format_string<Args...> format, Args&&... args)
      const {
    const std::string problem = fmt::format(format, std::forward<Args>(args)...);
    WEFT_RAISE(
        Context{}, ErrorCode::kFile, "read routing: {}: at byte {}: {}", name_, offset, problem
    );
  }

  std::unique_ptr<std::istream> in_;
  std::string name_;
  uint64_t file_bytes_ = 0;
  routing_format::Header header_;
  RoutingFileShape shape_;
  std::vector<uint64_t> begin_;  // of each record
  uint64_t end_ = 0;
  std::string tail_fault_;
};

}  // namespace weft
