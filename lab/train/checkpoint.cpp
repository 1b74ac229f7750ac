// SPDX-License-Identifier: Apache-2.0
#include "train/checkpoint.hpp"

#include <nlohmann/json.hpp>

#include <algorithm>
#include <array>
#include <bit>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <numeric>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <system_error>

#include "core/atomic_file.hpp"
#include "core/check.hpp"
#include "core/json_piece.hpp"
#include "group/agree.hpp"
#include "group/control_plane.hpp"
#include "train/layers/random.hpp"

namespace weft::moe {
namespace {

[[noreturn]] void fail(const std::string& path, std::string_view problem) {
  raise_error(ErrorCode::kFile, {}, fmt::format("resume: {}: {}", path, problem));
}

// A file that is read in places. Every failure throws Error (kFile) naming the path.
class StateFile {
 public:
  explicit StateFile(const std::string& path) : path_(path), file_(path, std::ios::binary) {
    if (!file_) {
      fail(path_, errno_text("open", errno));
    }
  }

  [[nodiscard]] const std::string& path() const { return path_; }
  [[nodiscard]] uint64_t size() {
    file_.seekg(0, std::ios::end);
    return static_cast<uint64_t>(file_.tellg());
  }

  void read_at(uint64_t offset, std::span<std::byte> bytes) {
    file_.seekg(static_cast<std::streamoff>(offset));
    file_.read(reinterpret_cast<char*>(bytes.data()), std::ssize(bytes));
    if (file_.bad()) {
      fail(path_, errno_text("read", errno));
    }
    if (!file_) {
      const uint64_t end = offset + static_cast<uint64_t>(file_.gcount());
      fail(path_, fmt::format("it ends at byte {} (truncated)", end));
    }
  }

