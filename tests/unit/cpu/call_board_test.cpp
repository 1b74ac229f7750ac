// SPDX-License-Identifier: Apache-2.0
#include "cpu/protocol/call_board.hpp"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <cstring>
#include <optional>

#include "plan/build.hpp"
#include "support/errors.hpp"
#include "weft/group.hpp"

namespace weft::test {
namespace {

// One rank's board over a real transport.
class BoardRank {
 public:
  explicit BoardRank(const Group& group)
      : rank_(group.rank()),
        num_ranks_(static_cast<uint32_t>(group.num_ranks())),
        signals_{.num_ranks = num_ranks_, .max_chunks = 0},
        map_{
            .num_ranks = num_ranks_,
            .word_bytes = sizeof(CallWord),
            .payload_bytes = 8,
            .record_bytes = 0},
        transport_(make_transport("loopback", group, signals_.size())),
        context_{.rank = rank_, .num_ranks = group.num_ranks(), .transport = "loopback"},
        waiter_(*transport_, context_, std::chrono::seconds(60), signals_.interrupted(0)) {
    const Region control = transport_->allocate(map_.num_bytes());
    std::vector<uint32_t> slots;
    for (const Bytes& block : group.all_gather(std::as_bytes(std::span(&control.ref, 1)))) {
      RegionRef ref;
      std::memcpy(&ref, block.data(), sizeof ref);
      transport_->import(static_cast<int>(slots.size()), ref);
      slots.push_back(ref.slot);
    }
    board_.emplace(*transport_, waiter_, context_, map_, signals_, control.data, slots);
    group.barrier();
  }

  CallBoard& board() { return *board_; }

  // Swaps words: each rank r gets tokens = 1000 * own rank + r, and the call number as payload.
  std::vector<CallWord> swap(Op op, int64_t field) {
    CallWord word;
    word.call = board_->next_call();
    word.op = op;
    word.signature = signature_of({.op = op, .options = {.pad_multiple = field}});
    std::vector<CallWord> words(num_ranks_, word);
    for (size_t r = 0; r < words.size(); ++r) {
      words[r].num_tokens = 1000 * rank_ + static_cast<int64_t>(r);
    }
    return board_->swap(words, std::as_bytes(std::span(&word.call, 1)));
  }

