// SPDX-License-Identifier: Apache-2.0
#include "group/shared_memory.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <string>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "weft/error.hpp"

namespace weft {
namespace {

// Descriptors and mappings of this process that belong to our memory.
int num_open_descriptors() {
  int count = 0;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
    std::error_code gone;
    const auto target = std::filesystem::read_symlink(entry.path(), gone);
    count += target.string().find("memfd:weft") != std::string::npos ? 1 : 0;
  }
  return count;
}

int num_mappings() {
  std::ifstream maps("/proc/self/maps");
  int count = 0;
  for (std::string line; std::getline(maps, line);) {
    count += line.find("memfd:weft") != std::string::npos ? 1 : 0;
  }
  return count;
}

ErrorCode code_of_open(const SharedMemoryRef& ref) {
  try {
    static_cast<void>(SharedMemory::open(ref));
  } catch (const Error& error) {
    return error.code();
  }
  return ErrorCode::kInternal;
}

}  // namespace

// A process that has mapped it goes on writing, into what no other sees any more.
TEST(SharedMemoryTest, MayBeTakenAwayFromOtherProcesses) {
  constexpr uint64_t kBytes = (uint64_t{2} << 20) + 100;
  const SharedMemory memory = SharedMemory::create(kBytes);
  const SharedMemory elsewhere = SharedMemory::open(memory.ref());
  std::fill_n(elsewhere.data(), kBytes, std::byte{7});
  make_private(memory.data(), kBytes);
  std::fill_n(elsewhere.data(), kBytes, std::byte{9});
  EXPECT_TRUE(std::all_of(memory.data(), memory.data() + kBytes, [](std::byte b) {
    return b == std::byte{7};
  }));
  memory.data()[kBytes - 1] = std::byte{1};
  EXPECT_EQ(elsewhere.data()[kBytes - 1], std::byte{9});
}

TEST(SharedMemoryTest, IsReachedByWayOfWhoHandsItOn) {
  SharedMemory memory = SharedMemory::create(100);
  const SharedMemory second = SharedMemory::open(memory.ref(), true);
  second.data()[99] = std::byte{5};
  memory = {};
  EXPECT_EQ(SharedMemory::open(second.ref()).data()[99], std::byte{5});
}

TEST(SharedMemoryTest, StartsZeroFilled) {
  constexpr uint64_t kBytes = (uint64_t{2} << 20) + 100;  // with a huge-page hint, and not whole
  const SharedMemory memory = SharedMemory::create(kBytes);
  ASSERT_EQ(memory.bytes(), kBytes);
  EXPECT_TRUE(std::all_of(memory.data(), memory.data() + kBytes, [](std::byte b) {
    return b == std::byte{0};
  }));
}

TEST(SharedMemoryTest, ShowsTheSameBytesThroughBothMappings) {
  const SharedMemory memory = SharedMemory::create(8192);
  const SharedMemory view = SharedMemory::open(memory.ref());
  ASSERT_NE(view.data(), memory.data());
  memory.data()[5000] = std::byte{42};
  EXPECT_EQ(view.data()[5000], std::byte{42});
}

TEST(SharedMemoryTest, IsReachedFromAnotherProcess) {
  const SharedMemory memory = SharedMemory::create(4096);
  const SharedMemoryRef ref = memory.ref();
  const pid_t child = ::fork();
  if (child == 0) {
    int status = 1;
    try {
      const SharedMemory view = SharedMemory::open(ref);
      view.data()[17] = std::byte{7};
      status = 0;
    } catch (...) {  // NOLINT(bugprone-empty-catch): the status says it
    }
    ::_exit(status);
  }
  int status = -1;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
  EXPECT_EQ(memory.data()[17], std::byte{7});
}

