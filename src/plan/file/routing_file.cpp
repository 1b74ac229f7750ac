// SPDX-License-Identifier: Apache-2.0
#include "plan/file/routing_file.hpp"

#include <cerrno>
#include <cstring>
#include <fcntl.h>
#include <filesystem>
#include <fstream>
#include <limits>
#include <sys/stat.h>
#include <unistd.h>
#include <utility>

namespace weft {
namespace {

namespace format = routing_format;

std::unique_ptr<std::istream> open_file(const std::string& path) {
  errno = 0;
  auto in = std::make_unique<std::ifstream>(path, std::ios::binary);
  WEFT_CHECK(
      Context{},
      in->is_open() && !std::filesystem::is_directory(path),
      ErrorCode::kFile,
      "read routing: {}",
      errno_text(path, in->is_open() ? EISDIR : errno)
  );
  return in;
}

uint32_t checksum_of(const format::Header& header) {
  return crc32(std::as_bytes(std::span(&header, 1)).first(offsetof(format::Header, checksum)));
}

template <class Index>
void widen(std::span<const std::byte> bytes, std::vector<int32_t>& experts) {
  for (size_t i = 0; i < experts.size(); ++i) {
    Index index;
    std::memcpy(&index, bytes.data() + i * sizeof(Index), sizeof(Index));
    experts[i] = index;
  }
}

std::string text_of(const RoutingFileShape& shape) {
  return fmt::format(
      "{} ranks, {} experts, topk = {}", shape.num_ranks, shape.num_experts, shape.topk
  );
}

// Returns why no file has this shape, or nothing.
std::string shape_fault(const RoutingFileShape& shape) {
  const auto is_in = [](int value, int most) { return value >= 1 && value <= most; };
  if (is_in(shape.num_ranks, format::kMaxRanks) && is_in(shape.num_experts, format::kMaxExperts) &&
      is_in(shape.topk, kMaxTopk)) {
    return {};
  }
  const RoutingFileShape most = {format::kMaxRanks, format::kMaxExperts, kMaxTopk};
  return fmt::format("{} (at least 1 of each, at most {})", text_of(shape), text_of(most));
}

}  // namespace

RoutingFileReader::RoutingFileReader(const std::string& path, Tail tail)
    : RoutingFileReader(open_file(path), path, tail) {}

RoutingFileReader::RoutingFileReader(std::unique_ptr<std::istream> in, std::string name, Tail tail)
    : in_(std::move(in)), name_(std::move(name)) {
  in_->seekg(0, std::ios::end);
  const auto end = static_cast<std::streamoff>(in_->tellg());
  if (end < 0) {
    fail(0, "the file cannot be searched (expected a regular file)");
  }
  file_bytes_ = static_cast<uint64_t>(end);
  read_header();
  find_records(tail);
}

void RoutingFileReader::read_at(uint64_t offset, std::span<std::byte> into) {
  in_->clear();
  in_->seekg(static_cast<std::streamoff>(offset));
  in_->read(reinterpret_cast<char*>(into.data()), static_cast<std::streamsize>(into.size()));
  if (static_cast<size_t>(in_->gcount()) != into.size()) {
    fail(offset, "reading failed after {} B (expected {})", in_->gcount(), into.size());
  }
}

void RoutingFileReader::read_header() {
  if (file_bytes_ == 0) {
    fail(0, "the file is empty (expected a routing file)");
  }
  if (file_bytes_ < sizeof(uint64_t) || value_at<uint64_t>(0) != format::kMagic) {
    fail(0, "not a routing file (expected it to begin with \"WEFTROUT\")");
  }
  if (file_bytes_ < sizeof(header_)) {
    fail(file_bytes_, "the header is cut off (expected {} B)", sizeof(header_));
  }
  header_ = value_at<format::Header>(0);
  if (header_.version != format::kVersion) {
    const size_t at = offsetof(format::Header, version);
    fail(at, "version {} (expected {})", header_.version, format::kVersion);
  }
  if (const uint32_t sum = checksum_of(header_); sum != header_.checksum) {
    const size_t at = offsetof(format::Header, checksum);
    fail(at, "checksum {:08x} (the header's is {:08x})", header_.checksum, sum);
  }
  shape_ = {
      static_cast<int>(header_.num_ranks),
      static_cast<int>(header_.num_experts),
      static_cast<int>(header_.topk)};
  std::string fault = shape_fault(shape_);
  if (fault.empty() && header_.index_bytes != 4 &&
      (header_.index_bytes != 2 || shape_.num_experts > format::kMaxNarrowExperts)) {
    fault = fmt::format("indices have {} B (2 or 4, wide enough)", header_.index_bytes);
  }
  if (!fault.empty()) {
    fail(offsetof(format::Header, num_ranks), "{}", fault);
  }
  end_ = sizeof(header_);
}

// Returns nothing if a record is at end_; `bytes` is its size then.
std::string RoutingFileReader::record_fault(uint64_t& bytes) {
  const uint64_t left = file_bytes_ - end_;
  const uint64_t least = format::record_bytes(header_, 0);
  if (left < least) {
    return fmt::format("record {} is cut off: {} B (at least {})", num_records(), left, least);
  }
  const auto record = value_at<format::RecordHeader>(end_);
  if (record.mark != format::kRecordMark || record.zero != 0 || record.layer > INT32_MAX) {
    return fmt::format("no record {} begins here (expected \"WREC\")", num_records());
  }
  if (record.bytes < least) {
    return fmt::format("record {} claims {} B (at least {})", num_records(), record.bytes, least);
  }
  if (record.bytes > left) {
    return fmt::format(
        "record {} is cut off: {} B (expected {})", num_records(), left, record.bytes
    );
  }
  std::vector<uint64_t> num_tokens(header_.num_ranks);
  read_at(end_ + sizeof(record), std::as_writable_bytes(std::span(num_tokens)));
  const uint64_t most = std::numeric_limits<int32_t>::max() / header_.topk;
  uint64_t sum = 0;
  for (const uint64_t count : num_tokens) {
    if (count > most) {
      return fmt::format(
          "record {} has {} tokens on a rank (at most {})", num_records(), count, most
      );
    }
    sum += count;
  }
  bytes = format::record_bytes(header_, sum);
  if (record.bytes != bytes) {
    return fmt::format(
        "record {} claims {} B (its {} tokens take {})", num_records(), record.bytes, sum, bytes
    );
  }
  return {};
}

void RoutingFileReader::find_records(Tail tail) {
  while (end_ < file_bytes_) {
    uint64_t bytes = 0;
    if (const std::string fault = record_fault(bytes); !fault.empty()) {
      if (tail == Tail::kRefuse) {
        fail(end_, "{}", fault);
      }
      tail_fault_ = fmt::format("{}: at byte {}: {}", name_, end_, fault);
      return;
    }
    begin_.push_back(end_);
    end_ += bytes;
  }
}

std::vector<std::byte> RoutingFileReader::read_bytes(int64_t record) {
  const auto idx = static_cast<size_t>(record);
  const uint64_t end = record + 1 == num_records() ? end_ : begin_[idx + 1];
  std::vector<std::byte> bytes(end - begin_[idx]);
  read_at(begin_[idx], bytes);
  format::RecordHeader header;
  std::memcpy(&header, bytes.data(), sizeof(header));
  const uint32_t sum = crc32(std::span(bytes).subspan(format::kChecksumEnd));
  if (sum != header.checksum || header.bytes != bytes.size()) {
    fail(
        begin_[idx],
        "record {} is corrupt: checksum {:08x} (its bytes give {:08x})",
        record,
        header.checksum,
        sum
    );
  }
  return bytes;
}

// Checks a table whose first index is at byte `at`.
void RoutingFileReader::check_indices(const RouteTable& table, uint64_t at) const {
  for (size_t i = 0; i < table.expert.size(); ++i) {
    if (table.expert[i] < -1 || table.expert[i] >= shape_.num_experts) {
      fail(
          at + i * header_.index_bytes,
          "expert {} is out of range (num_experts = {}, -1 = no route)",
          table.expert[i],
          shape_.num_experts
      );
    }
  }
}

RoutingRecord RoutingFileReader::read(int64_t record_idx) {
  WEFT_CHECK_ARG(
      Context{},
      record_idx >= 0 && record_idx < num_records(),
      "read routing: {}: record {} is out of range ({} records)",
      name_,
      record_idx,
      num_records()
  );
  const std::vector<std::byte> bytes = read_bytes(record_idx);
  format::RecordHeader header;
  std::memcpy(&header, bytes.data(), sizeof(header));
  std::vector<uint64_t> num_tokens(header_.num_ranks);
  const size_t first_index = sizeof(header) + num_tokens.size() * sizeof(uint64_t);
  std::memcpy(num_tokens.data(), bytes.data() + sizeof(header), first_index - sizeof(header));

  RoutingRecord record;
  record.step = header.step;
  record.layer = static_cast<int>(header.layer);
  auto indices = std::span(bytes).subspan(first_index);
  for (const uint64_t count : num_tokens) {
    const uint64_t at = begin_[static_cast<size_t>(record_idx)] + bytes.size() - indices.size();
    if (count > indices.size() / (header_.topk * header_.index_bytes)) {
      fail(at, "record {} changed while it was read", record_idx);
    }
    RouteTable& table = record.routes.emplace_back();
    table.num_tokens = static_cast<int64_t>(count);
    table.topk = shape_.topk;
    table.expert.resize(count * header_.topk);
    const auto widen_indices = header_.index_bytes == 2 ? widen<int16_t> : widen<int32_t>;
    widen_indices(indices, table.expert);
    check_indices(table, at);
    indices = indices.subspan(table.expert.size() * header_.index_bytes);
  }
  return record;
}

namespace {

format::Header header_of(const RoutingFileShape& shape) {
  const std::string fault = shape_fault(shape);
  WEFT_CHECK_ARG(Context{}, fault.empty(), "save routing: {}", fault);
  format::Header header;
  header.num_ranks = static_cast<uint32_t>(shape.num_ranks);
  header.num_experts = static_cast<uint32_t>(shape.num_experts);
  header.topk = static_cast<uint32_t>(shape.topk);
  header.index_bytes = shape.num_experts <= format::kMaxNarrowExperts ? 2 : 4;
  header.checksum = checksum_of(header);
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

// Returns the byte at which to go on in a file that holds records already.
int64_t end_of_existing(const std::string& path, const RoutingFileShape& shape) {
  const RoutingFileReader reader(path, RoutingFileReader::Tail::kIgnore);
  WEFT_CHECK(
      Context{},
      reader.shape() == shape,
      ErrorCode::kFile,
      "save routing: {}: holds {} (expected {})",
      path,
      text_of(reader.shape()),
      text_of(shape)
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
  fd_ = Descriptor(::open(path_.c_str(), O_WRONLY | O_CREAT | O_CLOEXEC, 0666));
  if (!fd_.is_open() || ::ftruncate(fd_.get(), end) != 0) {
    fail(path_, end, errno);
  }
  end_ = end;
  if (end_ == 0) {
    write_at_end(std::as_bytes(std::span(&header_, 1)));
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
    const ssize_t written = ::pwrite(
        fd_.get(), bytes.data() + done, bytes.size() - done, end_ + static_cast<int64_t>(done)
    );
    if (written < 0 && errno != EINTR) {
      const int error_number = errno;
      // Best effort: a reader that may ignore a torn tail finds the same records without it.
      static_cast<void>(::ftruncate(fd_.get(), end_) == 0);
      fail(path_, end_ + static_cast<int64_t>(done), error_number);
    }
    done += written < 0 ? 0 : static_cast<size_t>(written);
  }
  end_ += static_cast<int64_t>(bytes.size());
}

}  // namespace weft
