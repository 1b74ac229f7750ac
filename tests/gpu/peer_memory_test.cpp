// SPDX-License-Identifier: Apache-2.0
// GPU memory that ranks share, as threads and as processes, on one GPU and on several. CUDA does
// not survive fork, so everything that touches it runs in forked processes, also where ranks are
// threads.
#include "transport/peer/peer_memory.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <functional>
#include <thread>

#include "core/check_cuda.hpp"
#include "core/stream_cuda.hpp"
#include "gpu/peer_patterns_cuda.hpp"
#include "support/errors.hpp"

namespace weft::test {
namespace {

using namespace std::chrono_literals;

constexpr auto kBound = 10s;
constexpr uint64_t kStep = uint64_t{2} << 20;
constexpr uint32_t kNumWords = 4096;  // of a writer in a region
constexpr int kNumRanks = 3;
constexpr int kCountBase = 100;

using Body = std::function<void(Group& group, int device)>;

int count_gpus() {
  static const int num_gpus = run_forked(
                                  1,
                                  [](Group& /*group*/) {
                                    int count = 0;
                                    const bool is_known = cudaGetDeviceCount(&count) == cudaSuccess;
                                    return kCountBase + (is_known ? count : 0);
                                  }
                              ).front() -
                              kCountBase;
  return num_gpus;
}

int verdict() {
  return testing::Test::HasFailure() ? 1 : 0;
}

void run_as_processes(int num_ranks, int num_gpus, const Body& body) {
  const auto statuses = run_forked(num_ranks, [&](Group& group) {
    body(group, group.rank() % num_gpus);
    return verdict();
  });
  EXPECT_EQ(statuses, std::vector<int>(static_cast<size_t>(num_ranks), 0));
}

void run_as_threads(int num_ranks, int num_gpus, const Body& body) {
  const auto statuses = run_forked(1, [&](Group& /*alone*/) {
    run_threads(num_ranks, [&](Group& group) { body(group, group.rank() % num_gpus); });
    return verdict();
  });
  EXPECT_EQ(statuses, (std::vector<int>{0}));
}

std::vector<uint32_t> gather_regions(const Group& group, uint32_t region) {
  std::vector<uint32_t> regions;
  for (const Bytes& block : group.all_gather(std::as_bytes(std::span(&region, 1)))) {
    std::memcpy(&regions.emplace_back(), block.data(), sizeof region);
  }
  return regions;
}

// Writes to all, then reads all; every rank keeps a place of its own in each region.
void expect_shared(Group& group, const PeerMemory& memory, uint32_t own_region) {
  const int num_ranks = group.num_ranks();
  const std::vector<uint32_t> regions = gather_regions(group, own_region);
  const auto place = [&](int owner, int writer) {
    return PatternPlace{
        .table = memory.table(),
        .owner = owner,
        .region = regions[static_cast<size_t>(owner)],
        .offset = static_cast<uint64_t>(writer) * kNumWords * sizeof(uint32_t),
        .num_words = kNumWords};
  };
  uint32_t* num_wrong = nullptr;
  WEFT_CUDA(Context{}, cudaMalloc(reinterpret_cast<void**>(&num_wrong), sizeof *num_wrong));
  WEFT_CUDA(Context{}, cudaMemset(num_wrong, 0, sizeof *num_wrong));
  for (int owner = 0; owner < num_ranks; ++owner) {
    write_pattern(place(owner, group.rank()), group.rank(), nullptr);
  }
  WEFT_CUDA(Context{}, cudaDeviceSynchronize());
  group.barrier();
  for (int owner = 0; owner < num_ranks; ++owner) {
    for (int writer = 0; writer < num_ranks; ++writer) {
      check_pattern(place(owner, writer), writer, num_wrong, nullptr);
    }
  }
  uint32_t seen = 1;
  WEFT_CUDA(Context{}, cudaMemcpy(&seen, num_wrong, sizeof seen, cudaMemcpyDeviceToHost));
  EXPECT_EQ(seen, 0U) << "rank " << group.rank();
  WEFT_CUDA(Context{}, cudaFree(num_wrong));
  group.barrier();
}

void expect_zero(const PeerRegion& region) {
  std::vector<uint8_t> bytes(region.bytes, 1);
  WEFT_CUDA(Context{}, cudaMemcpy(bytes.data(), region.data, bytes.size(), cudaMemcpyDeviceToHost));
  EXPECT_EQ(std::ranges::count(bytes, 0), static_cast<int64_t>(bytes.size()));
}

// --- what ranks do ---

void share_and_grow(Group& group, int device) {
  PeerMemory memory(group, device, 4096);
  expect_zero(memory.control());
  group.barrier();
  EXPECT_TRUE(memory.is_reachable(memory.control()));
  expect_shared(group, memory, 0);
  const PeerRegion first = memory.allocate(kStep + 1);
  EXPECT_EQ(first.bytes, 2 * kStep);
  expect_zero(first);
  EXPECT_TRUE(memory.wait_reachable(first, kBound));
  expect_shared(group, memory, first.region);
  std::vector<PeerRegion> regions;
  for (int i = 0; i < 20; ++i) {
    regions.push_back(memory.allocate(kStep));
  }
  for (const PeerRegion& region : regions) {
    EXPECT_TRUE(memory.wait_reachable(region, kBound));
    EXPECT_EQ(memory.find(region.data + 5, 7)->region, region.region);
    expect_shared(group, memory, region.region);
  }
  for (const PeerRegion& region : regions) {
    memory.release(region);
  }
  for (uint32_t i = 0; i < kMaxPeerRegions; ++i) {  // only with reuse are there so many
    memory.release(memory.allocate(kStep));
  }
  const PeerRegion last = memory.allocate(kStep);
  expect_zero(last);
  EXPECT_TRUE(memory.wait_reachable(last, kBound));
  expect_shared(group, memory, last.region);
  expect_shared(group, memory, first.region);
}

void leave(Group& group, int device) {
  PeerMemory memory(group, device, 4096);
  const int last = group.num_ranks() - 1;
  group.barrier();
  if (group.rank() == last) {
    memory.close();
    memory.close();
  } else {
    const auto deadline = std::chrono::steady_clock::now() + kBound;
    while (memory.peer_state(last) != PeerState::kLeft &&
           std::chrono::steady_clock::now() < deadline) {
      std::this_thread::sleep_for(1ms);
    }
    EXPECT_EQ(memory.peer_state(last), PeerState::kLeft);
    EXPECT_TRUE(memory.wait_reachable(memory.allocate(kStep), kBound));
  }
  group.barrier();
}

// Growth must not need the peer's GPU to be idle: its kernel may be waiting for this rank. The
// kernel runs in a stream of its own, or in the default stream, where PyTorch's usually do.
void grow_beside_a_kernel(Group& group, int device, bool is_default_stream) {
  PeerMemory memory(group, device, 4096);
  uint32_t* flag = nullptr;
  WEFT_CUDA(Context{}, cudaMallocHost(reinterpret_cast<void**>(&flag), sizeof *flag));
  *reinterpret_cast<volatile uint32_t*>(flag) = 0;
  spin_on_flag(flag, 1, nullptr);  // loads the kernel
  WEFT_CUDA(Context{}, cudaDeviceSynchronize());
  const GpuStream own(device);
  const cudaStream_t stream = is_default_stream ? cudaStreamLegacy : own.get();
  group.barrier();
  if (group.rank() != 0) {
    spin_on_flag(flag, 6'000'000'000, stream);
  }
  group.barrier();
  if (group.rank() == 0) {
    const auto begin = std::chrono::steady_clock::now();
    const PeerRegion region = memory.allocate(kStep);
    EXPECT_TRUE(memory.wait_reachable(region, kBound));
    EXPECT_LT(std::chrono::steady_clock::now() - begin, 3s);
  } else {
    EXPECT_EQ(cudaStreamQuery(stream), cudaErrorNotReady);
    static_cast<void>(cudaGetLastError());
  }
  group.barrier();
  *reinterpret_cast<volatile uint32_t*>(flag) = 1;
  WEFT_CUDA(Context{}, cudaStreamSynchronize(stream));
  WEFT_CUDA(Context{}, cudaFreeHost(flag));
}

void grow_beside_a_running_kernel(Group& group, int device) {
  grow_beside_a_kernel(group, device, false);
}

void grow_beside_a_kernel_of_the_default_stream(Group& group, int device) {
  grow_beside_a_kernel(group, device, true);
}

void miss_a_gpu(Group& group, int device) {
  EXPECT_EQ(PeerMemory::obstacle(group, device), "");
  const int wrong = group.rank() == 1 ? 99 : device;
  EXPECT_NE(
      PeerMemory::obstacle(group, wrong).find("rank 1: there is no GPU 99"), std::string::npos
  );
  const auto thrown = thrown_by([&] { const PeerMemory memory(group, wrong, 4096); });
  ASSERT_TRUE(thrown);
  EXPECT_EQ(thrown->code, ErrorCode::kNotAvailable);
}

void say_how(Group& group, int device, std::string_view others, int on_this_gpu) {
  const PeerMemory memory(group, device, 4096);
  for (int rank = 0; rank < group.num_ranks(); ++rank) {
    const std::string_view how = memory.how(rank);
    EXPECT_EQ(how, rank == group.rank() ? "same process" : others);
  }
  EXPECT_EQ(memory.ranks_on_this_gpu(), on_this_gpu);
}

// --- where they do it ---

class PeerMemoryTest : public testing::Test {
 protected:
  void SetUp() override {
    if (count_gpus() == 0) {
      GTEST_SKIP() << "no GPU";
    }
  }
};

class PeerMemoryOnSeveralGpusTest : public testing::Test {
 protected:
  void SetUp() override {
    if (count_gpus() < 2) {
      GTEST_SKIP() << count_gpus() << " GPUs (at least 2)";
    }
  }
};

TEST_F(PeerMemoryTest, JoinsThreads) {
  run_as_threads(kNumRanks, 1, share_and_grow);
}

TEST_F(PeerMemoryTest, JoinsProcesses) {
  run_as_processes(kNumRanks, 1, share_and_grow);
}

TEST_F(PeerMemoryTest, ServesOneRank) {
  run_as_processes(1, 1, share_and_grow);
}

TEST_F(PeerMemoryTest, LetsThreadsLeave) {
  run_as_threads(kNumRanks, 1, leave);
}

TEST_F(PeerMemoryTest, LetsProcessesLeave) {
  run_as_processes(kNumRanks, 1, leave);
}

TEST_F(PeerMemoryTest, GrowsBesideARunningKernelOfAThread) {
  run_as_threads(2, 1, grow_beside_a_running_kernel);
}

TEST_F(PeerMemoryTest, GrowsBesideARunningKernelOfAProcess) {
  run_as_processes(2, 1, grow_beside_a_running_kernel);
}

TEST_F(PeerMemoryTest, GrowsBesideAKernelOfTheDefaultStream) {
  run_as_processes(2, 1, grow_beside_a_kernel_of_the_default_stream);
}

TEST_F(PeerMemoryTest, SaysOnEveryRankThatOneHasNoGpu) {
  run_as_threads(2, 1, miss_a_gpu);
  run_as_processes(2, 1, miss_a_gpu);
}

TEST_F(PeerMemoryTest, SaysHowRanksAreReached) {
  run_as_threads(2, 1, [](Group& group, int device) { say_how(group, device, "same process", 2); });
  run_as_processes(2, 1, [](Group& group, int device) { say_how(group, device, "ipc", 2); });
}

TEST_F(PeerMemoryTest, StartsAfreshInTheSameProcesses) {
  run_as_processes(2, 1, [](Group& group, int device) {
    for (int i = 0; i < 3; ++i) {
      PeerMemory memory(group, device, 4096);
      expect_shared(group, memory, 0);
    }
  });
}

TEST_F(PeerMemoryOnSeveralGpusTest, JoinsThreads) {
  run_as_threads(std::min(count_gpus(), 8), count_gpus(), share_and_grow);
}

TEST_F(PeerMemoryOnSeveralGpusTest, JoinsProcesses) {
  run_as_processes(std::min(count_gpus(), 8), count_gpus(), share_and_grow);
}

TEST_F(PeerMemoryOnSeveralGpusTest, GrowsBesideRunningKernels) {
  run_as_threads(2, 2, grow_beside_a_running_kernel);
  run_as_processes(2, 2, grow_beside_a_running_kernel);
}

TEST_F(PeerMemoryOnSeveralGpusTest, GrowsBesideKernelsOfTheDefaultStream) {
  run_as_processes(2, 2, grow_beside_a_kernel_of_the_default_stream);
}

TEST_F(PeerMemoryOnSeveralGpusTest, SaysHowRanksAreReached) {
  run_as_threads(2, 2, [](Group& group, int device) { say_how(group, device, "same process", 1); });
  run_as_processes(2, 2, [](Group& group, int device) { say_how(group, device, "ipc", 1); });
}

}  // namespace
}  // namespace weft::test
