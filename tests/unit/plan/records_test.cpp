// SPDX-License-Identifier: Apache-2.0
#include <cstring>
#include <limits>

#include "plan/reference/reference_plan.hpp"
#include "unit/plan/plan_cases.hpp"

namespace weft {
namespace {

using testing::message_of;
using testing::PlanCase;
using testing::random_case;
using testing::table_of;

constexpr int64_t kMaxTokens = std::numeric_limits<int32_t>::max();

TEST(RecordsTest, ReturnWhatWasEncoded) {
  for (uint64_t seed = 0; seed < 200; ++seed) {
    const PlanCase c = random_case(seed);
    const std::vector<PlanData> plans = slow_plans(c);
    for (const PlanData& receiver : plans) {
      for (size_t from = 0; from < plans.size(); ++from) {
        const Arrivals& sent = plans[from].sent[static_cast<size_t>(receiver.shape.rank)];
        const std::vector<std::byte> bytes = encode_records(sent);
        ASSERT_LE(
            bytes.size(), max_record_bytes(plans[from].shape.num_tokens, plans[from].shape.topk)
        );
        ASSERT_EQ(
            decode_records(
                bytes, {receiver.shape, kMaxTokens, receiver.num_rows}, static_cast<int>(from), {}
            ),
            sent
        ) << "seed "
          << seed;
      }
    }
  }
}

TEST(RecordsTest, ReachTheirBoundWhenEveryRouteStays) {
  RouteTable table = table_of(3, {{0, 1, 2}, {2, 1, 0}});
  table.weight.assign(6, 1.0F);
  const std::vector<Plan> plans = build_plans(std::span(&table, 1), 3, {});
  EXPECT_EQ(encode_records(contents_of(plans[0]).sent[0]).size(), max_record_bytes(2, 3));
}

// One receiver with 8 rows, top 2 of 2 experts, and what rank 0 sends it.
class MalformedTest : public ::testing::Test {
 protected:
  MalformedTest() {
    const RouteTable table = table_of(2, {{0, 1}, {1, -1}, {0, 0}});
    const std::vector<Plan> plans = build_plans(std::span(&table, 1), 2, {.row_budget = 8});
    receiver_ = contents_of(plans[0]);
    arrivals_ = receiver_.sent[0];
  }
  [[nodiscard]] std::string refusal_of(std::span<const std::byte> bytes) const {
    const Context speaker = {.rank = 1, .num_ranks = 2};
    const std::string text = message_of([&] {
      static_cast<void>(
          decode_records(bytes, {receiver_.shape, kMaxTokens, receiver_.num_rows}, 0, speaker)
      );
    });
    const std::string begin = "plan: records of rank 0 are malformed: ";
    const std::string end = " [rank 1/2]";
    return text.starts_with(begin) && text.ends_with(end)
               ? text.substr(begin.size(), text.size() - begin.size() - end.size())
               : text;
  }
  [[nodiscard]] std::string refusal() const { return refusal_of(encode_records(arrivals_)); }

