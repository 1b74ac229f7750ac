// SPDX-License-Identifier: Apache-2.0
#include "moe/checkpoint.hpp"

#include <algorithm>
#include <bit>
#include <cstdio>
#include <cstring>
#include <numeric>

#include "core/check.hpp"
#include "moe/checkpoint_header.hpp"
#include "moe/random.hpp"
#include "moe/state_file.hpp"
#include "moe/together.hpp"

namespace weft::moe {
namespace {

constexpr uint64_t kElementBytes = sizeof(float);
constexpr size_t kNumParts = 3;

uint64_t element_number(const CheckpointHeader& header, size_t part, uint64_t model_begin) {
  return part * header.num_elements + model_begin;
}

uint64_t file_offset(uint64_t element) {
  return kHeaderBytes + element * kElementBytes;
}

uint64_t sum(const std::vector<uint64_t>& parts) {
  return std::reduce(parts.begin(), parts.end());
}

// Both return the checksum of the pieces.
uint64_t write_pieces(
    const std::string& path, const CheckpointHeader& header, std::span<const StatePiece> pieces
) {
  StateFile file(path, StateFile::Mode::kWrite);
  uint64_t own = 0;
  for (const StatePiece& piece : pieces) {
    for (size_t part = 0; part < kNumParts; ++part) {
      const uint64_t first = element_number(header, part, piece.model_begin);
      own += checksum(piece.parts[part], first);
      file.write_at(file_offset(first), std::as_bytes(piece.parts[part]));
    }
  }
  file.sync();
  return own;
}

uint64_t read_pieces(
    const StateFile& file,
    const CheckpointHeader& header,
    std::span<const StatePiece> pieces,
    std::vector<std::vector<float>>& read
) {
  uint64_t own = 0;
  for (const StatePiece& piece : pieces) {
    for (size_t part = 0; part < kNumParts; ++part) {
      const uint64_t first = element_number(header, part, piece.model_begin);
      auto& elements = read.emplace_back(piece.parts[part].size());
      file.read_at(file_offset(first), std::as_writable_bytes(std::span(elements)));
      own += checksum(elements, first);
    }
  }
  return own;
}

HeaderContents read_header(
    const StateFile& file, const CheckpointHeader& expected, const std::string& path
) {
  HeaderBytes bytes = {};
  const uint64_t size = file.size();
  file.read_at(0, std::span(bytes).first(std::min<uint64_t>(size, bytes.size())));
  const HeaderContents contents = decode_header(bytes, expected, path);
  const uint64_t whole = file_offset(kNumParts * expected.num_elements);
  WEFT_CHECK(
      Context{},
      size == whole,
      ErrorCode::kFile,
      "resume: {} holds {} B (a checkpoint of this model holds {} B)",
      path,
      size,
      whole
  );
  return contents;
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
  const std::string unfinished = path + ".unfinished";
  try {
    together(group, [&] {
      if (group.rank() == 0) {
        const StateFile create(unfinished, StateFile::Mode::kCreate);
      }
      return uint64_t{0};
    });
    const auto checksums =
        together(group, [&] { return write_pieces(unfinished, header, pieces); });
    together(group, [&] {
      if (group.rank() == 0) {
        StateFile file(unfinished, StateFile::Mode::kWrite);
        file.write_at(0, encode_header(header, sum(checksums)));
        file.sync();
        replace_file(unfinished, path);
      }
      return uint64_t{0};
    });
  } catch (const Error&) {
    if (group.rank() == 0) {
      std::remove(unfinished.c_str());
    }
    throw;
  }
}

int64_t read_checkpoint(
    const Group& group,
    const std::string& path,
    const CheckpointHeader& expected,
    std::span<const StatePiece> pieces
) {
  HeaderContents contents;
  std::vector<std::vector<float>> read;
  const auto checksums = together(group, [&] {
    const StateFile file(path, StateFile::Mode::kRead);
    contents = read_header(file, expected, path);
    return read_pieces(file, expected, pieces, read);
  });
  WEFT_CHECK(
      (Context{group.rank(), group.num_ranks()}),
      sum(checksums) == contents.data_checksum,
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
