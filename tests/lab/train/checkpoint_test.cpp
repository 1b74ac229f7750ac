// SPDX-License-Identifier: Apache-2.0
#include "train/checkpoint.hpp"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <optional>
#include <sstream>
#include <sys/stat.h>
#include <unistd.h>

#include "training_runs.hpp"
#include "weft/error.hpp"

namespace weft::moe {
namespace {

namespace fs = std::filesystem;

constexpr int kRanks = 2;

std::string read_file(const fs::path& path) {
  std::ifstream in(path, std::ios::binary);
  std::ostringstream text;
  text << in.rdbuf();
  return text.str();
}

void write_file(const fs::path& path, const std::string& bytes) {
  std::ofstream(path, std::ios::binary) << bytes;
}

struct CheckpointFixture : testing::Test {
  CheckpointFixture() {
    std::string pattern = (fs::temp_directory_path() / "weft-checkpoint-XXXXXX").string();
    folder = ::mkdtemp(pattern.data());
    path = (folder / "state.weft").string();
  }
  ~CheckpointFixture() override { fs::remove_all(folder); }

  // Trains `num_steps` and saves.
  TrainingRun save_after(int num_ranks, const TrainConfig& config, int num_steps) {
    return train(num_ranks, config, num_steps, {}, [&](Trainer& t) { t.save(path); });
  }
  TrainingRun resume_and_train(int num_ranks, const TrainConfig& config, int num_steps) {
    return train(num_ranks, config, num_steps, [&](Trainer& t) { t.resume(path); });
  }
  // Expects that resuming fails with a message that names the file and holds `text`, and that the
  // trainer is then as it was.
  void expect_refused(const TrainConfig& config, const std::string& text) {
    const uint64_t untouched = train(kRanks, config, 0).fingerprint;
    std::string message;
    const TrainingRun run = train(kRanks, config, 0, [&](Trainer& trainer) {
      try {
        trainer.resume(path);
        ADD_FAILURE() << "resumed; expected: " << text;
      } catch (const Error& error) {
        EXPECT_EQ(error.code(), ErrorCode::kFile);
        EXPECT_NE(std::string(error.what()).find(path), std::string::npos) << error.what();
        EXPECT_NE(std::string(error.what()).find(text), std::string::npos) << error.what();
      }
      EXPECT_EQ(trainer.steps_done(), 0);
    });
    EXPECT_EQ(run.fingerprint, untouched);
  }

  fs::path folder;
  std::string path;
};

using CheckpointTest = CheckpointFixture;

TEST_F(CheckpointTest, ResumedRunIsBitEqualToTheUninterruptedOne) {
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) {
    TrainConfig config = small_config();
    config.dtype = dtype;
    const TrainingRun whole = train(kRanks, config, 10);
    save_after(kRanks, config, 6);
    const TrainingRun rest = resume_and_train(kRanks, config, 4);
    EXPECT_EQ(rest.fingerprint, whole.fingerprint);
    for (size_t i = 0; i < rest.reports.size(); ++i) {
      EXPECT_EQ(rest.reports[i].step, whole.reports[6 + i].step);
      EXPECT_EQ(rest.reports[i].loss, whole.reports[6 + i].loss) << "step " << 6 + i;
    }
  }
}

TEST_F(CheckpointTest, ResumesWithAnotherNumberOfRanks) {
  const TrainingRun whole = train(2, small_config(), 10);
  const TrainingRun saved = save_after(2, small_config(), 6);
  for (const int num_ranks : {1, 4, 8}) {
    EXPECT_EQ(resume_and_train(num_ranks, small_config(), 0).fingerprint, saved.fingerprint);
    EXPECT_EQ(resume_and_train(num_ranks, small_config(), 4).fingerprint, whole.fingerprint);
  }
}

TEST_F(CheckpointTest, IsTheSameFileForAnyNumberOfRanks) {
  save_after(1, small_config(), 0);
  const std::string one = read_file(path);
  save_after(4, small_config(), 0);
  EXPECT_EQ(read_file(path), one);
}

TEST_F(CheckpointTest, LetsTheLearningRateChange) {
  save_after(kRanks, small_config(), 2);
  TrainConfig config = small_config();
  config.learning_rate /= 2;
  config.warmup_steps = 100;
  EXPECT_EQ(resume_and_train(kRanks, config, 1).reports.back().step, 3);
}

TEST_F(CheckpointTest, RefusesAMissingFile) {
  expect_refused(small_config(), "No such file");
}

TEST_F(CheckpointTest, RefusesAnEmptyFile) {
  write_file(path, "");
  expect_refused(small_config(), "not a checkpoint");
}

TEST_F(CheckpointTest, RefusesAForeignFile) {
  write_file(path, std::string(10000, 'x'));
  expect_refused(small_config(), "not a checkpoint");
}

TEST_F(CheckpointTest, RefusesATruncatedFile) {
  save_after(kRanks, small_config(), 1);
  const std::string whole = read_file(path);
  for (const size_t size : {whole.size() - 4, kHeaderBytes}) {
    write_file(path, whole.substr(0, size));
    expect_refused(small_config(), fmt::format("{} B", size));
  }
  write_file(path, whole.substr(0, 100));
  expect_refused(small_config(), "header is damaged");
}

TEST_F(CheckpointTest, RefusesAFlippedBitAnywhere) {
  save_after(kRanks, small_config(), 1);
  const std::string whole = read_file(path);
  const std::pair<size_t, const char*> cases[] = {
      {3, "not a checkpoint"},
      {25, "header is damaged"},
      {100, "header is damaged"},
      {kHeaderBytes, "parameters are damaged"},
      {whole.size() / 2, "parameters are damaged"},
      {whole.size() - 1, "parameters are damaged"}};
  for (const auto& [at, text] : cases) {
    std::string damaged = whole;
    damaged[at] = static_cast<char>(damaged[at] ^ 4);
    write_file(path, damaged);
    expect_refused(small_config(), text);
  }
}

TEST_F(CheckpointTest, NamesTheFieldThatDiffers) {
  save_after(kRanks, small_config(), 1);
  TrainConfig config = small_config();
  config.model.topk = 3;
  expect_refused(config, "topk = 2 (3 in this run)");
  config = small_config();
  config.seed = 6;
  expect_refused(config, "seed = 5 (6 in this run)");
  config = small_config();
  config.dtype = DType::kBFloat16;
  expect_refused(config, "dtype = \"float32\" (\"bfloat16\" in this run)");
  config = small_config();
  config.model.hidden = 32;
  expect_refused(config, "hidden = 16 (32 in this run)");
}

TEST_F(CheckpointTest, AFailedSaveLeavesTheOldFileWhole) {
  save_after(kRanks, small_config(), 1);
  const std::string before = read_file(path);
  // Something in the way of the unfinished file, as a full disk would be.
  fs::create_directory(path + ".unfinished");
  train(kRanks, small_config(), 2, {}, [&](Trainer& trainer) {
    try {
      trainer.save(path);
      ADD_FAILURE() << "saved";
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kFile);
      EXPECT_NE(std::string(error.what()).find(path + ".unfinished"), std::string::npos);
    }
    trainer.step();  // still usable
  });
  EXPECT_EQ(read_file(path), before);
}

