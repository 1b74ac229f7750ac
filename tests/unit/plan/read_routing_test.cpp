// SPDX-License-Identifier: Apache-2.0
#include <memory>

#include "unit/plan/plan_cases.hpp"

namespace weft {
namespace {

using testing::message_of;

constexpr Context kSpeaker = {.rank = 2, .num_ranks = 8};
constexpr int kNumExperts = 16;
constexpr int kMaxTopkHere = 4;
constexpr int64_t kMaxTokens = 100;

RouteTable read(const Routing& routing) {
  return read_routing(routing, kNumExperts, kMaxTopkHere, kMaxTokens, kSpeaker);
}

std::string refusal(const Routing& routing) {
  return message_of([&] { static_cast<void>(read(routing)); });
}

TEST(ReadRoutingTest, ReadsInt64AndInt32Alike) {
  const std::vector<int64_t> wide = {3, -1, 15, 0, 7, 7};
  const std::vector<int32_t> narrow(wide.begin(), wide.end());
  const RouteTable from_wide = read({.topk_idx = matrix(wide.data(), 2, 3)});
  const RouteTable from_narrow = read({.topk_idx = matrix(narrow.data(), 2, 3)});
  EXPECT_EQ(from_wide.expert, narrow);
  EXPECT_EQ(from_narrow.expert, narrow);
  EXPECT_EQ(from_wide.num_tokens, 2);
  EXPECT_EQ(from_wide.topk, 3);
  EXPECT_FALSE(from_wide.from_map);
  EXPECT_FALSE(from_wide.has_weights);
}

TEST(ReadRoutingTest, TakesUnknownExpertsForHolesIfAsked) {
  const std::vector<int64_t> wide = {
      -5, 3, kNumExperts, int64_t{1} << 40, (int64_t{1} << 32) + 3, 0};
  const std::vector<int32_t> narrow = {-5, 3, kNumExperts, 1 << 30, -1, 0};
  const std::vector<int32_t> expected = {-1, 3, -1, -1, -1, 0};
  Routing routing = {.topk_idx = matrix(wide.data(), 2, 3), .ignores_unknown = true};
  EXPECT_EQ(read(routing).expert, expected);
  routing.topk_idx = matrix(narrow.data(), 2, 3);
  EXPECT_EQ(read(routing).expert, expected);
}

TEST(ReadRoutingTest, KeepsWeightsBesideIndices) {
  const std::vector<int32_t> idx = {3, -1, 15, 0};
  const std::vector<float> weights = {0.5F, 1.0F, -2.0F, 0.0F};
  const RouteTable table =
      read({.topk_idx = matrix(idx.data(), 2, 2), .weights = matrix(weights.data(), 2, 2)});
  EXPECT_EQ(table.weight, weights);
  EXPECT_TRUE(table.has_weights);
}

TEST(ReadRoutingTest, AcceptsNoTokens) {
  const RouteTable table = read(
      {.topk_idx = {.dtype = DType::kInt64, .rows = 0, .cols = 3},
       .weights = {.rows = 0, .cols = 3}}
  );
  EXPECT_EQ(table.num_tokens, 0);
  EXPECT_EQ(table.topk, 3);
  EXPECT_TRUE(table.has_weights);
  const RouteTable map = read({.map = {.dtype = DType::kBool, .rows = 0, .cols = kNumExperts}});
  EXPECT_EQ(map.num_tokens, 0);
  EXPECT_EQ(map.topk, kMaxTopkHere);
}

class MapTest : public ::testing::Test {
 protected:
  void set(size_t token, std::initializer_list<size_t> experts) {
    for (const size_t expert : experts) {
      map_[token * kNumExperts + expert] = 1;
    }
  }
  [[nodiscard]] ConstTensor map() const {
    return {
        reinterpret_cast<const std::byte*>(map_.data()),
        DType::kBool,
        static_cast<int64_t>(map_.size()) / kNumExperts,
        kNumExperts};
  }
  std::vector<uint8_t> map_ = std::vector<uint8_t>(3 * kNumExperts);
};

TEST_F(MapTest, ListsExpertsAscendingThenNone) {
  set(0, {15, 0, 8});
  set(2, {7, 6, 5, 4});
  const RouteTable table = read({.map = map()});
  EXPECT_EQ(table.expert, (std::vector<int32_t>{0, 8, 15, -1, -1, -1, -1, -1, 4, 5, 6, 7}));
  EXPECT_EQ(table.topk, kMaxTopkHere);
  EXPECT_TRUE(table.from_map);
}

TEST_F(MapTest, TakesDenseWeightsOfSetExperts) {
  set(1, {2, 9});
  std::vector<float> weights(3 * kNumExperts);
  for (size_t i = 0; i < weights.size(); ++i) {
    weights[i] = static_cast<float>(i);
  }
  const RouteTable table =
      read({.map = map(), .weights = matrix(std::as_const(weights).data(), 3, kNumExperts)});
  EXPECT_EQ(table.weight[4], 18.0F);
  EXPECT_EQ(table.weight[5], 25.0F);
  EXPECT_EQ(table.weight[6], 0.0F);
}

TEST_F(MapTest, ReadsRowsThatAreNoMultipleOfEightExperts) {
  const std::vector<uint8_t> map = {0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 1};
  const ConstTensor view = {reinterpret_cast<const std::byte*>(map.data()), DType::kBool, 1, 11};
  const RouteTable table = read_routing({.map = view}, 11, 2, 10, kSpeaker);
  EXPECT_EQ(table.expert, (std::vector<int32_t>{7, 10}));
}

TEST_F(MapTest, RefusesMoreThanMaxTopk) {
  set(1, {0, 3, 5, 9, 14});
  EXPECT_EQ(refusal({.map = map()}), "plan: map[1] names 5 experts (max_topk = 4) [rank 2/8]");
}

TEST_F(MapTest, PlansLikeTheSameTopkIndices) {
  set(0, {1, 4});
  set(1, {0, 2, 8, 15});
  const RouteTable from_map = read({.map = map()});
  const std::vector<int32_t> idx = {1, 4, -1, -1, 0, 2, 8, 15, -1, -1, -1, -1};
  const RouteTable from_idx = read({.topk_idx = matrix(idx.data(), 3, 4)});
  EXPECT_EQ(from_map.expert, from_idx.expert);
  const Plan a = build_plans(std::span(&from_map, 1), kNumExperts, {})[0];
  const Plan b = build_plans(std::span(&from_idx, 1), kNumExperts, {})[0];
  EXPECT_EQ(contents_of(a).sent, contents_of(b).sent);
  EXPECT_TRUE(a.from_map());
  EXPECT_FALSE(a == b) << "weights have another shape at the source";
}

class RefusalTest : public MapTest {
 protected:
  std::vector<int64_t> idx_ = std::vector<int64_t>(200 * 4, 0);
  std::vector<float> weights_ = std::vector<float>(200 * 4, 0);
  [[nodiscard]] ConstTensor idx(int64_t rows, int64_t cols) const {
    return matrix(idx_.data(), rows, cols);
  }
  [[nodiscard]] ConstTensor weights(int64_t rows, int64_t cols) const {
    return matrix(weights_.data(), rows, cols);
  }
};

TEST_F(RefusalTest, WantsExactlyOneForm) {
  EXPECT_EQ(
      refusal({}), "plan: neither topk_idx nor map is given (exactly one is needed) [rank 2/8]"
  );
  EXPECT_EQ(
      refusal({.topk_idx = idx(2, 2), .map = map()}),
      "plan: topk_idx and map are both given (exactly one is needed) [rank 2/8]"
  );
}

TEST_F(RefusalTest, NamesTheIndexOutOfRange) {
  idx_[17 * 4 + 3] = 260;
  EXPECT_EQ(
      refusal({.topk_idx = idx(20, 4)}),
      "plan: topk_idx[17, 3] = 260 is out of range (num_experts = 16, -1 = no route) [rank 2/8]"
  );
  idx_[17 * 4 + 3] = -2;
  EXPECT_EQ(
      refusal({.topk_idx = idx(20, 4)}),
      "plan: topk_idx[17, 3] = -2 is out of range (num_experts = 16, -1 = no route) [rank 2/8]"
  );
  idx_[17 * 4 + 3] = (int64_t{1} << 32) + 3;  // would be 3 as int32
  EXPECT_EQ(
      refusal({.topk_idx = idx(20, 4)}),
      "plan: topk_idx[17, 3] = 4294967299 is out of range (num_experts = 16, -1 = no route) [rank "
      "2/8]"
  );
}

TEST_F(RefusalTest, NamesTheIndexThatAMapWasMadeOf) {
  idx_[1 * 4 + 3] = 16;
  EXPECT_EQ(
      refusal({.map = map(), .map_indices = idx(3, 4)}),
      "plan: topk_idx[1, 3] = 16 is out of range (num_experts = 16, -1 = no route) [rank 2/8]"
  );
  EXPECT_EQ(
      refusal({.map = map(), .map_indices = idx(2, 4)}),
      "plan: map_indices has shape [2, 4] (expected [3, 4]) [rank 2/8]"
  );
}

TEST_F(RefusalTest, ChecksDtypes) {
  ConstTensor bytes = idx(2, 4);
  bytes.dtype = DType::kFloat32;
  EXPECT_EQ(
      refusal({.topk_idx = bytes}),
      "plan: topk_idx has dtype float32 (expected int64 or int32) [rank 2/8]"
  );
  ConstTensor other_map = map();
  other_map.dtype = DType::kByte;
  EXPECT_EQ(refusal({.map = other_map}), "plan: map has dtype byte (expected bool) [rank 2/8]");
  EXPECT_EQ(
      refusal({.topk_idx = idx(2, 4), .weights = idx(2, 4)}),
      "plan: weights has dtype int64 (expected float32) [rank 2/8]"
  );
}

TEST_F(RefusalTest, ChecksShapes) {
  EXPECT_EQ(
      refusal({.topk_idx = idx(101, 4)}),
      "plan: 101 tokens are too many (max_tokens = 100) [rank 2/8]"
  );
  EXPECT_EQ(
      refusal({.topk_idx = idx(2, 5)}),
      "plan: topk_idx has 5 columns (1 to max_topk = 4) [rank 2/8]"
  );
  EXPECT_EQ(
      refusal({.topk_idx = idx(2, 0)}),
      "plan: topk_idx has 0 columns (1 to max_topk = 4) [rank 2/8]"
  );
  EXPECT_EQ(
      refusal({.topk_idx = idx(-1, 4)}),
      "plan: topk_idx has shape [-1, 4] (sizes cannot be negative) [rank 2/8]"
  );
  ConstTensor narrow = map();
  narrow.cols = 15;
  narrow.row_stride = 15;
  EXPECT_EQ(refusal({.map = narrow}), "plan: map has shape [3, 15] (expected [3, 16]) [rank 2/8]");
  EXPECT_EQ(
      refusal({.topk_idx = idx(2, 4), .weights = weights(4, 2)}),
      "plan: weights has shape [4, 2] (expected [2, 4]) [rank 2/8]"
  );
  EXPECT_EQ(
      refusal({.map = map(), .weights = weights(3, 4)}),
      "plan: weights has shape [3, 4] (expected [3, 16]) [rank 2/8]"
  );
}

TEST_F(RefusalTest, ChecksMemory) {
  ConstTensor strided = idx(2, 3);
  strided.row_stride = 4;
  EXPECT_EQ(
      refusal({.topk_idx = strided}),
      "plan: topk_idx has row stride 4 (expected 3: rows must be adjacent) [rank 2/8]"
  );
  ConstTensor elsewhere = idx(2, 3);
  elsewhere.device = {Device::Kind::kCuda, 1};
  EXPECT_EQ(
      refusal({.topk_idx = elsewhere}),
      "plan: topk_idx is on cuda 1 (the exchange is on cpu) [rank 2/8]"
  );
  EXPECT_EQ(
      refusal({.topk_idx = {.dtype = DType::kInt64, .rows = 2, .cols = 3}}),
      "plan: topk_idx has a null pointer (shape [2, 3]) [rank 2/8]"
  );
  EXPECT_EQ(
      refusal({.topk_idx = idx(2, 4), .weights = {.rows = 2, .cols = 4}}),
      "plan: weights has a null pointer (shape [2, 4]) [rank 2/8]"
  );
}

TEST_F(RefusalTest, IgnoresStrideOfASingleRow) {
  ConstTensor one = idx(1, 3);
  one.row_stride = 9;
  EXPECT_EQ(refusal({.topk_idx = one}), "nothing");
}

TEST_F(RefusalTest, ReadsUnalignedIndices) {
  std::vector<std::byte> bytes(3 * sizeof(int64_t) + 1);
  const ConstTensor view = {bytes.data() + 1, DType::kInt64, 1, 3};
  EXPECT_EQ(read({.topk_idx = view}).expert, (std::vector<int32_t>{0, 0, 0}));
}

}  // namespace
}  // namespace weft