 private:
  std::string path_;
  std::ifstream file_;
};

using HeaderBytes = std::array<std::byte, kHeaderBytes>;

struct HeaderContents {
  int64_t steps_done = 0;
  uint64_t data_checksum = 0;
};

using Json = nlohmann::ordered_json;

constexpr std::string_view kMagic = "weft-moe-checkpoint 1 ";
constexpr size_t kChecksumDigits = 16;

// Returns the fields that must be equal to go on, as they stand in the file.
Json identity(const CheckpointHeader& header) {
  Json json;
  visit_fields(header.model, [&](const char* name, auto value) { json[name] = value; });
  json["global_batch"] = header.global_batch;
  json["seed"] = header.seed;
  json["dtype"] = dtype_name(header.dtype);
  json["text_bytes"] = header.text_bytes;
  json["text_checksum"] = header.text_checksum;
  json["num_elements"] = header.num_elements;
  return json;
}

// The JSON text between the first line and the zeros, its checksum proven.
std::string_view json_text(std::string_view bytes, const std::string& path) {
  if (!bytes.starts_with(kMagic)) {
    fail(path, fmt::format("not a checkpoint (it does not begin with \"{}\")", kMagic));
  }
  const std::string_view digits = bytes.substr(kMagic.size(), kChecksumDigits);
  std::string_view text = bytes.substr(kMagic.size() + kChecksumDigits + 1);
  text = text.substr(0, text.find('\0'));
  if (digits != fmt::format("{:016x}", checksum(std::as_bytes(std::span(text))))) {
    fail(path, "the header is damaged (its checksum differs)");
  }
  return text;
}

HeaderBytes encode_header(const CheckpointHeader& header, uint64_t data_checksum) {
  Json json = identity(header);
  json["steps_done"] = header.steps_done;
  json["data_checksum"] = data_checksum;
  const std::string text = json.dump(1) + "\n";
  const std::string all =
      fmt::format("{}{:016x}\n{}", kMagic, checksum(std::as_bytes(std::span(text))), text);
  HeaderBytes bytes = {};
  WEFT_ASSERT(all.size() < bytes.size());
  std::ranges::copy(std::as_bytes(std::span(all)), bytes.begin());
  return bytes;
}

// The header's fields.
Json read_fields(StateFile& file) {
  HeaderBytes bytes = {};
  file.read_at(0, std::span(bytes).first(std::min<uint64_t>(file.size(), bytes.size())));
  const std::string_view all(reinterpret_cast<const char*>(bytes.data()), bytes.size());
  Json json = Json::parse(json_text(all, file.path()), nullptr, false);
  if (!json.is_object()) {
    fail(file.path(), "the header is not JSON");
  }
  return json;
}

template <class T>
T number_of(const Json& json, const char* field, const std::string& path) {
  if (!json.contains(field) || !json[field].is_number_integer()) {
    fail(path, fmt::format("the header lacks \"{}\"", field));
  }
  return json[field].get<T>();
}

int64_t steps_of(const Json& json, const std::string& path) {
  const auto steps = number_of<int64_t>(json, "steps_done", path);
  if (steps < 0) {
    fail(path, fmt::format("steps_done = {} (at least 0)", steps));
  }
  return steps;
}

constexpr size_t kNumParts = 3;

uint64_t file_offset(uint64_t element) {
  return kHeaderBytes + element * sizeof(float);
}

// Calls visit(first, elements) for each part of each piece: the number of its first element in the
// file, and the elements in memory. Returns the sum of what the visits return.
template <class Visit>
uint64_t visit_parts(
    const CheckpointHeader& header, std::span<const StatePiece> pieces, const Visit& visit
) {
  uint64_t own = 0;
  for (const StatePiece& piece : pieces) {
    for (size_t part = 0; part < kNumParts; ++part) {
      own += visit(part * header.num_elements + piece.model_begin, piece.parts[part]);
    }
  }
  return own;
}

// Both return the checksum of the pieces.
uint64_t write_pieces(
    NextFile& file, const CheckpointHeader& header, std::span<const StatePiece> pieces
) {
  const auto own = visit_parts(header, pieces, [&](uint64_t first, std::span<float> elements) {
    file.write_at(file_offset(first), std::as_bytes(elements));
    return checksum(elements, first);
  });
  file.flush();
  return own;
}

uint64_t read_pieces(
    StateFile& file,
    const CheckpointHeader& header,
    std::span<const StatePiece> pieces,
    std::vector<std::vector<float>>& read
) {
  return visit_parts(header, pieces, [&](uint64_t first, std::span<float> wanted) {
    auto& elements = read.emplace_back(wanted.size());
    file.read_at(file_offset(first), std::as_writable_bytes(std::span(elements)));
    return checksum(elements, first);
  });
}

// Throws Error (kFile) naming the file and the field that is missing, damaged or unlike `expected`.
HeaderContents read_header(StateFile& file, const CheckpointHeader& expected) {
  const Json json = read_fields(file);
  const std::string& path = file.path();
  const Json wanted = identity(expected);
  for (const auto& [field, value] : wanted.items()) {
    if (!json.contains(field)) {
      fail(path, fmt::format("the header lacks \"{}\"", field));
    }
    if (json[field] != value) {
      const std::string theirs = json_piece(json[field]);
      fail(path, fmt::format("{} = {} ({} in this run)", field, theirs, json_piece(value)));
    }
  }
  const uint64_t whole = file_offset(kNumParts * expected.num_elements);
  if (file.size() != whole) {
    fail(path, fmt::format("{} B (a checkpoint of this model holds {} B)", file.size(), whole));
  }
  return {steps_of(json, path), number_of<uint64_t>(json, "data_checksum", path)};
}

}  // namespace

uint64_t checksum(std::span<const float> elements, uint64_t first) {
  uint64_t sum = 0;
  for (size_t i = 0; i < elements.size(); ++i) {
    sum += mix_bits((first + i) << 32 | std::bit_cast<uint32_t>(elements[i]));
  }
  return sum;
}

uint64_t checksum(std::span<const std::byte> bytes) {
  uint64_t hash = bytes.size();
  for (size_t i = 0; i < bytes.size(); i += sizeof(uint64_t)) {
    uint64_t word = 0;
    std::memcpy(&word, bytes.data() + i, std::min(sizeof(word), bytes.size() - i));
    hash = mix_bits(hash ^ word);
  }
  return hash;
}

void write_checkpoint(
    const Group& group,
    const std::string& path,
    const CheckpointHeader& header,
    std::span<const StatePiece> pieces
) {
  std::optional<NextFile> file;  // of the first rank, who makes it
  agree(group, [&] {
    if (group.rank() == 0) {
      file.emplace(path);
    }
  });
  const uint64_t number = gather_values(group, file ? file->number() : 0).front();
  uint64_t own = 0;
  agree(group, [&] {
    std::optional<NextFile> part;
    own = write_pieces(file ? *file : part.emplace(path, number), header, pieces);
  });
  const auto checksums = gather_values(group, own);
  agree(group, [&] {
    if (file) {
      file->write_at(0, encode_header(header, std::reduce(checksums.begin(), checksums.end())));
      file->commit();
    }
  });
}

std::optional<int64_t> checkpoint_steps(const std::string& path) {
  std::error_code none;
  if (std::filesystem::file_size(path, none) == 0 || none) {
    return std::nullopt;
  }
  StateFile file(path);
  return steps_of(read_fields(file), path);
}

int64_t read_checkpoint(
    const Group& group,
    const std::string& path,
    const CheckpointHeader& expected,
    std::span<const StatePiece> pieces
) {
  HeaderContents contents;
  std::vector<std::vector<float>> read;
  uint64_t own = 0;
  agree(group, [&] {
    StateFile file(path);
    contents = read_header(file, expected);
    own = read_pieces(file, expected, pieces, read);
  });
  const auto checksums = gather_values(group, own);
  WEFT_CHECK(
      (Context{group.rank(), group.num_ranks()}),
      std::reduce(checksums.begin(), checksums.end()) == contents.data_checksum,
      ErrorCode::kFile,
      "resume: {}: the parameters are damaged (their checksum differs)",
      path
  );
  for (size_t i = 0; i < read.size(); ++i) {
    std::ranges::copy(read[i], pieces[i / kNumParts].parts[i % kNumParts].begin());
  }
  return contents.steps_done;
}

}  // namespace weft::moe
