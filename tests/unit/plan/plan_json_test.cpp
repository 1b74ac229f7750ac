// SPDX-License-Identifier: Apache-2.0
// Plans as JSON and as files.
#include <nlohmann/json.hpp>

#include <filesystem>
#include <fstream>
#include <unistd.h>

#include "unit/plan/plan_cases.hpp"
#include "weft/version.hpp"

namespace weft {
namespace {

using nlohmann::json;
using testing::message_of;
using testing::random_case;
using testing::sample_plans;

TEST(PlanJsonTest, ReturnsAnEqualPlan) {
  for (uint64_t seed = 0; seed < 60; ++seed) {
    const testing::PlanCase c = random_case(seed);
    for (const Plan& plan : build_plans(c.routes, c.num_experts, c.options, c.row_budgets)) {
      ASSERT_EQ(Plan::from_json(plan.to_json()), plan) << "seed " << seed << ": " << describe(c);
    }
  }
}

TEST(PlanJsonTest, KeepsTheBitsOfEveryWeight) {
  for (const Plan& plan : sample_plans()) {
    EXPECT_EQ(Plan::from_json(plan.to_json()), plan);
  }
}

// A text without it is of the usual order.
TEST(PlanJsonTest, NamesTheOrderOfSumsThatIsNotTheUsualOne) {
  const Plan plan = sample_plans({.order = SumOrder::kTopk})[0];
  json whole = json::parse(plan.to_json());
  EXPECT_EQ(whole["shape"]["order"], "topk");
  EXPECT_EQ(Plan::from_json(plan.to_json()), plan);
  EXPECT_NE(plan, sample_plans()[0]);
  whole["shape"].erase("order");
  EXPECT_EQ(Plan::from_json(whole.dump()), sample_plans()[0]);
}

// Rank 1 has a replica of expert 0.
PlanOptions with_replicas() {
  return {.balance = {.replicas = 1, .placement = {-1, 0}}};
}

TEST(PlanJsonTest, HasReplicas) {
  const Plan plan = sample_plans(with_replicas())[0];
  const json whole = json::parse(plan.to_json());
  EXPECT_EQ(whole["shape"]["replicas"], 1);
  EXPECT_EQ(whole["shape"]["placement"], json({-1, 0}));
  const Plan loaded = Plan::from_json(plan.to_json());
  EXPECT_EQ(loaded, plan);
  EXPECT_EQ(loaded.num_experts(), 4);
  EXPECT_EQ(loaded.num_physical_experts(), 6);
  EXPECT_NE(plan, sample_plans()[0]);
}

TEST(PlanJsonTest, RefusesReplicasThatCannotBe) {
  const json whole = json::parse(sample_plans(with_replicas())[0].to_json());
  const auto with = [&](const char* pointer, const json& value) {
    json changed = whole;
    changed[json::json_pointer(pointer)] = value;
    return message_of([&] { static_cast<void>(Plan::from_json(changed.dump(), "plan.json")); });
  };
  EXPECT_EQ(
      with("/shape/replicas", 3), "load: plan.json: /shape/replicas is 3 (an integer from 1 to 2)"
  );
  EXPECT_EQ(
      with("/shape/placement", {-1}), "load: plan.json: /shape/placement has 1 entries (expected 2)"
  );
  EXPECT_EQ(
      with("/shape/placement", {-1, 4}),
      "load: plan.json: /shape/placement/1 is 4 (an integer from -1 to 3)"
  );
  EXPECT_TRUE(with("/shape/placement", {-1, 2})
                  .starts_with("load: plan.json: /shape/placement fits no plan: plan: "
                               "placement[1, 0] = 2 lies there anyway"));
  EXPECT_TRUE(
      with("/route_expert/0", 2)
          .starts_with("load: plan.json: /route_expert has a route to physical expert 2 (no "
                       "replica is there)")
  );
  EXPECT_TRUE(with("/global_routes/2", 7)
                  .starts_with("load: plan.json: /global_routes has a route to physical expert 2 "
                               "(no replica is there)"));
}

TEST(PlanJsonTest, HasRanksThatWereLost) {
  json whole = json::parse(sample_plans()[0].to_json());
  const Plan usual = Plan::from_json(whole.dump());
  const auto with = [&](const json& lost) {
    whole["shape"]["lost"] = lost;
    return whole.dump();
  };
  const Plan plan = Plan::from_json(with({1}));
  EXPECT_EQ(json::parse(plan.to_json())["shape"]["lost"], json({1}));
  EXPECT_NE(plan, usual);
  EXPECT_EQ(plan.load().mean, 2 * usual.load().mean);
  EXPECT_EQ(
      message_of([&] { static_cast<void>(Plan::from_json(with({0}), "plan.json")); }),
      "load: plan.json: /shape/lost is a list of 1 (other ranks, ascending)"
  );
  EXPECT_NE(message_of([&] { static_cast<void>(Plan::from_json(with({2}))); }), "nothing");
  EXPECT_NE(message_of([&] { static_cast<void>(Plan::from_json(with({1, 1}))); }), "nothing");
}

TEST(PlanJsonTest, IsTheSameTextForTheSamePlan) {
  const Plan plan = sample_plans()[1];
  EXPECT_EQ(Plan::from_json(plan.to_json()).to_json(), plan.to_json());
}

// Faults in the text of rank 0's plan.
class FaultyJsonTest : public ::testing::Test {
 protected:
  [[nodiscard]] static std::string refusal(std::string_view text) {
    return message_of([&] { static_cast<void>(Plan::from_json(text, "plan.json")); });
  }
  [[nodiscard]] std::string with(const char* pointer, const json& value) const {
    json changed = whole_;
    changed[json::json_pointer(pointer)] = value;
    return refusal(changed.dump());
  }
  [[nodiscard]] std::string without(const char* parent, const char* key) const {
    json changed = whole_;
    changed[json::json_pointer(parent)].erase(key);
    return refusal(changed.dump());
  }
  json whole_ = json::parse(sample_plans()[0].to_json());
};

TEST_F(FaultyJsonTest, NamesTheByteWhereTextStopsToBeJson) {
  EXPECT_EQ(refusal(""), "load: plan.json: the file is empty (expected a plan as JSON)");
  EXPECT_EQ(
      refusal("{\"format\": nonsense}").substr(0, 37), "load: plan.json: not JSON at byte 13 "
  );
  const std::string cut = whole_.dump().substr(0, 100);
  EXPECT_EQ(refusal(cut).substr(0, 38), "load: plan.json: not JSON at byte 101 ");
  EXPECT_EQ(refusal("\xff\xfe").substr(0, 33), "load: plan.json: not JSON at byte");
  EXPECT_EQ(refusal("{\"format\": 1e999}"), "load: plan.json: number overflow parsing '1e999'");
}

TEST_F(FaultyJsonTest, NamesForeignFormats) {
  EXPECT_EQ(
      with("/format", "recipe"), "load: plan.json: /format is \"recipe\" (expected \"weft plan\")"
  );
  const std::string why = fmt::format(
      "is 2 (Weft {} reads plans of version 1: save the plan again with it)", weft::version()
  );
  EXPECT_EQ(with("/version", 2), "load: plan.json: /version " + why);
  EXPECT_EQ(
      refusal("[1, 2]"), "load: plan.json: the whole is a list of 2 (an object with \"format\")"
  );
  EXPECT_EQ(refusal("{}"), "load: plan.json: /format is missing");
}

TEST_F(FaultyJsonTest, NamesMissingKeys) {
  EXPECT_EQ(without("/shape", "topk"), "load: plan.json: /shape/topk is missing");
  EXPECT_EQ(without("/sent/1", "slot"), "load: plan.json: /sent/1/slot is missing");
}

TEST_F(FaultyJsonTest, NamesValuesOfAnotherKind) {
  EXPECT_EQ(
      with("/shape/rank", "zero"),
      "load: plan.json: /shape/rank is \"zero\" (an integer from 0 to 1)"
  );
  EXPECT_EQ(with("/shape/from_map", 1), "load: plan.json: /shape/from_map is 1 (true or false)");
  EXPECT_EQ(with("/shape/layout", 1), "load: plan.json: /shape/layout is 1 (a string)");
  EXPECT_EQ(
      with("/shape/layout", "diagonal"),
      "load: plan.json: /shape/layout is \"diagonal\" (\"rank_major\" or \"expert_major\" or "
      "\"expert_strided\")"
  );
  EXPECT_EQ(
      with("/shape/overflow", "explode"),
      "load: plan.json: /shape/overflow is \"explode\" (\"drop\" or \"error\")"
  );
  EXPECT_EQ(
      with("/shape/order", "random"),
      "load: plan.json: /shape/order is \"random\" (\"rank\" or \"topk\")"
  );
  EXPECT_EQ(with("/sent", 5), "load: plan.json: /sent is 5 (a list)");
  EXPECT_EQ(
      with("/sent/0/weight/0", "0xzz"),
      "load: plan.json: /sent/0/weight/0 is \"0xzz\" (a float, or its bits as \"0x7fc00000\")"
  );
}

TEST_F(FaultyJsonTest, NamesValuesOutOfRange) {
  EXPECT_EQ(
      with("/shape/topk", 33), "load: plan.json: /shape/topk is 33 (an integer from 1 to 32)"
  );
  EXPECT_EQ(
      with("/shape/rank", 18446744073709551615U),
      "load: plan.json: /shape/rank is 18446744073709551615 (an integer from 0 to 1)"
  );
  EXPECT_EQ(
      with("/shape/num_experts", 5),
      "load: plan.json: /shape/num_experts is 5 (a multiple of num_ranks = 2)"
  );
  EXPECT_EQ(
      with("/route_expert/2", 4), "load: plan.json: /route_expert/2 is 4 (an integer from -1 to 3)"
  );
  EXPECT_EQ(
      with("/received/1/slot/0", 99),
      "load: plan.json: /received/1 is malformed: slot[0] = 99 is out of range (num_rows = 6)"
  );
}

TEST_F(FaultyJsonTest, NamesWrongLengths) {
  EXPECT_EQ(
      with("/output/expert_begin", json::array({0})),
      "load: plan.json: /output/expert_begin has 1 entries (expected 2)"
  );
  EXPECT_EQ(
      with("/route_slot", json::array()), "load: plan.json: /route_slot has 0 entries (expected 4)"
  );
  EXPECT_EQ(
      with("/shape/num_tokens", 300000000),
      "load: plan.json: /route_expert has 4 entries (expected 600000000)"
  );
}

TEST_F(FaultyJsonTest, NamesPartsThatDisagree) {
  EXPECT_EQ(
      with("/route_slot/0", 3), "load: plan.json: /route_slot/0 is 3 (0 by the rest of the plan)"
  );
  EXPECT_EQ(
      with("/sent/1", whole_["sent"][0]),
      "load: plan.json: /sent/1 disagrees with route_expert (route 0)"
  );
  EXPECT_EQ(
      with("/sent/0", whole_["received"][1]),
      "load: plan.json: /sent/0 disagrees with route_expert (route 0)"
  );
  EXPECT_EQ(
      with("/shape/pad_multiple", 4),
      "load: plan.json: /output/num_rows is 6 (8 by the rest of the plan)"
  );
}

// Routes that were dropped for lack of room are in no list of rows.
TEST(PlanJsonTest, RefusesDroppedRoutesThatAreMissing) {
  const std::vector<RouteTable> routes = {testing::table_of(2, {{0, 1}, {0, 1}, {1, 0}})};
  const std::vector<int64_t> budgets = {4};
  json whole = json::parse(build_plans(routes, 2, {}, budgets)[0].to_json());
  ASSERT_EQ(whole["route_slot"][4], -1);
  ASSERT_EQ(whole["route_expert"][4], 1);
  whole["route_expert"][4] = -1;
  EXPECT_EQ(
      message_of([&] { static_cast<void>(Plan::from_json(whole.dump(), "plan.json")); }),
      "load: plan.json: /route_expert and what is received have 2 routes to expert 1 "
      "(global_routes has 3)"
  );
  whole["route_expert"][4] = 0;
  EXPECT_EQ(
      message_of([&] { static_cast<void>(Plan::from_json(whole.dump(), "plan.json")); }),
      "load: plan.json: /route_expert and what is received have 4 routes to expert 0 "
      "(global_routes has 3)"
  );
}

// Executors follow the output's description without looking at rows again.
TEST_F(FaultyJsonTest, RefusesAnOutputThatTheRoutesDoNotMake) {
  const auto text = [](const char* what) {
    return fmt::format("load: plan.json: /output/{} by the rest of the plan)", what);
  };
  EXPECT_EQ(with("/output/rows_per_expert", {0, 0}), text("rows_per_expert/0 is 0 (4"));
  EXPECT_EQ(with("/output/expert_begin", {0, 0}), text("expert_begin/1 is 0 (4"));
  EXPECT_EQ(with("/output/padded_rows_per_expert/1", 3), text("padded_rows_per_expert/1 is 3 (2"));
  EXPECT_EQ(with("/output/num_rows", 7), text("num_rows is 7 (6"));
  EXPECT_EQ(with("/output/required_rows", 7), text("required_rows is 7 (6"));
  EXPECT_EQ(with("/output/overflow", true), text("overflow is true (false"));
  EXPECT_EQ(
      with("/output/padding", {{0, 4}}),
      "load: plan.json: /output/padding has 1 entries (expected 0)"
  );
  whole_ = json::parse(sample_plans({.layout = Layout::kRankMajor})[0].to_json());
  EXPECT_EQ(with("/output/row_experts/0", 1), text("row_experts/0 is 1 (0"));
}

TEST_F(FaultyJsonTest, RefusesRowsThatTwoArrivalsShareOrNoneHas) {
  EXPECT_EQ(
      with("/received/1/slot/0", 4),
      "load: plan.json: /received/1 has slot[0] = 4 (the next row is 5)"
  );
  const json nobody = {
      {"token", json::array()},
      {"route_begin", {0}},
      {"slot", json::array()},
      {"k", json::array()},
      {"expert", json::array()},
      {"weight", json::array()}};
  EXPECT_EQ(
      with("/received/1", nobody),
      "load: plan.json: /received fills the rows of expert 0 up to 2 (expected 4)"
  );
  EXPECT_EQ(
      with("/received/0/weight/0", 2.0),
      "load: plan.json: /received/0 disagrees with what this rank sends to itself"
  );
  whole_ = json::parse(sample_plans({.layout = Layout::kRankMajor})[0].to_json());
  EXPECT_EQ(
      with("/received/1/slot", {0, 0, 0}),
      "load: plan.json: /received/1 has slot[0] = 0 (the next row is 2)"
  );
}

TEST_F(FaultyJsonTest, RefusesOptionsThatFitNoPlan) {
  const std::string begin = "load: plan.json: /shape fits no plan: plan: ";
  EXPECT_TRUE(with("/shape/expert_stride", 5).starts_with(begin + "expert_stride = 5 with "));
  EXPECT_TRUE(with("/global_routes/0", 2147483647).starts_with(begin + "rank 0 needs 2147483649 "));
}

TEST_F(FaultyJsonTest, PrintsNothingOfValuesThatNestDeeply) {
  constexpr size_t kDepth = 1'000'000;
  const std::string deep = std::string(kDepth, '[') + std::string(kDepth, ']');
  EXPECT_EQ(
      refusal("{\"format\": " + deep + "}"), "load: plan.json: /format is a list of 1 (a string)"
  );
  std::string text = whole_.dump();
  text.replace(text.find("\"num_rows\":6"), 12, "\"num_rows\":" + deep);
  EXPECT_EQ(
      refusal(text), "load: plan.json: /output/num_rows is a list of 1 (6 by the rest of the plan)"
  );
}

class PlanFileTest : public ::testing::Test {
 protected:
  PlanFileTest() { std::filesystem::create_directories(folder_); }
  ~PlanFileTest() override { std::filesystem::remove_all(folder_); }
  std::string folder_ =
      (std::filesystem::temp_directory_path() / fmt::format("weft_plan_test_{}", ::getpid()))
          .string();
  std::string path_ = folder_ + "/plan.json";
};

TEST_F(PlanFileTest, LoadsWhatWasSaved) {
  const Plan plan = sample_plans()[1];
  plan.save(path_);
  EXPECT_EQ(Plan::load(path_), plan);
}

TEST_F(PlanFileTest, LeavesNothingBesideTheFile) {
  sample_plans()[0].save(path_);
  sample_plans()[1].save(path_);
  EXPECT_EQ(Plan::load(path_), sample_plans()[1]);
  const std::filesystem::directory_iterator files(folder_);
  EXPECT_EQ(std::distance(begin(files), end(files)), 1);
}

TEST_F(PlanFileTest, NamesAMissingFile) {
  EXPECT_EQ(
      message_of([&] { static_cast<void>(Plan::load(path_)); }),
      fmt::format("open: {}: No such file or directory (errno 2)", path_)
  );
}

TEST_F(PlanFileTest, NamesAnEmptyFile) {
  std::ofstream(path_).close();
  EXPECT_EQ(
      message_of([&] { static_cast<void>(Plan::load(path_)); }),
      fmt::format("load: {}: the file is empty (expected a plan as JSON)", path_)
  );
}

TEST_F(PlanFileTest, NamesAFolderThatIsNotThere) {
  const std::string nowhere = folder_ + "/absent/plan.json";
  EXPECT_EQ(
      message_of([&] { sample_plans()[0].save(nowhere); }),
      fmt::format("save: {}.unfinished: No such file or directory (errno 2)", nowhere)
  );
}

}  // namespace
}  // namespace weft
