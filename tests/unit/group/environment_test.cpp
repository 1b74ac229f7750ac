// SPDX-License-Identifier: Apache-2.0
#include "group/environment.hpp"

#include <gtest/gtest.h>

#include "group/control_plane.hpp"
#include "group/tcp/socket.hpp"
#include "group_test.hpp"
#include "unit/core/fake_env.hpp"

namespace weft {
namespace {

const std::string kSecret = "0123456789abcdef";

Rendezvous from(Variables variables) {
  variables.emplace("WEFT_SECRET", kSecret);
  return rendezvous_from(env_of(variables));
}

void expect_refused(const Variables& variables, const std::string& text) {
  expect_error(ErrorCode::kInvalidArgument, text, [&] { static_cast<void>(from(variables)); });
}

const Variables kTorchrun = {
    {"RANK", "3"},
    {"WORLD_SIZE", "8"},
    {"LOCAL_WORLD_SIZE", "4"},
    {"MASTER_ADDR", "10.1.2.3"},
    {"MASTER_PORT", "29500"},
    {"TORCHELASTIC_RUN_ID", "job"},
};

const Variables kMpirun = {
    {"OMPI_COMM_WORLD_RANK", "1"},
    {"OMPI_COMM_WORLD_SIZE", "4"},
    {"OMPI_COMM_WORLD_LOCAL_SIZE", "4"},
    {"PMIX_NAMESPACE", "1234567"},
};

const Variables kSrun = {
    {"SLURM_PROCID", "2"},
    {"SLURM_NTASKS", "16"},
    {"SLURM_STEP_NUM_TASKS", "4"},
    {"SLURM_STEP_NUM_NODES", "1"},
    {"SLURM_JOB_ID", "77"},
    {"SLURM_STEP_ID", "0"},
};

Variables with(Variables variables, const std::string& name, const std::string& value) {
  variables[name] = value;
  return variables;
}

Variables without(Variables variables, const std::string& name) {
  variables.erase(name);
  return variables;
}

TEST(EnvironmentTest, NothingSetIsAGroupOfOne) {
  const Rendezvous rendezvous = rendezvous_from(env_of({}));
  EXPECT_EQ(rendezvous.rank, 0);
  EXPECT_EQ(rendezvous.num_ranks, 1);
}

TEST(EnvironmentTest, ReadsItsOwnVariables) {
  const Rendezvous rendezvous = from({
      {"WEFT_RANK", "1"},
      {"WEFT_NUM_RANKS", "2"},
      {"WEFT_ADDRESS", "192.0.2.1"},
      {"WEFT_PORT", "4000"},
      {"WEFT_TIMEOUT_S", "2.5"},
  });
  EXPECT_EQ(rendezvous.rank, 1);
  EXPECT_EQ(rendezvous.num_ranks, 2);
  EXPECT_EQ(rendezvous.address, "192.0.2.1");
  EXPECT_EQ(rendezvous.port, 4000);
  EXPECT_EQ(rendezvous.secret, kSecret);
  EXPECT_EQ(rendezvous.timeout, std::chrono::milliseconds(2500));
}

TEST(EnvironmentTest, ListensOnTheLoopbackAddressUnlessTold) {
  const Variables variables = {{"WEFT_RANK", "1"}, {"WEFT_NUM_RANKS", "2"}, {"WEFT_PORT", "4000"}};
  EXPECT_EQ(from(variables).address, "127.0.0.1");
}

TEST(EnvironmentTest, ReadsTorchrun) {
  const Rendezvous rendezvous = from(kTorchrun);
  EXPECT_EQ(rendezvous.rank, 3);
  EXPECT_EQ(rendezvous.num_ranks, 8);
  EXPECT_EQ(rendezvous.address, "10.1.2.3");
  EXPECT_EQ(rendezvous.port, 29517);
}

TEST(EnvironmentTest, KeepsTorchrunOfOneHostOnTheLoopbackAddress) {
  EXPECT_EQ(from(with(kTorchrun, "LOCAL_WORLD_SIZE", "8")).address, "127.0.0.1");
}

TEST(EnvironmentTest, FindsAPortBelowWhenThereIsNoneAbove) {
  EXPECT_EQ(from(with(kTorchrun, "MASTER_PORT", "65535")).port, 65518);
}

TEST(EnvironmentTest, ReadsMpirun) {
  const Rendezvous rendezvous = from(kMpirun);
  EXPECT_EQ(rendezvous.rank, 1);
  EXPECT_EQ(rendezvous.num_ranks, 4);
  EXPECT_EQ(rendezvous.address, "127.0.0.1");
  EXPECT_GE(rendezvous.port, 20000);
  EXPECT_LT(rendezvous.port, 32000);
}

TEST(EnvironmentTest, ReadsSrun) {
  const Rendezvous rendezvous = from(kSrun);
  EXPECT_EQ(rendezvous.rank, 2);
  EXPECT_EQ(rendezvous.num_ranks, 4);
  EXPECT_EQ(rendezvous.address, "127.0.0.1");
  EXPECT_GE(rendezvous.port, 20000);
  EXPECT_LT(rendezvous.port, 32000);
}

TEST(EnvironmentTest, GroupsOfOneUserHaveSecretsOfTheirOwn) {
  EXPECT_NE(from(kSrun).secret, from(with(kSrun, "SLURM_STEP_ID", "1")).secret);
  EXPECT_NE(from(kMpirun).secret, from(with(kMpirun, "PMIX_NAMESPACE", "2")).secret);
  EXPECT_NE(from(kTorchrun).secret, from(with(kTorchrun, "TORCHELASTIC_RUN_ID", "2")).secret);
}

TEST(EnvironmentTest, AllRanksOfALauncherAgree) {
  const Rendezvous a = from(kSrun);
  const Rendezvous b = from(with(kSrun, "SLURM_PROCID", "0"));
  EXPECT_EQ(a.port, b.port);
  EXPECT_EQ(a.secret, b.secret);
  EXPECT_EQ(b.rank, 0);
}

TEST(EnvironmentTest, ABatchScriptIsNotAStep) {
  EXPECT_EQ(from(without(kSrun, "SLURM_STEP_ID")).num_ranks, 1);
}

TEST(EnvironmentTest, TheInnermostLauncherDecides) {
  Variables all = kSrun;
  all.insert(kMpirun.begin(), kMpirun.end());
  EXPECT_EQ(from(all).rank, 1);
  all.insert(kTorchrun.begin(), kTorchrun.end());
  EXPECT_EQ(from(all).rank, 3);
  all.insert({{"WEFT_RANK", "0"}, {"WEFT_NUM_RANKS", "2"}, {"WEFT_PORT", "4000"}});
  EXPECT_EQ(from(all).num_ranks, 2);
  EXPECT_EQ(launched_ranks(env_of(all)), 2);
}

TEST(EnvironmentTest, OneRankNeedsNeitherPortNorSecret) {
  const Rendezvous rendezvous =
      rendezvous_from(env_of({{"WEFT_RANK", "0"}, {"WEFT_NUM_RANKS", "1"}}));
  EXPECT_EQ(rendezvous.num_ranks, 1);
}

TEST(EnvironmentTest, NamesTheOtherHalf) {
  expect_refused({{"WEFT_RANK", "0"}}, "from_env: WEFT_NUM_RANKS is not set (WEFT_RANK is)");
  expect_refused({{"WEFT_NUM_RANKS", "2"}}, "from_env: WEFT_RANK is not set (WEFT_NUM_RANKS is)");
  expect_refused(
      {{"WEFT_RANK", "0"}, {"WEFT_NUM_RANKS", "100000000"}},
      "environment: WEFT_NUM_RANKS = \"100000000\" is not a whole number in [1, 16384]"
  );
  expect_refused(without(kTorchrun, "RANK"), "from_env: RANK is not set (WORLD_SIZE is)");
  expect_refused(without(kTorchrun, "WORLD_SIZE"), "from_env: WORLD_SIZE is not set (RANK is)");
  expect_refused(
      without(kMpirun, "OMPI_COMM_WORLD_SIZE"),
      "from_env: OMPI_COMM_WORLD_SIZE is not set (OMPI_COMM_WORLD_RANK is)"
  );
  expect_refused(
      without(without(kSrun, "SLURM_NTASKS"), "SLURM_STEP_NUM_TASKS"),
      "from_env: SLURM_NTASKS is not set (SLURM_PROCID is)"
  );
}

TEST(EnvironmentTest, NamesAVariableThatIsNoNumber) {
  expect_refused(
      with(kTorchrun, "RANK", "three"),
      "environment: RANK = \"three\" is not a whole number in [0, 7]"
  );
  expect_refused(
      with(kTorchrun, "RANK", "8"), "environment: RANK = \"8\" is not a whole number in [0, 7]"
  );
  expect_refused(
      with(kTorchrun, "WORLD_SIZE", "0"),
      "environment: WORLD_SIZE = \"0\" is not a whole number in [1, 16384]"
  );
  expect_refused(
      with(kTorchrun, "MASTER_PORT", "70000"),
      "environment: MASTER_PORT = \"70000\" is not a whole number in [1, 65535]"
  );
  expect_refused(
      with(kSrun, "SLURM_PROCID", "-1"),
      "environment: SLURM_PROCID = \"-1\" is not a whole number in [0, 3]"
  );
}

TEST(EnvironmentTest, AsksForThePortAndAddressThatNobodyGave) {
  expect_refused(
      {{"WEFT_RANK", "0"}, {"WEFT_NUM_RANKS", "2"}},
      "from_env: WEFT_PORT is not set (WEFT_NUM_RANKS = 2 ranks need a free port of rank 0's host)"
  );
  expect_refused(
      with(kMpirun, "OMPI_COMM_WORLD_LOCAL_SIZE", "2"),
      "from_env: WEFT_ADDRESS is not set (OMPI_COMM_WORLD_SIZE = 4 ranks on several hosts need"
  );
  expect_refused(
      with(kSrun, "SLURM_STEP_NUM_NODES", "2"),
      "from_env: WEFT_ADDRESS is not set (SLURM_NTASKS = 4 ranks on several hosts need"
  );
}

TEST(EnvironmentTest, AsksForASecretOutsideTheHost) {
  expect_error(
      ErrorCode::kInvalidArgument,
      "from_env: WEFT_SECRET is not set (10.1.2.3 is not a loopback address). Set it, or "
      "WEFT_SECRET_FILE, to the same random text on every rank",
      [] { static_cast<void>(rendezvous_from(env_of(kTorchrun))); }
  );
}

TEST(EnvironmentTest, RefusesAShortSecret) {
  expect_refused(
      with(kTorchrun, "WEFT_SECRET", "short"), "from_env: WEFT_SECRET has 5 B (at least 16)"
  );
}

TEST(FromEnvTest, ConnectsProcessesThatAVariableNames) {
  const int port = [] {
    const Socket listener = listen_on("127.0.0.1", 0, {});
    return port_of(listener);
  }();
  std::vector<int> statuses = run_forked(2, [&](Group& outer) {
    setenv("WEFT_RANK", std::to_string(outer.rank()).c_str(), 1);
    setenv("WEFT_NUM_RANKS", "2", 1);
    setenv("WEFT_PORT", std::to_string(port).c_str(), 1);
    setenv("WEFT_SECRET", kSecret.c_str(), 1);
    const Group group = Group::from_env();
    expect_gathered(group, 2);
    EXPECT_EQ(group.rank(), outer.rank());
    EXPECT_TRUE(Group::is_launched());
    return testing::Test::HasFailure() ? 1 : 0;
  });
  EXPECT_EQ(statuses, (std::vector<int>{0, 0}));
}

}  // namespace
}  // namespace weft
