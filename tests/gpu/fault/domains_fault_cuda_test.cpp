// SPDX-License-Identifier: Apache-2.0
// Faults between domains of GPUs: ranks 0 and 1 share a domain, rank 2 is in another. Every rank
// hears the cause, whichever side of the network it is on, and goes on where nothing was lost.
#include <fmt/format.h>

#include <cuda_runtime_api.h>

#include <thread>

#include "core/gpu/check.hpp"
#include "gpu/fault_world.hpp"
#include "support/stream.hpp"

namespace weft::test {
namespace {

using namespace std::chrono_literals;

class GpuDomainsFaultTest : public GpuTest {
 protected:
  static std::vector<std::string> texts_of(const FaultCall& call) {
    return fault_texts(num_gpus(), call, {0, 0, 1});
  }
  // Rank `who` says `reason`, the others that it refused for that.
  static void expect_refusal(int who, const std::string& reason, const FaultCall& call) {
    const std::vector<std::string> texts = texts_of(call);
    for (int rank = 0; rank < 3; ++rank) {
      const std::string& text = texts[static_cast<size_t>(rank)];
      EXPECT_NE(text.find(reason), std::string::npos) << "rank " << rank << ": " << text;
      const bool is_told = text.find(fmt::format("rank {} refused", who)) != std::string::npos;
      EXPECT_EQ(is_told, rank != who) << "rank " << rank << ": " << text;
    }
  }
};

TEST_F(GpuDomainsFaultTest, RefusesAnIndexOutOfRange) {
  for (const int who : {1, 2}) {
    expect_refusal(who, "topk_idx[3, 1] = 6 is out of range", [&](FaultRank& own) {
      if (own.rank == who) {
        own.set_index(3, 1, 6);
      }
      own.make_plan();
    });
  }
}

// Before there is room for rows of this size, so that the others are about to make some.
TEST_F(GpuDomainsFaultTest, RefusesADispatchBeforeItsFirst) {
  for (const int who : {0, 2}) {
    expect_refusal(who, "dispatch: x has shape", [&](FaultRank& own) {
      if (own.rank == who) {
        own.dispatch_in.x.rows -= 1;
      }
      own.exchange.dispatch(*own.plan, own.dispatch_in, own.dispatch_out);
    });
  }
}

TEST_F(GpuDomainsFaultTest, RefusesACombineAfterADispatch) {
  expect_refusal(1, "combine: rows has dtype", [](FaultRank& own) {
    own.exchange.dispatch(*own.plan, own.dispatch_in, own.dispatch_out);
    if (own.rank == 1) {
      own.combine_in.rows.dtype = DType::kInt32;
    }
    own.exchange.combine(*own.plan, own.combine_in, own.combine_out);
  });
}

TEST_F(GpuDomainsFaultTest, NamesTheRankWhoseCombineDiffers) {
  const auto texts = texts_of([](FaultRank& own) {
    own.combine_in.scale = own.rank == 2 ? CombineScale::kPlanWeights : CombineScale::kNone;
    own.exchange.combine(*own.plan, own.combine_in, own.combine_out);
  });
  for (int rank = 0; rank < 3; ++rank) {
    const std::string& text = texts[static_cast<size_t>(rank)];
    EXPECT_NE(text.find(rank == 2 ? "rank 0" : "rank 2"), std::string::npos) << text;
  }
}

TEST_F(GpuDomainsFaultTest, RefusesToBeCaptured) {
  const auto texts = texts_of([](FaultRank& own) {
    const TestStream stream(own.exchange.config().device);
    const auto handle = static_cast<cudaStream_t>(stream.get());
    own.group->barrier();
    if (own.rank == 1) {
      WEFT_CUDA(Context{}, cudaStreamBeginCapture(handle, cudaStreamCaptureModeThreadLocal));
    }
    const auto thrown = thrown_by([&] {
      own.exchange.dispatch(*own.plan, own.dispatch_in, own.dispatch_out, {.stream = stream.get()});
    });
    if (own.rank == 1) {
      cudaGraph_t graph = nullptr;
      static_cast<void>(cudaStreamEndCapture(handle, &graph));
      static_cast<void>(cudaGraphDestroy(graph));
      EXPECT_EQ(thrown.value_or(Thrown{}).code, ErrorCode::kUnsupported) << text_of(thrown);
    }
    raise_error(ErrorCode::kInvalidArgument, Context{}, text_of(thrown));
  });
  for (const std::string& text : texts) {
    EXPECT_NE(text.find("dispatch: a call between domains cannot be captured"), std::string::npos)
        << text;
  }
}

// Returns, by rank, what the others throw when rank `who` does `instead` in place of a call.
std::vector<Thrown> without_rank(int who, const std::function<void(Exchange&)>& instead) {
  FaultWorld world(num_gpus(), {0, 0, 1});
  world.setup.timeout = 1s;
  std::vector<Thrown> thrown(3);
  run_threads(3, [&](const Group& group) {
    const auto rank = static_cast<size_t>(group.rank());
    std::optional<Exchange> exchange = make_exchange(group, world.setup);
    {
      FaultRank own(*exchange, world.good);
      own.make_plan();
      own.exchange.dispatch(*own.plan, own.dispatch_in, own.dispatch_out);
      group.barrier();
      if (group.rank() == who) {
        instead(*exchange);
      } else {
        thrown[rank] = thrown_by([&] {
                         own.exchange.dispatch(*own.plan, own.dispatch_in, own.dispatch_out);
                       }).value_or(Thrown{});
      }
    }
    group.barrier();
    exchange.reset();
  });
  return thrown;
}

TEST_F(GpuDomainsFaultTest, NamesTheRankThatDoesNotCall) {
  for (const int who : {1, 2}) {
    const auto thrown = without_rank(who, [](Exchange& /*exchange*/) {});
    for (int rank = 0; rank < 3; ++rank) {
      const Thrown& one = thrown[static_cast<size_t>(rank)];
      if (rank != who) {
        EXPECT_TRUE(one.is_timeout) << "rank " << rank << ": " << one.text;
        EXPECT_NE(one.text.find(fmt::format("rank {}", who)), std::string::npos) << one.text;
      }
    }
  }
}

}  // namespace
}  // namespace weft::test
