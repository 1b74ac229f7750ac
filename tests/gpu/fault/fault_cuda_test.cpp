// SPDX-License-Identifier: Apache-2.0
// Faults between GPUs: an error with the cause on every rank, no hang, and an exchange that goes on
// where nothing was lost.
#include <fmt/format.h>

#include <cuda_runtime_api.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <functional>
#include <thread>
#include <vector>

#include "core/gpu/check.hpp"
#include "core/gpu/short_copies.hpp"
#include "core/gpu/stream.hpp"
#include "cuda/exchange/fault_text.hpp"
#include "gpu/barrier_cuda.hpp"
#include "gpu/device_bytes.hpp"
#include "gpu/fault_world.hpp"
#include "support/stream.hpp"

namespace weft::test {
namespace {

using namespace std::chrono_literals;

// On one GPU, and on all.
class GpuFaultTest : public GpuParamTest<bool> {
 protected:
  void SetUp() override {
    GpuParamTest<bool>::SetUp();
    if (GetParam() && num_gpus() == 1) {
      GTEST_SKIP() << "one GPU only";
    }
  }
  [[nodiscard]] static int gpus() { return GetParam() ? num_gpus() : 1; }
};

TEST_P(GpuFaultTest, NamesTheFieldOfAPlanThatDiffers) {
  expect_disagreement(gpus(), "plan: pad_multiple", {"1", "16"}, [](FaultRank& own) {
    own.options.pad_multiple = own.rank == 2 ? 16 : 1;
    own.make_plan();
  });
  expect_disagreement(gpus(), "plan: layout", {"expert_major", "rank_major"}, [](FaultRank& own) {
    own.options.layout = own.rank == 2 ? Layout::kRankMajor : Layout::kExpertMajor;
    own.make_plan();
  });
}

TEST_P(GpuFaultTest, NamesTheFieldOfADispatchThatDiffers) {
  expect_disagreement(gpus(), "dispatch: dtype of x", {"bfloat16", "byte"}, [](FaultRank& own) {
    if (own.rank == 2) {  // the same bytes, told otherwise
      own.dispatch_in.x.dtype = own.dispatch_out.rows.dtype = DType::kByte;
      own.dispatch_in.x.cols = own.dispatch_out.rows.cols = 64;
    }
    own.exchange.dispatch(*own.plan, own.dispatch_in, own.dispatch_out);
  });
  expect_disagreement(gpus(), "dispatch: has_weights", {"true", "false"}, [](FaultRank& own) {
    if (own.rank == 2) {
      own.dispatch_in.weights = {};
      own.dispatch_out.weights = {};
    }
    own.exchange.dispatch(*own.plan, own.dispatch_in, own.dispatch_out);
  });
}

TEST_P(GpuFaultTest, NamesTheFieldOfACombineThatDiffers) {
  expect_disagreement(gpus(), "combine: scale", {"none", "plan_weights"}, [](FaultRank& own) {
    own.combine_in.scale = own.rank == 2 ? CombineScale::kPlanWeights : CombineScale::kNone;
    own.exchange.combine(*own.plan, own.combine_in, own.combine_out);
  });
}

// A rank that has left a call out makes the next one in its place, which looks the same.
TEST_P(GpuFaultTest, NamesCallsThatHaveComeOutOfStep) {
  const auto options = [](const FaultRank& own) {
    return CallOptions{.number = own.rank == 2 ? 8 : 7};
  };
  const std::string field = "the caller's number of this call";
  expect_disagreement(gpus(), "plan: " + field, {"7", "8"}, [&](FaultRank& own) {
    own.plan.emplace(own.exchange.plan(own.routing, own.options, options(own)));
  });
  expect_disagreement(gpus(), "dispatch: " + field, {"7", "8"}, [&](FaultRank& own) {
    own.exchange.dispatch(*own.plan, own.dispatch_in, own.dispatch_out, options(own));
  });
  expect_disagreement(gpus(), "combine: " + field, {"7", "8"}, [&](FaultRank& own) {
    own.exchange.combine(*own.plan, own.combine_in, own.combine_out, options(own));
  });
}

TEST_P(GpuFaultTest, NamesTheRankThatMakesAnotherCall) {
  const auto texts = fault_texts(gpus(), [](FaultRank& own) {
    if (own.rank == 2) {
      own.make_plan();
    } else {
      own.exchange.dispatch(*own.plan, own.dispatch_in, own.dispatch_out);
    }
  });
  const std::string why =
      "(all ranks make the same calls in the same order; this is call 2) [rank ";
  EXPECT_EQ(texts[0], "dispatch: rank 2 calls plan " + why + "0/3, peer]");
  EXPECT_EQ(texts[1], "dispatch: rank 2 calls plan " + why + "1/3, peer]");
  EXPECT_TRUE(
      texts[2] == "plan: rank 0 calls dispatch " + why + "2/3, peer]" ||
      texts[2] == "plan: rank 1 calls dispatch " + why + "2/3, peer]"
  ) << texts[2];
}

TEST_P(GpuFaultTest, RefusesAnIndexOutOfRange) {
  expect_bad_index_is_refused(gpus(), [](FaultRank& own) { own.make_plan(); });
}

TEST_P(GpuFaultTest, RefusesWrongArguments) {
  const auto refuse = [](const std::string& reason, const std::function<void(FaultRank&)>& spoil) {
    expect_refusal(gpus(), "dispatch", "dispatch: " + reason, [&](FaultRank& own) {
      if (own.rank == 1) {
        spoil(own);
      }
      own.exchange.dispatch(*own.plan, own.dispatch_in, own.dispatch_out);
    });
  };
  refuse("x has shape [31, 32] (expected [32, 32])", [](FaultRank& own) {
    own.dispatch_in.x.rows = 31;
  });
  refuse("x has row stride 40 (expected 32: rows must be adjacent)", [](FaultRank& own) {
    own.dispatch_in.x.row_stride = 40;
  });
  refuse(
      fmt::format("x is on cpu (the exchange is on cuda {})", gpus() > 1 ? 1 : 0),
      [](FaultRank& own) { own.dispatch_in.x.device = {}; }
  );
  expect_refusal(
      gpus(),
      "combine",
      "combine: x has dtype float16 (expected bfloat16)",
      [](FaultRank& own) {
        if (own.rank == 1) {
          own.combine_out.x.dtype = DType::kFloat16;
        }
        own.exchange.combine(*own.plan, own.combine_in, own.combine_out);
      }
  );
}

// The caller says why, and no call is made wrong for it. Another call goes on in between, whose
// number the reason must not be taken for.
TEST_P(GpuFaultTest, ARankRefusesWithoutACall) {
  using Refused = std::pair<Op, std::function<void(FaultRank&)>>;
  const std::vector<Refused> calls = {
      {Op::kPlan, [](FaultRank& own) { own.make_plan(); }},
      {Op::kDispatch,
       [](FaultRank& own) { own.exchange.dispatch(*own.plan, own.dispatch_in, own.dispatch_out); }},
      {Op::kCombine,
       [](FaultRank& own) { own.exchange.combine(*own.plan, own.combine_in, own.combine_out); }}};
  for (const auto& [op, call] : calls) {
    const auto texts = fault_texts(gpus(), [&, op = op, call = call](FaultRank& own) {
      own.exchange.dispatch(*own.plan, own.dispatch_in, own.dispatch_out);
      if (own.rank == 1) {
        own.exchange.refuse(op, "my rows are not ready");
        throw Error(ErrorCode::kInvalidArgument, "as told", 1, "");
      }
      call(own);
    });
    EXPECT_EQ(texts[1], "as told");
    for (const int rank : {0, 2}) {
      EXPECT_EQ(
          texts[static_cast<size_t>(rank)],
          fmt::format(
              "{}: rank 1 refused the call: my rows are not ready [rank {}/3, peer]",
              op == Op::kPlan       ? "plan"
              : op == Op::kDispatch ? "dispatch"
                                    : "combine",
              rank
          )
      );
    }
  }
}

// A call that is refused while it is captured was never begun by anybody: no rank counts it.
TEST_P(GpuFaultTest, ARefusalInsideACaptureIsLocalAndSaysSo) {
  const std::string local = "(the call was being captured: no other rank hears of it)";
  const FaultWorld world(gpus());
  run_threads(3, [&](const Group& group) {
    Exchange exchange = make_exchange(group, world.setup);
    FaultRank own(exchange, world.good);
    own.make_plan();
    if (group.rank() == 1) {
      const TestStream stream(exchange.config().device);
      const CallOptions call = {.stream = stream.get()};
      const auto cuda_stream = static_cast<cudaStream_t>(stream.get());
      WEFT_CUDA(Context{}, cudaStreamBeginCapture(cuda_stream, cudaStreamCaptureModeThreadLocal));
      DispatchInput wrong = own.dispatch_in;
      wrong.x.rows = 31;
      const std::string text =
          text_of(thrown_by([&] { exchange.dispatch(*own.plan, wrong, own.dispatch_out, call); }));
      EXPECT_TRUE(text.starts_with("dispatch: x has shape [31, 32]")) << text;
      EXPECT_NE(text.find(local), std::string::npos) << text;
      const auto refused = thrown_by([&] { exchange.refuse(Op::kCombine, "not now", call); });
      EXPECT_EQ(refused.value_or(Thrown{}).code, ErrorCode::kUnsupported);
      EXPECT_NE(text_of(refused).find("combine: not now " + local), std::string::npos);
      cudaGraph_t graph = nullptr;
      WEFT_CUDA(Context{}, cudaStreamEndCapture(cuda_stream, &graph));
      WEFT_CUDA(Context{}, cudaGraphDestroy(graph));
    }
    EXPECT_EQ(run_cases(exchange, {&world.good, 1}), "");
    group.barrier();
  });
}

TEST_P(GpuFaultTest, NamesTheRankThatDoesNotPlan) {
  expect_timeout(
      gpus(), "plan", 1, [](FaultRank&) {}, [](FaultRank& own) { own.make_plan(); }
  );
}

TEST_P(GpuFaultTest, NamesTheRankThatDoesNotDispatch) {
  expect_timeout(
      gpus(),
      "dispatch",
      2,
      [](FaultRank& own) { own.make_plan(); },
      [](FaultRank& own) { own.exchange.dispatch(*own.plan, own.dispatch_in, own.dispatch_out); }
  );
}

TEST_P(GpuFaultTest, NamesTheRankThatDoesNotCombine) {
  expect_timeout(
      gpus(),
      "combine",
      2,
      [](FaultRank& own) { own.make_plan(); },
      [](FaultRank& own) { own.exchange.combine(*own.plan, own.combine_in, own.combine_out); }
  );
}

TEST_P(GpuFaultTest, TellsAfterAQueuedCallByCheck) {
  const auto texts = fault_texts(gpus(), [](FaultRank& own) {
    const TestStream stream(own.exchange.config().device);
    own.dispatch_in.x.dtype = own.rank == 2 ? DType::kByte : DType::kBFloat16;
    own.dispatch_out.rows.dtype = own.dispatch_in.x.dtype;
    own.dispatch_in.x.cols = own.dispatch_out.rows.cols = own.rank == 2 ? 64 : 32;
    own.exchange.dispatch(*own.plan, own.dispatch_in, own.dispatch_out, {.stream = stream.get()});
    stream.wait();
    own.exchange.check();
  });
  for (const std::string& text : texts) {
    EXPECT_TRUE(text.starts_with("dispatch: dtype of x = ")) << text;
  }
}

TEST_P(GpuFaultTest, TellsWhenTheExchangeEndsWhatNobodyAskedFor) {
  const FaultWorld world(gpus());
  testing::internal::CaptureStderr();
  run_threads(3, [&](const Group& group) {
    Exchange exchange = make_exchange(group, world.setup);
    FaultRank own(exchange, world.good);
    own.make_plan();
    const TestStream stream(exchange.config().device);
    own.dispatch_in.weights = own.rank == 2 ? ConstTensor{} : own.dispatch_in.weights;
    own.dispatch_out.weights = own.rank == 2 ? Tensor{} : own.dispatch_out.weights;
    exchange.dispatch(*own.plan, own.dispatch_in, own.dispatch_out, {.stream = stream.get()});
    stream.wait();
    group.barrier();
  });
  const std::string log = testing::internal::GetCapturedStderr();
  const std::string told = "exchange: its last calls failed, and nobody was told: dispatch: ";
  size_t at = 0;
  for (int rank = 0; rank < 3; ++rank, ++at) {
    at = log.find(told, at);
    ASSERT_NE(at, std::string::npos) << log;
  }
}

TEST_P(GpuFaultTest, TellsAfterTheStreamIsGone) {
  const auto texts = fault_texts(gpus(), [](FaultRank& own) {
    {
      const TestStream stream(own.exchange.config().device);
      own.dispatch_in.weights = own.rank == 2 ? ConstTensor{} : own.dispatch_in.weights;
      own.dispatch_out.weights = own.rank == 2 ? Tensor{} : own.dispatch_out.weights;
      own.exchange.dispatch(*own.plan, own.dispatch_in, own.dispatch_out, {.stream = stream.get()});
    }
    own.exchange.check();
  });
  for (const std::string& text : texts) {
    EXPECT_TRUE(text.starts_with("dispatch: has_weights = ")) << text;
  }
}

// The exchange knows the stream of the capture at most.
// A captured plan is replayed so often with a wrong index of rank 1; `look` is to throw what is
// found.
void expect_refusal_of_replays(
    int num_gpus, int replays, const std::function<void(FaultRank&, const TestStream&)>& look
) {
  expect_refusal(
      num_gpus,
      "plan",
      "plan: topk_idx[7, 1] = -2 is out of range (num_experts = 6, -1 = no route)",
      [&](FaultRank& own) {
        const TestStream captured(own.exchange.config().device);
        const TestStream replayed(own.exchange.config().device);
        const auto stream = static_cast<cudaStream_t>(captured.get());
        cudaGraph_t graph = nullptr;
        cudaGraphExec_t runnable = nullptr;
        own.options.row_budget = 200;
        WEFT_CUDA(Context{}, cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
        own.plan.emplace(own.exchange.plan(own.routing, own.options, {.stream = stream}));
        WEFT_CUDA(Context{}, cudaStreamEndCapture(stream, &graph));
        WEFT_CUDA(Context{}, cudaGraphInstantiate(&runnable, graph, 0));
        if (own.rank == 1) {
          own.set_index(7, 1, -2);
        }
        WEFT_CUDA(Context{}, cudaGraphUpload(runnable, stream));
        captured.wait();
        // Making a graph may wait for the whole GPU, where kernels of other ranks wait for this
        // one.
        own.group->barrier();
        for (int i = 0; i < replays; ++i) {
          WEFT_CUDA(
              Context{}, cudaGraphLaunch(runnable, static_cast<cudaStream_t>(replayed.get()))
          );
        }
        const auto thrown = thrown_by([&] { look(own, replayed); });
        replayed.wait();
        static_cast<void>(cudaGraphExecDestroy(runnable));
        static_cast<void>(cudaGraphDestroy(graph));
        if (thrown) {
          throw Error(thrown->code, thrown->text, own.rank, "");
        }
      },
      false
  );
}

TEST_P(GpuFaultTest, TellsOfAGraphInAnotherStream) {
  expect_refusal_of_replays(gpus(), 1, [](FaultRank& own, const TestStream& /*stream*/) {
    const auto deadline = std::chrono::steady_clock::now() + 2 * kGpuTimeout;
    while (std::chrono::steady_clock::now() < deadline) {
      own.exchange.check();  // while blocks of the call may still run
    }
  });
}

// The call may hear of the fault while many of them are still to run.
TEST_P(GpuFaultTest, GivesUpAllReplaysBehindAFault) {
  expect_refusal_of_replays(gpus(), 50, [](FaultRank& own, const TestStream& stream) {
    static_cast<void>(own.exchange.plan(own.routing, own.options, {.stream = stream.get()}));
    stream.wait();
    own.exchange.check();
  });
}

TEST_P(GpuFaultTest, RefusesAConfigThatCannotBe) {
  const FaultWorld world(gpus());
  run_threads(3, [&](const Group& group) {
    const auto text_with = [&](const auto& change) {
      ExchangeConfig config = world.setup.config(group.rank());
      change(config);
      return text_of(thrown_by([&] { const Exchange exchange(group, config); }));
    };
    EXPECT_TRUE(text_with([](auto& config) { config.device.index = 99; }
    ).starts_with("exchange: device cuda 99 ("));
    EXPECT_TRUE(text_with([](auto& config) { config.transport = "shm"; }
    ).starts_with("exchange: transport shm on a GPU (expected auto or peer)"));
    Exchange exchange(group, world.setup.config(group.rank()));
    EXPECT_EQ(run_cases(exchange, {&world.good, 1}), "");
    group.barrier();
  });
}

// A slow rank is named by the time that others waited for it.
TEST_P(GpuFaultTest, CountsCallsWaitsAndMemory) {
  const FaultWorld world(gpus());
  run_threads(3, [&](const Group& group) {
    Exchange exchange(group, world.setup.config(group.rank()));
    FaultRank own(exchange, world.good);
    const CudaDeviceGuard guard(exchange.config().device.index);
    const DeviceBytes waited = device_bytes(3 * sizeof(int64_t));
    const Tensor sums = {waited.get(), DType::kInt64, 1, 3, -1, exchange.config().device};
    exchange.add_waits(sums, -1);
    group.barrier();
    if (group.rank() == 1) {
      std::this_thread::sleep_for(100ms);
    }
    own.make_plan();
    exchange.dispatch(*own.plan, own.dispatch_in, own.dispatch_out);
    exchange.combine(*own.plan, own.combine_in, own.combine_out);
    exchange.add_waits(sums, 1);
    std::array<int64_t, 3> us = {};
    WEFT_CUDA(Context{}, cudaMemcpy(us.data(), waited.get(), sizeof us, cudaMemcpyDefault));
    const ExchangeStats stats = exchange.stats();
    EXPECT_EQ(stats.num_plans, 1);
    EXPECT_EQ(stats.num_dispatches, 1);
    EXPECT_EQ(stats.num_combines, 1);
    ASSERT_EQ(stats.wait_seconds.size(), 3U);
    if (group.rank() != 1) {
      EXPECT_GT(stats.wait_seconds[1], 0.05);
      EXPECT_GT(us[1], 50'000);
      EXPECT_EQ(std::ranges::max(us), us[1]);
    }
    EXPECT_GT(exchange.footprint().control_bytes, 0);
    EXPECT_GT(exchange.footprint().staging_bytes, 0);
    {
      const Buffer buffer = exchange.allocate(100, 1000, DType::kFloat32);
      EXPECT_EQ(buffer.tensor().device, exchange.config().device);
      EXPECT_GE(exchange.footprint().buffer_bytes, 400'000);
    }
    EXPECT_EQ(exchange.footprint().buffer_bytes, 0);
    EXPECT_GT(exchange.footprint().pooled_bytes, 0);
    group.barrier();
    exchange.release_pooled();
    EXPECT_EQ(exchange.footprint().pooled_bytes, 0);
    group.barrier();
    EXPECT_EQ(run_cases(exchange, {&world.good, 1}), "");
    group.barrier();
  });
}

class GpuStreamTest : public GpuTest {};

// Making streams may wait for the kernels that run, and those may wait for this rank.
TEST_F(GpuStreamTest, AreThereWhileAPeerWaits) {
  FaultWorld world(1);
  world.setup.timeout = 3s;
  const Device device = world.setup.config(0).device;
  std::vector<TestStream> held;  // of the 32 that a process makes at first
  for (int i = 0; i < 20; ++i) {
    held.emplace_back(device);
  }
  std::atomic<bool> has_called = false;
  run_threads(3, [&](const Group& group) {
    Exchange exchange(group, world.setup.config(group.rank()));
    FaultRank own(exchange, world.good);
    own.options.row_budget = own.dispatch_out.rows.rows;
    std::vector<TestStream> streams;
    if (group.rank() > 0) {
      has_called.wait(false);
      std::this_thread::sleep_for(50ms);  // its kernel runs
    }
    for (int i = 0; i < (group.rank() == 1 ? 12 : 1); ++i) {
      streams.emplace_back(device);
    }
    const Plan plan = exchange.plan(own.routing, own.options, {.stream = streams.back().get()});
    has_called = true;
    has_called.notify_all();
    streams.back().wait();
    EXPECT_EQ(text_of(thrown_by([&] { exchange.check(); })), "nothing");
    group.barrier();
  });
}

class GpuBarrierTest : public GpuTest {};

// A wait for rows that never come to shared memory, a defect, ends at a deadline as well.
TEST_F(GpuBarrierTest, EndsAWaitInSharedMemory) {
  if (movers_here().size() < 2) {
    GTEST_SKIP() << "no bulk copies here";
  }
  const DeviceBytes local = device_bytes(sizeof(LocalState));
  const DeviceBytes control = device_bytes(64);
  const PinnedBytes fault = pinned_bytes(sizeof(FaultRecord));
  const PinnedBytes has_come = pinned_bytes(sizeof(int));
  RankView me;
  me.control[0] = control.get();
  me.local = reinterpret_cast<LocalState*>(local.get());
  me.fault = reinterpret_cast<FaultRecord*>(fault.get());
  me.timeout_ns = 20'000'000;
  auto* const said = reinterpret_cast<int*>(has_come.get());
  *said = 1;
  launch_wait_alone(me, said);
  EXPECT_EQ(*said, 0);
  EXPECT_EQ(me.fault->kind, FaultKind::kTimeout);
  EXPECT_EQ(me.fault->waiting_for, WaitFor::kStage);
  const std::string text = fault_text(*me.fault, me);
  EXPECT_NE(text.find("for rows in its shared memory of rank 0 in call 1"), std::string::npos)
      << text;
}

// The host ends waits by copies of some bytes, whatever streams its caller has, and while another
// thread looks at a result.
TEST_F(GpuBarrierTest, ShortCopiesAreMadeWhileEveryStreamWaits) {
  const DeviceBytes memory = device_bytes(sizeof(int));
  const PinnedBytes pinned = pinned_bytes(2 * sizeof(int));
  auto* const numbers = reinterpret_cast<int*>(pinned.get());
  const auto set_has_ended = [&](int now) { *static_cast<volatile int*>(numbers) = now; };
  reserve_streams(0);
  set_has_ended(1);
  launch_wait_for_host(numbers, cudaStreamLegacy);  // loads the kernels
  WEFT_CUDA(Context{}, cudaDeviceSynchronize());
  set_has_ended(0);
  std::vector<cudaStream_t> streams(40);  // more than a process has hardware queues
  for (cudaStream_t& stream : streams) {
    WEFT_CUDA(Context{}, cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    launch_wait_for_host(numbers, stream);
  }
  launch_wait_for_host(numbers, cudaStreamLegacy);
  std::atomic<bool> looks = false;
  std::thread looker([&] {
    int seen = 0;
    looks = true;
    EXPECT_EQ(cudaMemcpy(&seen, memory.get(), sizeof seen, cudaMemcpyDeviceToHost), cudaSuccess);
  });
  while (!looks) {
    std::this_thread::yield();
  }
  std::this_thread::sleep_for(50ms);  // into its copy
  const int sent = 7;
  int read = 0;
  write_short(memory.get(), &sent, sizeof sent, short_work_stream(0), Context{});
  read_short(&read, memory.get(), sizeof read, short_work_stream(0), Context{});
  EXPECT_EQ(numbers[1], 0) << "the copies waited for a kernel that waits for the host";
  EXPECT_EQ(read, sent);
  set_has_ended(1);
  looker.join();
  WEFT_CUDA(Context{}, cudaDeviceSynchronize());
  for (const cudaStream_t stream : streams) {
    WEFT_CUDA(Context{}, cudaStreamDestroy(stream));
  }
}

INSTANTIATE_TEST_SUITE_P(
    All,
    GpuFaultTest,
    testing::Values(false, true),
    [](const testing::TestParamInfo<bool>& param) { return param.param ? "all_gpus" : "one_gpu"; }
);

}  // namespace
}  // namespace weft::test
