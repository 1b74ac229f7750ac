// SPDX-License-Identifier: Apache-2.0
// Any bytes are refused as a file's error, or are routing that can be planned.
#include <cstring>
#include <sstream>

#include "fuzz/fuzz_input.hpp"
#include "plan/file/routing_file.hpp"

namespace weft::fuzz {
namespace {

namespace format = routing_format;

// Makes checksums right, so that mutations reach what lies behind them.
void repair(std::string& file) {
  format::Header header;
  if (file.size() < sizeof(header)) {
    return;
  }
  std::memcpy(&header, file.data(), sizeof(header));
  header.checksum =
      crc32(std::as_bytes(std::span(&header, 1)).first(offsetof(format::Header, checksum)));
  std::memcpy(file.data(), &header, sizeof(header));
  size_t at = sizeof(header);
  format::RecordHeader record;
  while (file.size() - at >= sizeof(record)) {
    std::memcpy(&record, file.data() + at, sizeof(record));
    if (record.bytes < sizeof(record) || record.bytes > file.size() - at) {
      return;
    }
    record.checksum =
        crc32(std::as_bytes(std::span(file).subspan(at, record.bytes)).subspan(format::kChecksumEnd)
        );
    std::memcpy(file.data() + at, &record, sizeof(record));
    at += record.bytes;
  }
}

void read_all(const std::string& file, RoutingFileReader::Tail tail) {
  try {
    RoutingFileReader reader(std::make_unique<std::istringstream>(file), "fuzz", tail);
    require(reader.end() <= static_cast<int64_t>(file.size()), "records lie in the file");
    for (int64_t i = 0; i < reader.num_records(); ++i) {
      const RoutingRecord record = reader.read(i);
      require(std::ssize(record.routes) == reader.shape().num_ranks, "every rank has routes");
      for (const RouteTable& table : record.routes) {
        static_cast<void>(count_routes(table, reader.shape().num_experts, 1, {}));
      }
    }
  } catch (const Error& error) {
    require(error.code() == ErrorCode::kFile, "bad bytes are the file's error");
  }
}

}  // namespace
}  // namespace weft::fuzz

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace weft::fuzz;
  using Tail = weft::RoutingFileReader::Tail;
  FuzzInput in(data, size);
  const bool repaired = in.coin();
  std::string file(in.rest().begin(), in.rest().end());
  if (repaired) {
    repair(file);
  }
  read_all(file, Tail::kRefuse);
  read_all(file, Tail::kIgnore);
  return 0;
}
