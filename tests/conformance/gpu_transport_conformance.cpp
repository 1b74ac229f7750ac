// SPDX-License-Identifier: Apache-2.0
// Requirements of every GPU transport: device memory that ranks share, as threads and as processes,
// on one GPU and on several. Each name of the registry is a case, skipped where its machine does
// not allow it. CUDA does not survive fork, so everything that touches it runs in forked processes,
// also where ranks are threads.
#include <gtest/gtest.h>

#include <algorithm>
#include <csignal>
#include <cstring>
#include <functional>
#include <iostream>
#include <map>
#include <span>
#include <thread>

#include "conformance/peer_patterns_cuda.hpp"
#include "core/gpu/check.hpp"
#include "core/gpu/devices.hpp"
#include "core/gpu/stream.hpp"
#include "cuda/transport/peer_memory.hpp"
#include "support/errors.hpp"

namespace weft::test {
namespace {

using namespace std::chrono_literals;

constexpr auto kBound = 10s;
constexpr uint64_t kStep = uint64_t{2} << 20;
constexpr uint32_t kNumWords = 4096;  // of a writer in a region
constexpr int kNumRanks = 3;
constexpr int kCountBase = 100;  // statuses below it are those of failures
constexpr int kMostAnswer = 155;
constexpr uint64_t kLargeBytes = uint64_t{1} << 30;  // stands out from what else comes and goes

enum class Launch : uint8_t { kThreads, kProcesses };

struct GpuCase {
  std::string transport;
  Launch launch = Launch::kThreads;
  bool has_all_gpus = false;
};

std::string case_name(const testing::TestParamInfo<GpuCase>& info) {
  return info.param.transport +
         (info.param.launch == Launch::kThreads ? "_threads" : "_processes") +
         (info.param.has_all_gpus ? "_all_gpus" : "_one_gpu");
}

std::ostream& operator<<(std::ostream& out, const GpuCase& value) {
  return out << value.transport;
}

// Returns the answer of `question` in a process of its own, 0 to kMostAnswer.
int ask(const std::function<int()>& question) {
  return run_forked(1, [&](Group& /*group*/) { return kCountBase + question(); }).front() -
         kCountBase;
}

int count_gpus() {
  static const int num_gpus = ask([] { return static_cast<int>(list_gpus().gpus.size()); });
  return num_gpus;
}

bool is_allowed(const std::string& transport) {
  static std::map<std::string, bool> answers;
  if (!answers.contains(transport)) {
    answers[transport] = ask([&] {
                           const std::string obstacle = gpu_transport_obstacle(transport, 0);
                           std::cerr << obstacle << (obstacle.empty() ? "" : "\n");
                           return obstacle.empty() ? 1 : 0;
                         }) == 1;
  }
  return answers[transport];
}

uint64_t free_bytes() {
  size_t free = 0;
  size_t all = 0;
  WEFT_CUDA(Context{}, cudaMemGetInfo(&free, &all));
  return free;
}

// Returns the free memory of GPU 0 in GiB, at most kMostAnswer.
int free_gib() {
  return ask([] {
    return static_cast<int>(std::min<uint64_t>(free_bytes() / kLargeBytes, kMostAnswer));
  });
}

bool comes_to(const PeerMemory& memory, int rank, PeerState wanted) {
  const auto deadline = std::chrono::steady_clock::now() + kBound;
  while (memory.peer_state(rank) != wanted && std::chrono::steady_clock::now() < deadline) {
    std::this_thread::sleep_for(1ms);
  }
  return memory.peer_state(rank) == wanted;
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
        .new_table = memory.new_table(),
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

class GpuTransportConformance : public testing::TestWithParam<GpuCase> {
 protected:
  using Body = std::function<void(Group& group, int device)>;

  void SetUp() override {
    const int least = GetParam().has_all_gpus ? 2 : 1;
    if (count_gpus() < least) {
      GTEST_SKIP() << count_gpus() << " GPUs (at least " << least << ")";
    }
    if (!is_allowed(GetParam().transport)) {
      GTEST_SKIP() << GetParam().transport << " is not allowed here (the reason is above)";
    }
  }

  [[nodiscard]] static bool are_threads() { return GetParam().launch == Launch::kThreads; }
  [[nodiscard]] static int num_gpus() { return GetParam().has_all_gpus ? count_gpus() : 1; }
  [[nodiscard]] static int num_ranks() {
    return GetParam().has_all_gpus ? std::min(num_gpus(), 8) : kNumRanks;
  }

  static void run(int num_ranks, const Body& body) {
    const auto on_rank = [&](Group& group) { body(group, group.rank() % num_gpus()); };
    const auto statuses = run_forked(are_threads() ? 1 : num_ranks, [&](Group& group) {
      if (are_threads()) {
        run_threads(num_ranks, on_rank);
      } else {
        on_rank(group);
      }
      return HasFailure() ? 1 : 0;
    });
    EXPECT_EQ(statuses, std::vector<int>(statuses.size(), 0));
  }

  [[nodiscard]] static PeerMemory memory_of(const Group& group, int device) {
    return {group, device, 4096, GetParam().transport};
  }
};

TEST_P(GpuTransportConformance, StartsAfreshInTheSameProcesses) {
  run(2, [](Group& group, int device) {
    for (int i = 0; i < 3; ++i) {
      const PeerMemory memory = memory_of(group, device);
      expect_zero(memory.control());
      group.barrier();
      EXPECT_TRUE(memory.is_reachable(memory.control()));
      expect_shared(group, memory, 0);
    }
  });
}

TEST_P(GpuTransportConformance, SharesAndGrows) {
  const auto body = [](Group& group, int device) {
    PeerMemory memory = memory_of(group, device);
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
  };
  run(num_ranks(), body);
  run(1, body);
}

TEST_P(GpuTransportConformance, LetsRanksLeave) {
  run(num_ranks(), [](Group& group, int device) {
    PeerMemory memory = memory_of(group, device);
    const int last = group.num_ranks() - 1;
    group.barrier();
    if (group.rank() == last) {
      memory.close();
      memory.close();
    } else {
      EXPECT_TRUE(comes_to(memory, last, PeerState::kLeft));
      EXPECT_TRUE(memory.wait_reachable(memory.allocate(kStep), kBound));
    }
    group.barrier();
  });
}

TEST_P(GpuTransportConformance, GivesMemoryBack) {
  run(num_ranks(), [](Group& group, int device) {
    PeerMemory memory = memory_of(group, device);
    group.barrier();
    const uint64_t before = free_bytes();
    group.barrier();
    for (int round = 0; round < 2; ++round) {
      const PeerRegion region = memory.allocate(kLargeBytes);
      EXPECT_TRUE(memory.wait_reachable(region, kBound));
      group.barrier();
      EXPECT_LT(free_bytes(), before - kLargeBytes / 2);
      group.barrier();
      memory.release(region);
      EXPECT_TRUE(memory.wait_freed(kBound));
      group.barrier();
      EXPECT_GT(free_bytes(), before - kLargeBytes / 2);
      group.barrier();
    }
  });
}

TEST_P(GpuTransportConformance, LeavesNothingBehindWhenARankIsKilled) {
  if (are_threads()) {
    GTEST_SKIP() << "a thread dies with its process";
  }
  const int before = free_gib();
  const int last = num_ranks() - 1;
  const auto statuses = run_forked(num_ranks(), [&](Group& group) {
    PeerMemory memory = memory_of(group, group.rank() % num_gpus());
    const PeerRegion region = memory.allocate(4 * kLargeBytes);
    EXPECT_TRUE(memory.wait_reachable(region, kBound));
    expect_shared(group, memory, region.region);
    if (group.rank() == last) {
      std::raise(SIGKILL);
    }
    EXPECT_TRUE(comes_to(memory, last, PeerState::kDied));
    EXPECT_TRUE(memory.wait_reachable(memory.allocate(kStep), kBound));
    memory.release(region);
    EXPECT_TRUE(memory.wait_freed(kBound));
    return HasFailure() ? 1 : 0;
  });
  std::vector<int> expected(static_cast<size_t>(num_ranks()), 0);
  expected.back() = 128 + SIGKILL;
  EXPECT_EQ(statuses, expected);
  EXPECT_NEAR(free_gib(), before, 1);
}

TEST_P(GpuTransportConformance, FreesOnlyBehindQueuedWork) {
  run(1, [](Group& /*group*/, int device) {
    WEFT_CUDA(Context{}, cudaSetDevice(device));
    const auto transport = make_gpu_transport(
        GetParam().transport,
        {.device = device, .devices = {device}, .is_exported = !are_threads(), .context = {}}
    );
    GpuAllocation memory = transport->allocate(kStep);
    uint32_t* flag = nullptr;
    WEFT_CUDA(Context{}, cudaMallocHost(reinterpret_cast<void**>(&flag), sizeof *flag));
    *flag = 0;
    const GpuStream stream(device);
    spin_on_flag(flag, 200'000'000, stream.get());
    WEFT_CUDA(Context{}, cudaMemsetAsync(memory.data.get(), 1, kStep, stream.get()));
    memory.data.reset();
    EXPECT_EQ(cudaStreamQuery(stream.get()), cudaSuccess);
    WEFT_CUDA(Context{}, cudaFreeHost(flag));
  });
}

// Growth must not need the peer's GPU to be idle: its kernel may be waiting for this rank. The
// kernel runs in a stream of its own, or in the default stream, where PyTorch's usually do.
void grow_beside_a_kernel(Group& group, PeerMemory& memory, int device, bool is_default_stream) {
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
    const PeerRegion region = memory.allocate(kStep);
    EXPECT_TRUE(memory.wait_reachable(region, kBound));
  }
  group.barrier();
  if (group.rank() != 0) {
    EXPECT_EQ(cudaStreamQuery(stream), cudaErrorNotReady) << "growth has waited for the kernel";
    static_cast<void>(cudaGetLastError());
  }
  *reinterpret_cast<volatile uint32_t*>(flag) = 1;
  WEFT_CUDA(Context{}, cudaStreamSynchronize(stream));
  WEFT_CUDA(Context{}, cudaFreeHost(flag));
}

TEST_P(GpuTransportConformance, GrowsBesideARunningKernel) {
  run(2, [](Group& group, int device) {
    PeerMemory memory = memory_of(group, device);
    grow_beside_a_kernel(group, memory, device, false);
  });
}

TEST_P(GpuTransportConformance, GrowsBesideAKernelOfTheDefaultStream) {
  if (are_threads() && !GetParam().has_all_gpus) {
    GTEST_SKIP() << "threads share the default stream of a GPU";
  }
  run(2, [](Group& group, int device) {
    PeerMemory memory = memory_of(group, device);
    grow_beside_a_kernel(group, memory, device, true);
  });
}

TEST_P(GpuTransportConformance, SaysOnEveryRankThatOneHasNoGpu) {
  run(2, [](Group& group, int device) {
    const int wrong = group.rank() == 1 ? 99 : device;
    const auto thrown = thrown_by([&] { const PeerMemory memory = memory_of(group, wrong); });
    ASSERT_TRUE(thrown);
    EXPECT_EQ(thrown->code, ErrorCode::kNotAvailable);
    EXPECT_NE(thrown->text.find("rank 1: there is no GPU 99"), std::string::npos);
  });
}

TEST_P(GpuTransportConformance, SaysOnEveryRankThatOneAsksForAnother) {
  run(2, [](Group& group, int device) {
    const std::string other = GetParam().transport == "ipc" ? "vmm" : "ipc";
    const std::string wanted = group.rank() == 1 ? other : GetParam().transport;
    const auto thrown = thrown_by([&] { const PeerMemory memory(group, device, 4096, wanted); });
    ASSERT_TRUE(thrown);
    EXPECT_EQ(thrown->code, ErrorCode::kInvalidArgument);
    EXPECT_NE(thrown->text.find("rank 1 asks for transport \"" + other), std::string::npos);
  });
}

TEST_P(GpuTransportConformance, CountsTheRanksOfItsGpu) {
  run(2, [](Group& group, int device) {
    EXPECT_EQ(memory_of(group, device).ranks_on_this_gpu(), GetParam().has_all_gpus ? 1 : 2);
  });
}

std::vector<GpuCase> all_cases() {
  std::vector<GpuCase> cases;
  for (const std::string& name : gpu_transport_names()) {
    for (const Launch launch : {Launch::kThreads, Launch::kProcesses}) {
      cases.push_back({name, launch, false});
      cases.push_back({name, launch, true});
    }
  }
  return cases;
}

INSTANTIATE_TEST_SUITE_P(Every, GpuTransportConformance, testing::ValuesIn(all_cases()), case_name);

}  // namespace
}  // namespace weft::test
