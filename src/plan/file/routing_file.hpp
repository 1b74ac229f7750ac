// SPDX-License-Identifier: Apache-2.0
// Files of real routing: what the routers of a model chose, step by step and layer by layer, on all
// ranks. docs/routing_file.md describes the bytes.
#pragma once

#include <cstdint>
#include <istream>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "plan/build.hpp"
#include "plan/routing_format.hpp"

namespace weft {

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
  RoutingFileWriter(RoutingFileWriter&& other) noexcept;
  RoutingFileWriter& operator=(RoutingFileWriter&&) = delete;
  ~RoutingFileWriter();

  // `routes` by rank, each of the file's topk.
  void append(int64_t step, int layer, std::span<const RouteTable> routes);

 private:
  void write_at_end(std::span<const std::byte> bytes);
  std::string path_;
  routing_format::Header header_;
  int fd_ = -1;
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
  // Where the next record would begin.
  [[nodiscard]] int64_t end() const { return static_cast<int64_t>(end_); }

 private:
  void read_header();
  void find_records(Tail tail);
  [[nodiscard]] std::string record_fault(uint64_t& bytes);
  void read_at(uint64_t offset, std::span<std::byte> into);
  [[nodiscard]] std::vector<std::byte> read_bytes(int64_t record);
  void check_indices(const RouteTable& table, uint64_t at) const;
  [[noreturn]] void fail(uint64_t offset, const std::string& problem) const;

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
