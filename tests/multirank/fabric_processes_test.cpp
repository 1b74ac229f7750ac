// SPDX-License-Identifier: Apache-2.0
// Ranks as processes over libfabric: the bits of the reference, several queues, domains that share
// nothing, and a peer that is killed or stopped.
#include <gtest/gtest.h>

#include <atomic>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <iostream>
#include <sys/mman.h>
#include <thread>
#include <unistd.h>

#include "multirank/worlds.hpp"
#include "support/errors.hpp"
#include "support/run_case.hpp"

namespace weft::test {
namespace {

// Set for one test; the ranks inherit it.
class ScopedVariable {
 public:
  ScopedVariable(const char* name, const char* value) : name_(name) { ::setenv(name, value, 1); }
  ~ScopedVariable() { ::unsetenv(name_); }
  ScopedVariable(const ScopedVariable&) = delete;
  ScopedVariable& operator=(const ScopedVariable&) = delete;

 private:
  const char* name_;
};

class FabricProcessesTest : public testing::TestWithParam<const char*> {
 protected:
  void SetUp() override {
    setup_.transport = GetParam();
    setup_.num_threads = 2;
    if (const std::string reason = obstacle(setup_.transport); !reason.empty()) {
      GTEST_SKIP() << reason;
    }
  }

  void expect_reference_bits(int num_ranks) {
    setup_.num_ranks = num_ranks;
    setup_.num_experts = 3 * num_ranks;
    std::vector<CaseData> cases;
    for (uint64_t seed = 600; seed < 604; ++seed) {
      Case spec = random_case(setup_, seed);
      spec.is_late = seed % 4 == 0;
      cases.push_back(make_case_data(setup_, spec));
    }
    const std::vector<int> all_well(static_cast<size_t>(num_ranks), 0);
    EXPECT_EQ(run_cases_on_processes(cases), all_well);
  }

  // Three ranks with tokens.
  [[nodiscard]] CaseData make_data() {
    setup_.num_ranks = 3;
    setup_.num_experts = 6;
    Case spec;
    spec.num_tokens = {60, 32, 64};
    return make_case_data(setup_, spec);
  }

  ExchangeSetup setup_;
};

// 0 if rank 1 is named in an error of this code; else prints what is said.
int verdict(int rank, const std::optional<Thrown>& thrown, ErrorCode code, const char* text) {
  if (thrown && thrown->code == code && thrown->text.find(text) != std::string::npos) {
    return 0;
  }
  std::cerr << "rank " << rank << ": " << text_of(thrown) << "\n";
  return 1;
}

TEST_P(FabricProcessesTest, GiveTheBitsOfTheReference) {
  for (const int num_ranks : {1, 2, 4}) {
    expect_reference_bits(num_ranks);
  }
}

TEST_P(FabricProcessesTest, GiveTheSameBitsOverSeveralQueues) {
  const ScopedVariable queues("WEFT_FABRIC_QUEUES", "3");
  expect_reference_bits(3);
}

TEST_P(FabricProcessesTest, ReachOtherDomains) {
  const ScopedVariable domains("WEFT_RANKS_PER_DOMAIN", "2");
  setup_.domain_of = {0, 0, 1, 1};
  expect_reference_bits(4);
}

TEST_P(FabricProcessesTest, NameAPeerThatIsKilled) {
  const CaseData data = make_data();
  const auto statuses = run_forked(3, [&](Group& group) {
    Exchange exchange(group, setup_.config());
    static_cast<void>(run_cases(exchange, {&data, 1}));
    group.barrier();
    if (group.rank() == 1) {
      ::kill(::getpid(), SIGKILL);
    }
    const auto thrown = thrown_by([&] { static_cast<void>(run_cases(exchange, {&data, 1})); });
    return verdict(group.rank(), thrown, ErrorCode::kPeerFailed, "rank 1 died");
  });
  EXPECT_EQ(statuses, (std::vector<int>{0, 128 + SIGKILL, 0}));
}

TEST_P(FabricProcessesTest, NameAPeerThatIsStopped) {
  const CaseData data = make_data();
  void* shared = ::mmap(nullptr, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  auto* num_done = new (shared) std::atomic<int>(0);  // ranks that have had their error
  const auto statuses = run_forked(3, [&](Group& group) {
    setup_.timeout = std::chrono::milliseconds(1000);
    Exchange exchange(group, setup_.config());
    const pid_t own = ::getpid();
    const auto pids = group.all_gather(std::as_bytes(std::span(&own, 1)));
    if (group.rank() == 1) {
      std::raise(SIGSTOP);
    }
    const auto thrown = thrown_by([&] { static_cast<void>(run_cases(exchange, {&data, 1})); });
    ++*num_done;
    while (group.rank() == 0 && *num_done < 2) {  // else who leaves first is named
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    if (group.rank() == 0) {
      pid_t stopped = 0;
      std::memcpy(&stopped, pids[1].data(), sizeof stopped);
      ::kill(stopped, SIGKILL);
    }
    // It sends nothing, or, where connections are still to be made, takes nothing.
    return verdict(group.rank(), thrown, ErrorCode::kTimeout, "rank 1 ");
  });
  EXPECT_EQ(statuses, (std::vector<int>{0, 128 + SIGKILL, 0}));
  ::munmap(shared, 4096);
}

INSTANTIATE_TEST_SUITE_P(
    All,
    FabricProcessesTest,
    testing::Values("ofi:tcp", "ofi:shm"),
    [](const testing::TestParamInfo<const char*>& param) {
      return std::string(param.param).substr(4);
    }
);

}  // namespace
}  // namespace weft::test
