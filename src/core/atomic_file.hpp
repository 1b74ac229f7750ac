// SPDX-License-Identifier: Apache-2.0
// Files that are either the old one or the new one, whole, whenever the process or the machine
// stops: the one way in which Weft makes a file that takes another's place.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "core/descriptor.hpp"

namespace weft {

// The next version of a file, "<path>.unfinished" beside it until commit() gives it the name.
//
// It is created anew and never opened through a link, and its maker holds a lock on it, so no other
// process writes into it; what a crash has left under that name is removed. Where the path is a
// link, the file that it leads to is replaced and the link stays; mode and owner stay, too. Throws
// Error (kFile) naming the path: for what is there and no regular file, and where another process
// is making the same file.
class NextFile {
 public:
  explicit NextFile(const std::string& path);
  // Opens the same file in another process, which writes a part of it; `number` is the maker's.
  NextFile(const std::string& path, uint64_t number);
  NextFile(const NextFile&) = delete;
  NextFile& operator=(const NextFile&) = delete;
  // Removes the unfinished file if its maker has not called commit().
  ~NextFile();

  [[nodiscard]] uint64_t number() const;  // tells it from other files of that name
  void write_at(uint64_t offset, std::span<const std::byte> bytes);
  void flush();  // forces what was written to the disk
  // Gives the file the path's place, once all parts are flushed; only the maker may.
  void commit();

 private:
  [[nodiscard]] bool is_at_its_name() const;

  std::string path_;        // as the caller says it
  std::string target_;      // behind links
  std::string unfinished_;  // beside the target
  Descriptor file_;
  bool is_maker_ = false;
};

// Writes a file as above; a device or a pipe is written to and never replaced. Throws Error (kFile)
// naming the path; then the old file is untouched and nothing is left next to it.
void write_file_atomically(const std::string& path, std::string_view bytes);

// Throws Error (kFile) naming the path, before anything else is done, if a file could not be
// written there later: no folder, no right to write, a folder in its place.
void check_writable(const std::string& path);

// Returns a file's text. Throws Error (kFile) naming the path; also for a device, and for more
// than `most` bytes or a quarter of the memory that is available, whichever is less.
[[nodiscard]] std::string read_whole_file(
    const std::string& path, uint64_t most = uint64_t{1} << 36
);

}  // namespace weft
