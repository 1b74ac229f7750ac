// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <functional>

#include "call/validate.hpp"
#include "support/errors.hpp"

namespace weft::test {
namespace {

const Context kContext = {.rank = 0, .num_ranks = 2, .transport = "shm"};

ExchangeConfig good_config() {
  return {.hidden = 32, .max_tokens = 64, .num_experts = 8, .max_topk = 4, .device = {}};
}

struct BadConfig {
  std::function<void(ExchangeConfig&)> spoil;
  std::string text;
};

TEST(ValidateConfigTest, NamesFieldValueAndBound) {
  const std::vector<BadConfig> cases = {
      {[](auto& c) { c.hidden = 0; }, "exchange: hidden = 0 (expected 1 to 2147483647)"},
      {[](auto& c) { c.max_tokens = -1; }, "exchange: max_tokens = -1 (expected 0 to 1073741823)"},
      {[](auto& c) { c.max_tokens = 1 << 30; },
       "exchange: max_tokens = 1073741824 (expected 0 to 1073741823)"},
      {[](auto& c) { c.num_experts = 0; }, "exchange: num_experts = 0 (expected 1 to 2147483647)"},
      {[](auto& c) { c.num_experts = 7; },
       "exchange: num_experts = 7 (expected a multiple of num_ranks = 2)"},
      {[](auto& c) { c.max_topk = 0; }, "exchange: max_topk = 0 (expected 1 to 32)"},
      {[](auto& c) { c.max_topk = 33; }, "exchange: max_topk = 33 (expected 1 to 32)"},
      {[](auto& c) { c.num_threads = -1; }, "exchange: num_threads = -1 (expected 0 to 1024)"},
      {[](auto& c) { c.timeout = std::chrono::milliseconds(0); },
       "exchange: timeout = 0 (expected 1 to 1000000000)"},
      {[](auto& c) { c.num_threads = 1025; }, "exchange: num_threads = 1025 (expected 0 to 1024)"},
      {[](auto& c) { c.timeout = std::chrono::milliseconds::max(); },
       "exchange: timeout = 9223372036854775807 (expected 1 to 1000000000)"},
      {[](auto& c) { c.hidden = int64_t{1} << 31; },
       "exchange: hidden = 2147483648 (expected 1 to 2147483647)"}};
  for (const BadConfig& bad : cases) {
    ExchangeConfig config = good_config();
    validate_config(config, kContext);
    bad.spoil(config);
    const auto thrown = thrown_by([&] { validate_config(config, kContext); });
    EXPECT_EQ(text_of(thrown), bad.text + " [rank 0/2, shm]");
    EXPECT_EQ(thrown->code, ErrorCode::kInvalidArgument);
  }
}

TEST(ValidateConfigTest, AcceptsAGpu) {
  ExchangeConfig config = good_config();
  config.device = {Device::Kind::kCuda, 2};
  EXPECT_NO_THROW(validate_config(config, kContext));
}

}  // namespace
}  // namespace weft::test