  PlanData receiver_;
  Arrivals arrivals_;
};

TEST_F(MalformedTest, IsSoundBeforeTheFaultsBelow) {
  EXPECT_EQ(refusal(), "nothing");
}

TEST_F(MalformedTest, NamesCutOffBytes) {
  std::vector<std::byte> bytes = encode_records(arrivals_);
  bytes.pop_back();
  EXPECT_EQ(refusal_of(bytes), "75 B (3 arrivals with 5 routes take 76)");
  bytes.resize(9);
  EXPECT_EQ(refusal_of(bytes), "9 B (a header has 16)");
  EXPECT_EQ(refusal_of({}), "0 B (a header has 16)");
}

TEST_F(MalformedTest, RefusesImpossibleHeaders) {
  for (const size_t byte : {3U, 7U, 8U, 12U}) {
    std::vector<std::byte> bytes = encode_records(arrivals_);
    bytes[byte] = std::byte{0xff};
    EXPECT_EQ(refusal_of(bytes), "the header holds impossible values") << "byte " << byte;
  }
}

TEST_F(MalformedTest, NamesASlotBehindTheOutput) {
  arrivals_.slot[3] = 8;
  EXPECT_EQ(refusal(), "slot[3] = 8 is out of range (num_rows = 8)");
  arrivals_.slot[3] = -1;
  EXPECT_EQ(refusal(), "slot[3] = -1 is out of range (num_rows = 8)");
}

TEST_F(MalformedTest, NamesAWrongExpert) {
  arrivals_.expert[1] = 2;
  EXPECT_EQ(refusal(), "expert[1] = 2 is out of range (num_local_experts = 2)");
}

TEST_F(MalformedTest, NamesAWrongK) {
  arrivals_.k[4] = 2;
  EXPECT_EQ(refusal(), "k[4] = 2 is out of range (topk = 2)");
  arrivals_.k[4] = 0;
  EXPECT_EQ(refusal(), "k[4] = 0 comes twice in its arrival");
}

TEST_F(MalformedTest, NamesSlotsThatDoNotAscend) {
  arrivals_.slot[4] = 0;
  EXPECT_EQ(refusal(), "slot[4] = 0 does not ascend (after 1)");
}

TEST_F(MalformedTest, NamesTokensThatDoNotAscend) {
  arrivals_.token[2] = 1;
  EXPECT_EQ(refusal(), "token[2] = 1 is out of order or range (2 to 2147483646)");
}

TEST_F(MalformedTest, NamesAnArrivalWithoutRoutes) {
  arrivals_.route_begin = {0, 0, 3, 5};
  EXPECT_EQ(refusal(), "arrival 0 has routes 0 to 0 (1 to topk = 2 of them)");
}

TEST_F(MalformedTest, NamesAnArrivalWithTooManyRoutes) {
  arrivals_.route_begin = {0, 3, 4, 5};
  EXPECT_EQ(refusal(), "arrival 0 has routes 0 to 3 (1 to topk = 2 of them)");
}

TEST_F(MalformedTest, NamesRouteCountsThatDoNotAddUp) {
  std::vector<std::byte> bytes = encode_records(arrivals_);
  bytes.back() = std::byte{1};  // routes of the last arrival
  EXPECT_EQ(refusal_of(bytes), "route_begin runs from 0 to 4 (0 to 5)");
}

TEST_F(MalformedTest, RefusesAnotherLayout) {
  arrivals_.one_row = true;
  EXPECT_EQ(refusal(), "one_row is true (the layout says otherwise)");
}

TEST_F(MalformedTest, NeverReadsOrWritesOutOfBoundsWhateverByteFlips) {
  const std::vector<std::byte> sound = encode_records(arrivals_);
  int num_refused = 0;
  for (size_t i = 0; i < sound.size(); ++i) {
    for (int bit = 0; bit < 8; ++bit) {
      std::vector<std::byte> bytes = sound;
      bytes[i] ^= static_cast<std::byte>(1 << bit);
      num_refused += refusal_of(bytes) == "nothing" ? 0 : 1;
    }
  }
  EXPECT_GT(num_refused, 300);
}

TEST(SharedRowTest, NamesRoutesOfAnArrivalThatDisagreeAboutTheirRow) {
  const RouteTable table = table_of(2, {{0, 1}});
  const std::vector<Plan> plans =
      build_plans(std::span(&table, 1), 2, {.layout = Layout::kRankMajor, .row_budget = 4});
  Arrivals arrivals = contents_of(plans[0]).sent[0];
  arrivals.slot[1] = 3;
  const std::vector<std::byte> bytes = encode_records(arrivals);
  EXPECT_EQ(
      message_of([&] {
        static_cast<void>(decode_records(bytes, {contents_of(plans[0]).shape, kMaxTokens, 4}, 0, {})
        );
      }),
      "plan: records of rank 0 are malformed: slot[1] = 3 (its arrival has row 0)"
  );
}

}  // namespace
}  // namespace weft