 private:
  int rank_;
  uint32_t num_ranks_;
  SignalMap signals_;
  ControlMap map_;
  std::unique_ptr<Transport> transport_;
  Context context_;
  Waiter waiter_;
  std::optional<CallBoard> board_;
};

TEST(CallBoardTest, GivesEachRankTheWordMeantForIt) {
  run_threads(3, [](const Group& group) {
    BoardRank rank(group);
    for (uint64_t call = 1; call <= 200; ++call) {
      const std::vector<CallWord> words = rank.swap(Op::kPlan, 4);
      for (int from = 0; from < 3; ++from) {
        ASSERT_EQ(words[static_cast<size_t>(from)].call, call);
        ASSERT_EQ(words[static_cast<size_t>(from)].num_tokens, 1000 * from + group.rank());
        uint64_t payload = 0;
        std::memcpy(&payload, rank.board().payload(from).data(), sizeof payload);
        ASSERT_EQ(payload, call);
      }
    }
  });
}

TEST(CallBoardTest, NamesTheFieldInWhichRanksDiffer) {
  run_threads(2, [](const Group& group) {
    BoardRank rank(group);
    const int64_t own = group.rank() == 0 ? 16 : 32;
    EXPECT_EQ(
        text_of(thrown_by([&] { static_cast<void>(rank.swap(Op::kPlan, own)); })),
        group.rank() == 0 ? "plan: pad_multiple = 16 here and 32 on rank 1 (must be equal on all "
                            "ranks) [rank 0/2, loopback]"
                          : "plan: pad_multiple = 32 here and 16 on rank 0 (must be equal on all "
                            "ranks) [rank 1/2, loopback]"
    );
    EXPECT_EQ(rank.swap(Op::kPlan, 1).size(), 2U);
  });
}

TEST(CallBoardTest, NamesTheRankThatDoesSomethingElse) {
  run_threads(2, [](const Group& group) {
    BoardRank rank(group);
    const Op own = group.rank() == 0 ? Op::kDispatch : Op::kCombine;
    const std::string text = text_of(thrown_by([&] { static_cast<void>(rank.swap(own, 0)); }));
    EXPECT_EQ(
        text,
        group.rank() == 0 ? "dispatch: rank 1 calls combine (all ranks make the same calls in the "
                            "same order; this is call 1) [rank 0/2, loopback]"
                          : "combine: rank 0 calls dispatch (all ranks make the same calls in the "
                            "same order; this is call 1) [rank 1/2, loopback]"
    );
    EXPECT_EQ(rank.swap(Op::kPlan, 1).size(), 2U);
  });
}

TEST(CallBoardTest, TellsEveryoneWhyARankRefused) {
  run_threads(3, [](const Group& group) {
    BoardRank rank(group);
    for (int round = 0; round < 3; ++round) {
      if (group.rank() == 1) {
        static_cast<void>(rank.board().next_call());
        rank.board().refuse(Op::kDispatch, "x is missing");
      } else {
        EXPECT_EQ(
            text_of(thrown_by([&] { static_cast<void>(rank.swap(Op::kDispatch, 0)); })),
            "dispatch: rank 1 refused the call: x is missing [rank " +
                std::to_string(group.rank()) + "/3, loopback]"
        );
      }
      EXPECT_EQ(rank.swap(Op::kPlan, 1).size(), 3U);
    }
  });
}

// Ranks 0 and 1 refuse plans, for these reasons, and rank 2 makes this call.
TEST(CallBoardTest, KnowsOnAllRanksWhetherThereWasNoRoomForAPlan) {
  const Error error(ErrorCode::kInvalidArgument, "too many", 0, "");
  const Refusal no_room = NoRoom(error);
  const Refusal wrong = error;
  struct Case {
    std::optional<Refusal> first;
    std::optional<Refusal> second;
    Op third;
    bool is_outgrown;
  };
  const Case cases[] = {
      {no_room, std::nullopt, Op::kPlan, true},
      {no_room, no_room, Op::kPlan, true},
      {std::nullopt, std::nullopt, Op::kPlan, false},
      {no_room, wrong, Op::kPlan, false},
      {no_room, std::nullopt, Op::kCombine, false},
      {std::nullopt, std::nullopt, Op::kCombine, false}};
  run_threads(3, [&](const Group& group) {
    BoardRank rank(group);
    for (const Case& one : cases) {
      const std::optional<Refusal> own[] = {one.first, one.second, std::nullopt};
      static_cast<void>(thrown_by([&] {
        if (const auto& refusal = own[group.rank()]) {
          static_cast<void>(rank.board().next_call());
          rank.board().refuse(Op::kPlan, *refusal);
        } else {
          static_cast<void>(rank.swap(group.rank() == 2 ? one.third : Op::kPlan, 0));
        }
      }));
      EXPECT_EQ(rank.board().is_outgrown(), one.is_outgrown);
    }
  });
}

TEST(CallBoardTest, CutsALongReason) {
  run_threads(2, [](const Group& group) {
    BoardRank rank(group);
    if (group.rank() == 1) {
      static_cast<void>(rank.board().next_call());
      rank.board().refuse(Op::kPlan, std::string(5000, 'z'));
      return;
    }
    const auto thrown = thrown_by([&] { static_cast<void>(rank.swap(Op::kPlan, 0)); });
    EXPECT_NE(text_of(thrown).find(fmt::format("{} [", std::string(511, 'z'))), std::string::npos);
  });
}

}  // namespace
}  // namespace weft::test
