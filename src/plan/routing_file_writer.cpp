// SPDX-License-Identifier: Apache-2.0
#include <cerrno>
#include <cstring>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>
#include <utility>

#include "plan/crc32.hpp"
#include "plan/routing_file.hpp"

namespace weft {
namespace {

namespace format = routing_format;

format::Header header_of(const RoutingFileShape& shape) {
  WEFT_CHECK_ARG(
      Context{},
      shape.num_ranks >= 1 && shape.num_ranks <= format::kMaxRanks && shape.num_experts >= 1 &&
          shape.num_experts <= format::kMaxExperts && shape.topk >= 1 && shape.topk <= kMaxTopk,
      "save routing: {} ranks, {} experts, topk = {} (at most {}, {} and {})",
      shape.num_ranks,
      shape.num_experts,
      shape.topk,
      format::kMaxRanks,
      format::kMaxExperts,
      kMaxTopk
  );
  format::Header header;
  header.num_ranks = static_cast<uint32_t>(shape.num_ranks);
  header.num_experts = static_cast<uint32_t>(shape.num_experts);
  header.topk = static_cast<uint32_t>(shape.topk);
  header.index_bytes = shape.num_experts <= format::kMaxNarrowExperts ? 2 : 4;
  header.checksum =
      crc32(std::as_bytes(std::span(&header, 1)).first(offsetof(format::Header, checksum)));
  return header;
}

template <class T>
void append_bytes(std::vector<std::byte>& out, const T& value) {
  const auto bytes = std::as_bytes(std::span(&value, 1));
  out.insert(out.end(), bytes.begin(), bytes.end());
}

void check_routes(const format::Header& header, std::span<const RouteTable> routes) {
  WEFT_CHECK_ARG(
      Context{},
      routes.size() == header.num_ranks,
      "save routing: routes of {} ranks are given (the file has {})",
      routes.size(),
      header.num_ranks
  );
  for (const RouteTable& table : routes) {
    WEFT_CHECK_ARG(
        Context{},
        table.topk == static_cast<int>(header.topk) && table.num_tokens >= 0 &&
            table.expert.size() == static_cast<size_t>(table.num_tokens) * header.topk,
        "save routing: {} tokens with topk = {} have {} indices (the file has topk = {})",
        table.num_tokens,
        table.topk,
        table.expert.size(),
        header.topk
    );
    for (const int32_t expert : table.expert) {
      WEFT_CHECK_ARG(
          Context{},
          expert >= -1 && expert < static_cast<int64_t>(header.num_experts),
          "save routing: expert {} is out of range (num_experts = {}, -1 = no route)",
          expert,
          header.num_experts
      );
    }
  }
}

void append_indices(
    std::vector<std::byte>& out, const RouteTable& table, const format::Header& header
) {
  for (const int32_t expert : table.expert) {
    if (header.index_bytes == 2) {
      append_bytes(out, static_cast<int16_t>(expert));
    } else {
      append_bytes(out, expert);
    }
  }
}

// Where to go on in a file that holds records already.
int64_t end_of_existing(const std::string& path, const RoutingFileShape& shape) {
  const RoutingFileReader reader(path, RoutingFileReader::Tail::kIgnore);
  WEFT_CHECK(
      Context{},
      reader.shape() == shape,
      ErrorCode::kFile,
      "save routing: {}: holds {} ranks, {} experts, topk = {} (expected {}, {} and {})",
      path,
      reader.shape().num_ranks,
      reader.shape().num_experts,
      reader.shape().topk,
      shape.num_ranks,
      shape.num_experts,
      shape.topk
  );
  return reader.end();
}

[[noreturn]] void fail(const std::string& path, int64_t offset, int error_number) {
  raise_error(
      ErrorCode::kFile,
      {},
      errno_text(fmt::format("save routing: {}: at byte {}", path, offset), error_number)
  );
}

}  // namespace

RoutingFileWriter::RoutingFileWriter(std::string path, const RoutingFileShape& shape, Mode mode)
    : path_(std::move(path)), header_(header_of(shape)) {
  struct stat status {};
  const bool exists = ::stat(path_.c_str(), &status) == 0 && status.st_size > 0;
  const int64_t end = mode == Mode::kContinue && exists ? end_of_existing(path_, shape) : 0;
  fd_ = ::open(path_.c_str(), O_WRONLY | O_CREAT | O_CLOEXEC, 0666);
  if (fd_ < 0 || ::ftruncate(fd_, end) != 0) {
    const int error_number = errno;
    if (fd_ >= 0) {
      ::close(fd_);
    }
    fail(path_, end, error_number);
  }
  end_ = end;
  if (end_ == 0) {
    write_at_end(std::as_bytes(std::span(&header_, 1)));
  }
}

RoutingFileWriter::RoutingFileWriter(RoutingFileWriter&& other) noexcept
    : path_(std::move(other.path_)),
      header_(other.header_),
      fd_(std::exchange(other.fd_, -1)),
      end_(other.end_) {}

RoutingFileWriter::~RoutingFileWriter() {
  if (fd_ >= 0) {
    ::close(fd_);
  }
}

void RoutingFileWriter::append(int64_t step, int layer, std::span<const RouteTable> routes) {
  check_routes(header_, routes);
  uint64_t num_tokens = 0;
  for (const RouteTable& table : routes) {
    num_tokens += static_cast<uint64_t>(table.num_tokens);
  }
  format::RecordHeader record;
  record.bytes = format::record_bytes(header_, num_tokens);
  record.step = step;
  record.layer = static_cast<uint32_t>(layer);

  std::vector<std::byte> bytes;
  bytes.reserve(record.bytes);
  append_bytes(bytes, record);
  for (const RouteTable& table : routes) {
    append_bytes(bytes, static_cast<uint64_t>(table.num_tokens));
  }
  for (const RouteTable& table : routes) {
    append_indices(bytes, table, header_);
  }
  record.checksum = crc32(std::span(bytes).subspan(format::kChecksumEnd));
  std::memcpy(bytes.data(), &record, sizeof(record));
  write_at_end(bytes);
}

void RoutingFileWriter::write_at_end(std::span<const std::byte> bytes) {
  size_t done = 0;
  while (done < bytes.size()) {
    const ssize_t written =
        ::pwrite(fd_, bytes.data() + done, bytes.size() - done, end_ + static_cast<int64_t>(done));
    if (written < 0 && errno != EINTR) {
      const int error_number = errno;
      // Best effort: a reader that may ignore a torn tail finds the same records without it.
      static_cast<void>(::ftruncate(fd_, end_) == 0);
      fail(path_, end_ + static_cast<int64_t>(done), error_number);
    }
    done += written < 0 ? 0 : static_cast<size_t>(written);
  }
  end_ += static_cast<int64_t>(bytes.size());
}

}  // namespace weft
