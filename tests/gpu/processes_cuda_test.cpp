// SPDX-License-Identifier: Apache-2.0
// Ranks as processes: CUDA is touched in forked children alone.
#include <gtest/gtest.h>

#include <csignal>
#include <unistd.h>

#include "core/gpu_probe.hpp"
#include "gpu/gpu_test.hpp"
#include "support/errors.hpp"
#include "support/run_case.hpp"

namespace weft::test {
namespace {

using namespace std::chrono_literals;

class GpuProcessesTest : public testing::Test {
 protected:
  void SetUp() override {
    set_many_connections();
    const GpuList list = probe_gpus();
    if (list.gpus.empty()) {
      GTEST_SKIP() << "no GPU: " << list.none_reason;
    }
    num_gpus_ = static_cast<int>(list.gpus.size());
  }

  static void expect_reference_bits(int num_ranks, int num_gpus, uint64_t num_cases) {
    ExchangeSetup setup = gpu_setup(num_ranks, num_gpus);
    setup.timeout = 20s;
    std::vector<CaseData> cases;
    for (uint64_t seed = 500; seed < 500 + num_cases; ++seed) {
      cases.push_back(make_case_data(setup, random_case(setup, seed)));
    }
    const std::vector<int> all_well(static_cast<size_t>(num_ranks), 0);
    EXPECT_EQ(run_cases_on_processes(cases), all_well);
  }

  // Rank 1 is killed after a good call; rank 0 hears of it in the next.
  void expect_death_is_heard(std::vector<int> domain_of) const {
    ExchangeSetup setup = gpu_setup(2, num_gpus_);
    setup.domain_of = std::move(domain_of);
    setup.transport = "shm";
    setup.timeout = 3s;
    Case spec;
    spec.num_tokens = {20, 30};
    const CaseData data = make_case_data(setup, spec);
    const std::vector<int> statuses = run_forked(2, [&](const Group& group) {
      Exchange exchange = make_exchange(group, setup);
      if (!run_cases(exchange, {&data, 1}).empty()) {
        return 2;
      }
      if (group.rank() == 1) {
        static_cast<void>(::kill(::getpid(), SIGKILL));
      }
      const auto thrown = thrown_by([&] { static_cast<void>(run_cases(exchange, {&data, 1})); });
      const std::string text = text_of(thrown);
      if (!thrown || !thrown->is_peer_error || text.find("rank 1 ") == std::string::npos) {
        static_cast<void>(std::fprintf(stderr, "rank 0 heard: %s\n", text.c_str()));
        return 3;
      }
      return 0;
    });
    EXPECT_EQ(statuses, (std::vector<int>{0, 128 + SIGKILL}));
  }

  int num_gpus_ = 0;
};

TEST_F(GpuProcessesTest, ShareOneGpu) {
  expect_reference_bits(2, 1, 3);  // few: they wait for each other's time slices
}

TEST_F(GpuProcessesTest, HaveAGpuEach) {
  if (num_gpus_ < 2) {
    GTEST_SKIP() << "one GPU only";
  }
  expect_reference_bits(num_gpus_, num_gpus_, 100);  // more than it has memory for plans at first
}

// A domain each: nobody waits for another's time slice, what they say goes over the network.
TEST_F(GpuProcessesTest, ExchangeBetweenDomains) {
  for (const char* transport : {"shm", "ofi:tcp"}) {
    ExchangeSetup setup = gpu_setup(2, num_gpus_);
    setup.timeout = 20s;
    setup.domain_of = {0, 1};
    setup.transport = transport;
    std::vector<CaseData> cases;
    for (uint64_t seed = 600; seed < 606; ++seed) {
      cases.push_back(make_case_data(setup, random_case(setup, seed)));
    }
    EXPECT_EQ(run_cases_on_processes(cases), (std::vector<int>{0, 0})) << transport;
  }
}

TEST_F(GpuProcessesTest, HearThatARankDied) {
  expect_death_is_heard({});
}

TEST_F(GpuProcessesTest, HearThatARankOfAnotherDomainDied) {
  expect_death_is_heard({0, 1});
}

}  // namespace
}  // namespace weft::test
