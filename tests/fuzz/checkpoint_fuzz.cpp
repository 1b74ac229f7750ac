// SPDX-License-Identifier: Apache-2.0
// Any file is refused as a checkpoint that says why, or is read whole: as it is, and with its
// header's checksum put right, so that what stands behind the checksum is met.
#include <fmt/format.h>

#include <string>
#include <sys/mman.h>
#include <unistd.h>
#include <vector>

#include "core/descriptor.hpp"
#include "fuzz/fuzz_input.hpp"
#include "train/checkpoint.hpp"
#include "weft/error.hpp"

namespace {

using weft::fuzz::require;

const weft::Group& alone() {
  static const std::vector<weft::Group> group = weft::Group::local(1);
  return group[0];
}

void read(const std::string& file) {
  const weft::Descriptor memory(::memfd_create("checkpoint", MFD_CLOEXEC));
  require(
      ::write(memory.get(), file.data(), file.size()) == static_cast<ssize_t>(file.size()), "a file"
  );
  const std::string path = fmt::format("/proc/self/fd/{}", memory.get());
  std::vector<float> state(3, 1.0F);
  const weft::moe::StatePiece piece = {
      .parts = {
          std::span(state).subspan(0, 1),
          std::span(state).subspan(1, 1),
          std::span(state).subspan(2, 1)}};
  weft::moe::CheckpointHeader expected;
  expected.num_elements = 1;
  try {
    const int64_t steps = weft::moe::read_checkpoint(alone(), path, expected, {&piece, 1});
    require(steps >= 0, "steps are counted from 0");
  } catch (const weft::Error& error) {
    require(error.code() == weft::ErrorCode::kFile, "a bad file is the file's error");
    require(state == std::vector<float>(3, 1.0F), "a bad file changes nothing");
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string bytes(reinterpret_cast<const char*>(data), size);
  read(bytes);
  std::string text = bytes.substr(0, weft::moe::kHeaderBytes / 2);
  text.resize(text.find('\0') == std::string::npos ? text.size() : text.find('\0'));
  const uint64_t sum = weft::moe::checksum(std::as_bytes(std::span(text)));
  std::string file = fmt::format("weft-moe-checkpoint 1 {:016x}\n{}", sum, text);
  file.resize(weft::moe::kHeaderBytes + 3 * sizeof(float), '\0');
  read(file);
  return 0;
}
