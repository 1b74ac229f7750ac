// SPDX-License-Identifier: Apache-2.0
// A file that is read and written in places. Every failure throws Error (kFile) naming the path.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

namespace weft::moe {

class StateFile {
 public:
  enum class Mode : uint8_t {
    kRead,
    kCreate,  // empty, replacing what was there
    kWrite,   // an existing file
  };
  StateFile(std::string path, Mode mode);
  ~StateFile();
  StateFile(const StateFile&) = delete;
  StateFile& operator=(const StateFile&) = delete;

  [[nodiscard]] uint64_t size() const;
  void read_at(uint64_t offset, std::span<std::byte> bytes) const;
  void write_at(uint64_t offset, std::span<const std::byte> bytes);
  void sync();  // to the disk

 private:
  std::string path_;
  int fd_ = -1;
};

// Puts a complete file in the place of another in one move that survives a crash.
void replace_file(const std::string& from, const std::string& to);

}  // namespace weft::moe
