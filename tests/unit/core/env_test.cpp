// SPDX-License-Identifier: Apache-2.0
#include "core/env.hpp"

#include <gtest/gtest.h>

#include <map>

#include "unit/core/fake_env.hpp"
#include "weft/error.hpp"

namespace weft {
namespace {

TEST(EnvTest, HasDefaults) {
  const Env env = env_of({});
  EXPECT_FALSE(env.rank || env.num_ranks || env.address || env.port || env.secret);
  EXPECT_FALSE(env.ranks_per_domain || env.gpu_transport);
  EXPECT_EQ(env.timeout, std::chrono::seconds(60));
  EXPECT_FALSE(env.call_timeout);
  EXPECT_EQ(env.transport, "auto");
  EXPECT_EQ(env.num_threads, 0);
  EXPECT_EQ(env.log_level, LogLevel::kWarn);
}

TEST(EnvTest, ReadsEachVariable) {
  const Env env = env_of({
      {"WEFT_RANK", "3"},
      {"WEFT_NUM_RANKS", "4"},
      {"WEFT_ADDRESS", "::1"},
      {"WEFT_PORT", "65535"},
      {"WEFT_SECRET", "text"},
      {"WEFT_SECRET_FILE", "/file"},
      {"WEFT_TIMEOUT_S", "0.25"},
      {"WEFT_CALL_TIMEOUT_S", "600"},
      {"WEFT_RANKS_PER_DOMAIN", "2"},
      {"WEFT_TRANSPORT", "shm"},
      {"WEFT_GPU_TRANSPORT", "vmm"},
      {"WEFT_NUM_THREADS", "6"},
      {"WEFT_FABRIC_GPU_MEMORY", "direct"},
      {"WEFT_COPY_ENGINES", "always"},
      {"WEFT_LOG", "debug"},
  });
  EXPECT_EQ(env.rank, 3);
  EXPECT_EQ(env.num_ranks, 4);
  EXPECT_EQ(env.address, "::1");
  EXPECT_EQ(env.port, 65535);
  EXPECT_EQ(env.secret, "text");
  EXPECT_EQ(env.secret_file, "/file");
  EXPECT_EQ(env.timeout, std::chrono::milliseconds(250));
  EXPECT_EQ(env.call_timeout, std::chrono::seconds(600));
  EXPECT_EQ(env.ranks_per_domain, 2);
  EXPECT_EQ(env.transport, "shm");
  EXPECT_EQ(env.gpu_transport, "vmm");
  EXPECT_EQ(env.num_threads, 6);
  EXPECT_EQ(env.fabric_gpu_memory, FabricGpuMemory::kDirect);
  EXPECT_EQ(env.copy_engines, CopyEngines::kAlways);
  EXPECT_EQ(env.log_level, LogLevel::kDebug);
}

TEST(EnvTest, AnEmptyVariableIsNotSet) {
  const Env env = env_of({{"WEFT_RANK", ""}, {"WEFT_TRANSPORT", ""}, {"WEFT_TIMEOUT_S", ""}});
  EXPECT_FALSE(env.rank);
  EXPECT_EQ(env.transport, "auto");
  EXPECT_EQ(env.timeout, std::chrono::seconds(60));
}

TEST(EnvTest, CallsAreLoggedByThePythonPackage) {
  EXPECT_EQ(env_of({{"WEFT_LOG", "calls"}}).log_level, LogLevel::kWarn);
}

TEST(EnvTest, NamesTheVariableAndItsValue) {
  const std::map<Variables::value_type, std::string> cases = {
      {{"WEFT_RANK", "one"}, "WEFT_RANK = \"one\" is not a whole number of at least 0"},
      {{"WEFT_RANK", "1x"}, "WEFT_RANK = \"1x\" is not a whole number of at least 0"},
      {{"WEFT_RANK", " 1"}, "WEFT_RANK = \" 1\" is not a whole number of at least 0"},
      {{"WEFT_RANK", "99999999999"}, "WEFT_RANK = \"99999999999\" is not a whole number"},
      {{"WEFT_NUM_RANKS", "0"}, "WEFT_NUM_RANKS = \"0\" is not a whole number of at least 1"},
      {{"WEFT_PORT", "65536"}, "WEFT_PORT = \"65536\" is not a whole number in [1, 65535]"},
      {{"WEFT_RANKS_PER_DOMAIN", "0"}, "WEFT_RANKS_PER_DOMAIN = \"0\" is not a whole number of"},
      {{"WEFT_NUM_THREADS", "-1"}, "WEFT_NUM_THREADS = \"-1\" is not a whole number of at least 0"},
      {{"WEFT_TIMEOUT_S", "soon"}, "WEFT_TIMEOUT_S = \"soon\" is not a number of seconds in"},
      {{"WEFT_TIMEOUT_S", "0"}, "WEFT_TIMEOUT_S = \"0\" is not a number of seconds in"},
      {{"WEFT_TIMEOUT_S", "nan"}, "WEFT_TIMEOUT_S = \"nan\" is not a number of seconds in"},
      {{"WEFT_CALL_TIMEOUT_S", "0"}, "WEFT_CALL_TIMEOUT_S = \"0\" is not a number of seconds in"},
      {{"WEFT_FABRIC_GPU_MEMORY", "on"},
       "WEFT_FABRIC_GPU_MEMORY = \"on\" is not one of auto, direct, host"},
      {{"WEFT_COPY_ENGINES", "sometimes"},
       "WEFT_COPY_ENGINES = \"sometimes\" is not one of auto, never, always"},
      {{"WEFT_LOG", "loud"},
       "WEFT_LOG = \"loud\" is not one of debug, info, warn, error, off, calls"},
  };
  for (const auto& [variable, text] : cases) {
    try {
      static_cast<void>(env_of({variable}));
      ADD_FAILURE() << "accepted " << variable.first << " = " << variable.second;
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
      EXPECT_TRUE(std::string(error.what()).starts_with("environment: " + text)) << error.what();
    }
  }
}

}  // namespace
}  // namespace weft
