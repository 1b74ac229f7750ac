// SPDX-License-Identifier: Apache-2.0
#include "simulate/model.hpp"

#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <string>
#include <unistd.h>

#include "support/errors.hpp"

namespace weft::sim {
namespace {

class ModelTest : public testing::Test {
 protected:
  ~ModelTest() override { std::filesystem::remove(path_); }

  void write(const std::string& text) { std::ofstream(path_) << text; }
  std::string refusal() {
    return test::text_of(test::thrown_by([&] { static_cast<void>(load_model(path_)); }));
  }

  const std::string path_ = testing::TempDir() + "weft_model_" + std::to_string(getpid()) + ".json";
};

TEST_F(ModelTest, ComesBackAsItWasSaved) {
  Model model = h200_model();
  set_field(model, "card_gbps", 12.5, "a test");
  write(model_json(model));
  const Model loaded = load_model(path_);
  EXPECT_EQ(loaded.name, "h200");
  for (const ModelField& field : model_fields()) {
    EXPECT_EQ(loaded.*field.value, model.*field.value) << field.name;
  }
  EXPECT_EQ(loaded.origin, model.origin);
  EXPECT_EQ(loaded.origin.at("card_gbps"), "a test");
}

TEST_F(ModelTest, TheBuiltInOneSaysWhereEachNumberIsFrom) {
  const Model model = h200_model();
  for (const ModelField& field : model_fields()) {
    ASSERT_TRUE(model.origin.contains(field.name)) << field.name;
    const std::string& origin = model.origin.find(field.name)->second;
    EXPECT_TRUE(
        origin.starts_with("measured") || origin.starts_with("assumed") ||
        origin.starts_with("by design")
    ) << field.name;
    EXPECT_GE(model.*field.value, field.least) << field.name;
  }
}

TEST_F(ModelTest, RefusesWhatItDoesNotKnow) {
  Model model = h200_model();
  const auto set = [&](std::string_view name, double value) {
    return test::text_of(test::thrown_by([&] { set_field(model, name, value, "a test"); }));
  };
  EXPECT_TRUE(set("card_gpbs", 1).starts_with("card_gpbs is not one of link_gbps, "));
  EXPECT_EQ(set("proxies", 0), "proxies=0 is below 1");
  EXPECT_EQ(model.proxies, 1);
}

TEST_F(ModelTest, NamesTheFaultOfAFile) {
  const std::string good = model_json(h200_model());
  const auto with = [&](const std::string& from, const std::string& to) {
    std::string text = good;
    const size_t at = text.find(from);
    EXPECT_NE(at, std::string::npos);
    return text.replace(at, from.size(), to);
  };
  write("no JSON");
  EXPECT_EQ(refusal(), "load: " + path_ + ": it is not a JSON object");
  write(with("\"values\"", "\"value\""));
  EXPECT_EQ(refusal(), "load: " + path_ + ": /values/link_gbps/value is no number");
  write(with("\"card_gbps\"", "\"card\""));
  EXPECT_EQ(refusal(), "load: " + path_ + ": /values/card_gbps/value is no number");
  write(with("\"value\": 50.0", "\"value\": -1"));
  EXPECT_EQ(refusal(), "load: " + path_ + ": /values/card_gbps is -1 (at least 1e-09)");
  constexpr size_t kDepth = 1'000'000;  // deeper than the stack is
  const std::string nested = std::string(kDepth, '[') + std::string(kDepth, ']');
  write(nested);
  EXPECT_EQ(refusal(), "load: " + path_ + ": it is not a JSON object");
  write(with("\"value\": 50.0", "\"value\": " + nested));
  EXPECT_EQ(refusal(), "load: " + path_ + ": /values/card_gbps/value is no number");
  write(with("\"value\": 50.0", "\"value\": \"fast\""));
  EXPECT_EQ(refusal(), "load: " + path_ + ": /values/card_gbps/value is no number");
}

}  // namespace
}  // namespace weft::sim
