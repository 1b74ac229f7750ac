// SPDX-License-Identifier: Apache-2.0
// Ranks as processes: CUDA is touched in forked children alone.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <cuda_runtime_api.h>

#include <atomic>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <span>
#include <thread>
#include <unistd.h>

#include "core/gpu/check.hpp"
#include "core/gpu/devices.hpp"
#include "gpu/fault_world.hpp"
#include "gpu/gpu_test.hpp"
#include "support/errors.hpp"
#include "support/run_case.hpp"
#include "support/stream.hpp"

namespace weft::test {
namespace {

using namespace std::chrono_literals;

// A stream of the caller's whose work waits for open().
class GatedStream {
 public:
  explicit GatedStream(const Device& device) : stream_(device) {}
  ~GatedStream() { open(); }
  GatedStream(const GatedStream&) = delete;
  GatedStream& operator=(const GatedStream&) = delete;

  void close() {
    const auto wait = [](void* gate) {
      while (!static_cast<std::atomic<bool>*>(gate)->load()) {
        std::this_thread::sleep_for(1ms);
      }
    };
    WEFT_CUDA(
        Context{}, cudaLaunchHostFunc(static_cast<cudaStream_t>(stream_.get()), wait, &is_open_)
    );
  }
  void open() { is_open_.store(true); }
  void wait() const { stream_.wait(); }
  [[nodiscard]] CallOptions call() const { return {.stream = stream_.get()}; }

 private:
  std::atomic<bool> is_open_ = false;
  TestStream stream_;  // whose end waits for its work
};

class GpuProcessesTest : public testing::Test {
 protected:
  void SetUp() override {
    set_many_connections();
    // Another process counts GPUs: one that has used CUDA must not fork ranks that use it.
    const auto count = [](const Group&) { return static_cast<int>(list_gpus().gpus.size()); };
    num_gpus_ = run_forked(1, count)[0];
    if (num_gpus_ == 0) {
      GTEST_SKIP() << "no GPU";
    }
  }

  static void expect_reference_bits(int num_ranks, int num_gpus, uint64_t num_cases) {
    ExchangeSetup setup = gpu_setup(num_ranks, num_gpus);
    setup.timeout = 20s;
    std::vector<CaseData> cases;
    for (uint64_t seed = 500; seed < 500 + num_cases; ++seed) {
      const Case spec = seed % 5 == 0 ? balanced_case(setup, seed) : random_case(setup, seed);
      cases.push_back(make_case_data(setup, spec));
    }
    const std::vector<int> all_well(static_cast<size_t>(num_ranks), 0);
    EXPECT_EQ(run_cases_on_processes(cases), all_well);
  }

  // Rank 1 gets `signal`, SIGKILL or SIGSTOP, after a good call; rank 0 hears of it in the next.
  void expect_end_is_heard(int signal, std::vector<int> domain_of) const {
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
      const pid_t own = ::getpid();
      const auto pids = group.all_gather(std::as_bytes(std::span(&own, 1)));
      if (group.rank() == 1) {
        static_cast<void>(::kill(own, signal));
      }
      const auto thrown = thrown_by([&] { static_cast<void>(run_cases(exchange, {&data, 1})); });
      pid_t peer = 0;
      std::memcpy(&peer, pids[1].data(), sizeof peer);
      static_cast<void>(::kill(peer, SIGKILL));  // a stopped one ends, too
      const std::string text = text_of(thrown);
      const bool is_its_kind =
          thrown && (signal == SIGSTOP ? thrown->is_timeout : thrown->is_peer_error);
      if (!is_its_kind || text.find("rank 1 ") == std::string::npos) {
        static_cast<void>(std::fprintf(stderr, "rank 0 heard: %s\n", text.c_str()));
        return 3;
      }
      return 0;
    });
    EXPECT_EQ(statuses, (std::vector<int>{0, 128 + SIGKILL}));
  }

  [[nodiscard]] std::vector<int> run_between(
      std::vector<int> domain_of, const char* transport, bool has_own_stream, uint64_t num_cases
  ) const {
    ExchangeSetup setup = gpu_setup(static_cast<int>(domain_of.size()), num_gpus_);
    setup.timeout = 20s;
    setup.domain_of = std::move(domain_of);
    setup.transport = transport;
    setup.has_own_stream = has_own_stream;
    std::vector<CaseData> cases;
    for (uint64_t seed = 600; seed < 600 + num_cases; ++seed) {
      cases.push_back(make_case_data(setup, random_case(setup, seed)));
    }
    return run_cases_on_processes(cases);
  }

