// SPDX-License-Identifier: Apache-2.0
// The first thing that a program does: standard input, output and error are open.
#pragma once

#include <fcntl.h>
#include <unistd.h>

namespace weft::program {

// Opens /dev/null in place of standard streams that are closed: a file that is opened later would
// get such a number, and the text of a table.
inline void open_standard_streams() {
  int opened = 0;
  while (opened >= 0 && opened <= STDERR_FILENO) {
    opened = ::open("/dev/null", O_RDWR);
  }
  ::close(opened);
}

}  // namespace weft::program
