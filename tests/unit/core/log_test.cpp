// SPDX-License-Identifier: Apache-2.0
#include "core/log.hpp"

#include <gtest/gtest.h>

#include <regex>
#include <thread>

namespace weft {
namespace {

std::string logged(LogLevel level, const std::function<void()>& action) {
  set_log_level(level);
  testing::internal::CaptureStderr();
  action();
  set_log_level(LogLevel::kWarn);
  return testing::internal::GetCapturedStderr();
}

TEST(LogTest, NamesTheRankOfItsThread) {
  const std::string text = logged(LogLevel::kInfo, [] {
    std::jthread([] {
      set_log_rank(2, 8);
      log(LogLevel::kInfo, "seen {} of {}", 3, "five");
    });
  });
  const std::regex expected(R"(\d\d:\d\d:\d\d\.\d{3} weft info \[rank 2/8\] seen 3 of five\n)");
  EXPECT_TRUE(std::regex_match(text, expected)) << text;
}

TEST(LogTest, IsSilentBelowItsLevel) {
  const auto talk = [] {
    log(LogLevel::kDebug, "quiet");
    log(LogLevel::kWarn, "aloud");
  };
  EXPECT_EQ(logged(LogLevel::kError, talk), "");
  EXPECT_EQ(logged(LogLevel::kOff, talk), "");
  const std::string text = logged(LogLevel::kWarn, talk);
  EXPECT_NE(text.find("weft warning aloud"), std::string::npos) << text;
  EXPECT_EQ(text.find("quiet"), std::string::npos) << text;
}

}  // namespace
}  // namespace weft