  // Two ranks, each a domain of its own.
  [[nodiscard]] CaseData two_domains(std::chrono::milliseconds timeout) const {
    ExchangeSetup setup = gpu_setup(2, num_gpus_);
    setup.domain_of = {0, 1};
    setup.transport = "shm";
    setup.timeout = timeout;
    Case spec;
    spec.num_tokens = {20, 30};
    spec.calls = "dc";
    return make_case_data(setup, spec);
  }

  // After calls that make room and wait. `run` says what was wrong, if anything.
  static void expect_well_on_both(
      const CaseData& data, const std::function<std::string(Exchange&, FaultRank&)>& run
  ) {
    const std::vector<int> statuses = run_forked(2, [&](const Group& group) {
      Exchange exchange = make_exchange(group, data.setup);
      FaultRank own(exchange, data);
      own.group = &group;
      own.make_plan();
      exchange.dispatch(*own.plan, own.dispatch_in, own.dispatch_out);
      exchange.combine(*own.plan, own.combine_in, own.combine_out);
      const std::string problem = run(exchange, own);
      if (!problem.empty()) {
        fmt::print(stderr, "rank {}: {}\n", group.rank(), problem);
      }
      return problem.empty() ? 0 : 2;
    });
    EXPECT_EQ(statuses, (std::vector<int>{0, 0}));
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
    for (const bool has_own_stream : {false, true}) {
      EXPECT_EQ(run_between({0, 1}, transport, has_own_stream, 6), (std::vector<int>{0, 0}))
          << transport;
    }
  }
}

// The GPU's memory given to the network, where libfabric knows CUDA; elsewhere the host's is used.
TEST_F(GpuProcessesTest, ExchangeOutOfGpuMemory) {
  ::setenv("WEFT_FABRIC_GPU_MEMORY", "direct", 1);
  EXPECT_EQ(run_between({0, 1}, "ofi:shm", true, 6), (std::vector<int>{0, 0}));
  ::unsetenv("WEFT_FABRIC_GPU_MEMORY");
}

TEST_F(GpuProcessesTest, ExchangeWithinAndBetweenDomains) {
  if (num_gpus_ < 2) {
    GTEST_SKIP() << "one GPU only";
  }
  for (const bool has_own_stream : {false, true}) {
    EXPECT_EQ(run_between({0, 0, 1, 1}, "shm", has_own_stream, 6), (std::vector<int>{0, 0, 0, 0}));
  }
}

// The calls of both return although rank 1's rows are not there yet.
TEST_F(GpuProcessesTest, CallsBetweenDomainsReturnBeforeTheirRowsHaveCome) {
  const CaseData data = two_domains(20s);
  expect_well_on_both(data, [&](Exchange& exchange, FaultRank& own) {
    for (const bool is_dispatch : {true, false}) {
      GatedStream stream(exchange.config().device);
      if (own.rank == 1) {
        stream.close();
      }
      if (is_dispatch) {
        exchange.dispatch(*own.plan, own.dispatch_in, own.dispatch_out, stream.call());
      } else {
        exchange.combine(*own.plan, own.combine_in, own.combine_out, stream.call());
      }
      own.group->barrier();
      stream.open();
      stream.wait();
    }
    exchange.check();
    return run_cases(exchange, {&data, 1});
  });
}

// Nobody waits for ever for rows that come too late, and the next question hears of it.
TEST_F(GpuProcessesTest, RowsThatComeTooLateAreHeardOfLater) {
  expect_well_on_both(two_domains(1s), [](Exchange& exchange, FaultRank& own) {
    GatedStream stream(exchange.config().device);
    if (own.rank == 1) {
      stream.close();
    }
    exchange.dispatch(*own.plan, own.dispatch_in, own.dispatch_out, stream.call());
    std::this_thread::sleep_for(3s);
    stream.open();
    stream.wait();
    const Thrown heard = thrown_by([&] { exchange.check(); }).value_or(Thrown{});
    const char* const expected =
        own.rank == 0 ? "no rows for 1.0 s from rank 1" : "the GPU has packed 0 of";
    if (!heard.is_timeout || heard.text.find(expected) == std::string::npos) {
      return fmt::format("heard '{}'", heard.text);
    }
    const auto after =
        thrown_by([&] { exchange.dispatch(*own.plan, own.dispatch_in, own.dispatch_out); });
    return std::string(after ? "" : "a broken exchange went on");
  });
}