TEST(SharedMemoryTest, IsClosedToOtherUsers) {
  if (geteuid() != 0) {
    GTEST_SKIP() << "only root can become another user";
  }
  const SharedMemory memory = SharedMemory::create(4096);
  const pid_t child = fork();
  if (child == 0) {
    constexpr uid_t kNobody = 65534;
    if (setresuid(kNobody, kNobody, kNobody) != 0) {
      _exit(1);
    }
    try {
      static_cast<void>(SharedMemory::open(memory.ref()));
      _exit(2);
    } catch (const Error& error) {
      _exit(error.code() == ErrorCode::kNotAvailable ? 0 : 3);
    }
  }
  int status = -1;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
}

TEST(SharedMemoryTest, OutlivesItsCreatorWhileMapped) {
  SharedMemory view;
  {
    const SharedMemory memory = SharedMemory::create(4096);
    memory.data()[0] = std::byte{9};
    view = SharedMemory::open(memory.ref());
  }
  EXPECT_EQ(view.data()[0], std::byte{9});
}

TEST(SharedMemoryTest, LeavesNothingBehind) {
  const int descriptors = num_open_descriptors();
  const int mappings = num_mappings();
  for (int i = 0; i < 10; ++i) {
    SharedMemory memory = SharedMemory::create(4096);
    SharedMemory view = SharedMemory::open(memory.ref());
    view = std::move(memory);  // the old view goes, the memory stays
    EXPECT_EQ(num_open_descriptors(), descriptors + 1);
  }
  EXPECT_EQ(num_open_descriptors(), descriptors);
  EXPECT_EQ(num_mappings(), mappings);
}

TEST(SharedMemoryTest, RefusesMemoryThatIsGone) {
  SharedMemoryRef ref;
  {
    const SharedMemory memory = SharedMemory::create(4096);
    ref = memory.ref();
  }
  EXPECT_EQ(code_of_open(ref), ErrorCode::kNotAvailable);
  const SharedMemory other = SharedMemory::create(4096);  // takes the free descriptor
  ref.fd = other.ref().fd;
  EXPECT_EQ(code_of_open(ref), ErrorCode::kNotAvailable);
}

TEST(SharedMemoryTest, RefusesFilesThatAreNoneOfIt) {
  constexpr uint64_t kBytes = 4096;
  const auto expect_refused = [](int fd) {
    ASSERT_GE(fd, 0);
    const Descriptor file(fd);
    ASSERT_EQ(::ftruncate(fd, kBytes), 0);
    struct stat info = {};
    ASSERT_EQ(::fstat(fd, &info), 0);
    EXPECT_EQ(
        code_of_open({.bytes = kBytes, .inode = info.st_ino, .pid = ::getpid(), .fd = fd}),
        ErrorCode::kNotAvailable
    );
  };
  char path[] = "/tmp/memfd:weftXXXXXX";
  expect_refused(::mkstemp(path));
  ::unlink(path);
  expect_refused(::memfd_create("other", 0));
  expect_refused(::memfd_create("weft", MFD_ALLOW_SEALING));  // whose size may change
}

TEST(SharedMemoryTest, RefusesAnotherSizeOrProcess) {
  const SharedMemory memory = SharedMemory::create(4096);
  SharedMemoryRef ref = memory.ref();
  ref.bytes = 8192;
  EXPECT_EQ(code_of_open(ref), ErrorCode::kNotAvailable);
  ref = memory.ref();
  ref.pid = 0x3fffffff;  // above any pid
  EXPECT_EQ(code_of_open(ref), ErrorCode::kNotAvailable);
}

TEST(SharedMemoryTest, SaysThatMemoryIsShort) {
  for (const uint64_t bytes : {uint64_t{1} << 45, uint64_t{1} << 62, UINT64_MAX}) {
    try {
      static_cast<void>(SharedMemory::create(bytes));
      ADD_FAILURE() << bytes << " B were created";
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kOutOfMemory);
      const auto expected =
          "allocate: no room for " + std::to_string(bytes) + " B of shared memory";
      EXPECT_EQ(std::string(error.what()).rfind(expected, 0), 0U) << error.what();
    }
  }
}

TEST(SharedMemoryTest, RefusesZeroBytes) {
  EXPECT_THROW(static_cast<void>(SharedMemory::create(0)), Error);
}

}  // namespace weft
