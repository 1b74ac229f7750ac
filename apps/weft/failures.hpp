// SPDX-License-Identifier: Apache-2.0
// What went wrong on which ranks, said once.
#pragma once

#include <array>
#include <exception>
#include <map>
#include <mutex>
#include <string>
#include <vector>

namespace weft::program {

struct Failure {
  int rank = 0;
  bool is_echo = false;  // of another rank's failure: its peer left, died or did not answer
  std::string text;
};

[[nodiscard]] Failure failure_of(int rank, const std::exception& error);

// Any thread may add.
class Failures {
 public:
  void add(const Failure& failure);
  void add_killed(int rank, int signal);
  // One line on stderr per distinct reason. Echoes are left out where a rank said what began it; a
  // killed rank cannot say it, so there they are shown.
  void print(const std::string& command) const;

 private:
  struct Entry {
    std::string text;
    bool is_echo = false;
    std::vector<int> ranks;
  };

  std::mutex mutex_;
  bool has_cause_ = false;
  std::map<std::string, Entry> entries_;  // by what texts of several ranks have in common
  std::vector<const Entry*> order_;
};

// Carries failures of forked ranks to their parent. Each is one atomic write, so ranks need no
// lock; a full pipe loses some rather than hold a dying rank.
class FailurePipe {
 public:
  FailurePipe();
  FailurePipe(const FailurePipe&) = delete;
  FailurePipe& operator=(const FailurePipe&) = delete;
  ~FailurePipe();

  void send(const Failure& failure);
  void receive_all(Failures& failures);

 private:
  std::array<int, 2> ends_ = {-1, -1};
};

}  // namespace weft::program