TEST_F(CheckpointTest, LeavesNothingButTheCheckpoint) {
  write_file(path + ".unfinished", "left by a crash");
  save_after(kRanks, small_config(), 1);
  const auto files = std::distance(fs::directory_iterator(folder), fs::directory_iterator());
  EXPECT_EQ(files, 1);
  EXPECT_EQ(resume_and_train(kRanks, small_config(), 1).reports.back().step, 2);
}

TEST_F(CheckpointTest, KeepsTheModeOfTheFileAndTheLinkToIt) {
  const fs::path file = folder / "file.weft";
  fs::create_symlink("file.weft", path);
  save_after(kRanks, small_config(), 1);
  fs::permissions(file, fs::perms::owner_read | fs::perms::owner_write);
  save_after(kRanks, small_config(), 2);
  EXPECT_TRUE(fs::is_symlink(path));
  EXPECT_EQ(fs::status(file).permissions(), fs::perms::owner_read | fs::perms::owner_write);
  EXPECT_EQ(checkpoint_steps(path), 2);
}

TEST_F(CheckpointTest, NeverReplacesWhatIsNoFile) {
  ASSERT_EQ(::mkfifo(path.c_str(), 0600), 0);
  EXPECT_THROW(save_after(kRanks, small_config(), 1), Error);
  EXPECT_TRUE(fs::is_fifo(path));
}

TEST_F(CheckpointTest, IsNotWrittenThroughALinkInItsWay) {
  write_file(folder / "other", "of somebody else");
  fs::create_symlink("other", path + ".unfinished");
  EXPECT_THROW(save_after(kRanks, small_config(), 1), Error);
  EXPECT_EQ(read_file(folder / "other"), "of somebody else");
}

TEST_F(CheckpointTest, TellsItsStepsToWhomeverMayOverwriteIt) {
  EXPECT_EQ(checkpoint_steps(path), std::nullopt);
  save_after(kRanks, small_config(), 3);
  EXPECT_EQ(checkpoint_steps(path), 3);
  write_file(path, "something else");
  EXPECT_THROW(static_cast<void>(checkpoint_steps(path)), Error);
}

TEST_F(CheckpointTest, NamesAFolderThatDoesNotExist) {
  path = (folder / "none" / "state.weft").string();
  try {
    save_after(kRanks, small_config(), 0);
    FAIL() << "saved";
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find(path), std::string::npos) << error.what();
  }
}

TEST(ChecksumTest, OfPiecesAddsUpToThatOfTheWhole) {
  const std::vector<float> elements = {1, 2, 3, 4, 5};
  const std::span all(elements);
  EXPECT_EQ(checksum(all, 7), checksum(all.first(2), 7) + checksum(all.subspan(2), 9));
}

TEST(ChecksumTest, SeesSwappedElements) {
  EXPECT_NE(checksum(std::vector<float>{1, 2}, 0), checksum(std::vector<float>{2, 1}, 0));
}

}  // namespace
}  // namespace weft::moe