// Rank 0 has nothing left to do when rank 1 puts its rows into memory that is new to rank 0.
TEST_F(GpuProcessesTest, AnExchangeMayEndBeforeItsCallsHave) {
  ExchangeSetup setup = gpu_setup(2, num_gpus_);
  setup.timeout = 5s;
  Case spec;
  spec.num_tokens = {20, 30};
  spec.calls = "dc";
  const CaseData data = make_case_data(setup, spec);
  const std::vector<int> statuses = run_forked(2, [&](const Group& group) {
    Exchange exchange = make_exchange(group, setup);
    FaultRank own(exchange, data);
    own.make_plan();
    exchange.dispatch(*own.plan, own.dispatch_in, own.dispatch_out);
    exchange.check();
    const auto bytes = static_cast<size_t>(
        own.dispatch_out.rows.rows * own.dispatch_out.rows.cols *
        dtype_bytes(own.dispatch_out.rows.dtype)
    );
    std::vector<std::byte> first(bytes);
    std::vector<std::byte> second(bytes);
    const auto read = [&](std::vector<std::byte>& to) {
      WEFT_CUDA(
          Context{}, cudaMemcpy(to.data(), own.dispatch_out.rows.data, bytes, cudaMemcpyDefault)
      );
    };
    read(first);
    const TestStream stream(exchange.config().device);
    group.barrier();
    const CallOptions call = {.stream = stream.get()};
    std::optional<Buffer> rows;
    if (group.rank() == 0) {
      exchange.dispatch(*own.plan, own.dispatch_in, own.dispatch_out, call);
      const Exchange ended = std::move(exchange);
    } else {
      std::this_thread::sleep_for(200ms);  // rank 0 is about to end by now, most likely
      rows.emplace(exchange.allocate(8192, 8192, DType::kBFloat16));
      own.dispatch_out.rows.data = rows->tensor().data;
      exchange.dispatch(*own.plan, own.dispatch_in, own.dispatch_out, call);
    }
    stream.wait();
    read(second);
    return second == first ? 0 : 2;
  });
  EXPECT_EQ(statuses, (std::vector<int>{0, 0}));
}

TEST_F(GpuProcessesTest, HearThatARankDied) {
  expect_end_is_heard(SIGKILL, {});
}

TEST_F(GpuProcessesTest, HearThatARankOfAnotherDomainDied) {
  expect_end_is_heard(SIGKILL, {0, 1});
}

// At any moment, of either domain: what the others' calls return is right.
TEST_F(GpuProcessesTest, TakeNothingForGoodThatADeathHasCutShort) {
  ExchangeSetup setup = gpu_setup(3, num_gpus_);
  setup.domain_of = {0, 0, 1};
  setup.transport = "shm";
  setup.timeout = 3s;
  Case spec;
  spec.num_tokens = {20, 30, 25};
  spec.topk = 4;
  const CaseData data = make_case_data(setup, spec);
  for (int i = 0; i < 9; ++i) {
    const int victim = i % 3;
    const std::chrono::milliseconds delay(1 + 7 * i);
    const auto statuses = run_forked(3, [&](const Group& group) {
      Exchange exchange = make_exchange(group, setup);
      if (group.rank() == victim) {
        std::thread([delay] {
          std::this_thread::sleep_for(delay);
          static_cast<void>(::raise(SIGKILL));
        }).detach();
      }
      std::string difference;
      const auto thrown = thrown_by([&] {
        while (difference.empty()) {
          difference = run_cases(exchange, {&data, 1});
        }
      });
      static_cast<void>(std::fputs(difference.c_str(), stderr));
      return thrown ? 0 : 1;
    });
    std::vector<int> expected = {0, 0, 0};
    expected[static_cast<size_t>(victim)] = 128 + SIGKILL;
    EXPECT_EQ(statuses, expected) << "victim " << victim << " after " << delay.count() << " ms";
  }
}

TEST_F(GpuProcessesTest, HearThatARankIsStopped) {
  expect_end_is_heard(SIGSTOP, {});
}

TEST_F(GpuProcessesTest, HearThatARankOfAnotherDomainIsStopped) {
  expect_end_is_heard(SIGSTOP, {0, 1});
}

}  // namespace
}  // namespace weft::test
