// SPDX-License-Identifier: Apache-2.0
#include "failures.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cstring>
#include <fcntl.h>
#include <regex>
#include <unistd.h>

#include "core/check.hpp"

namespace weft::program {
namespace {

// The text without its speaker and without the rank it came from, as in
// "... on rank 0 [rank 2/4, shm] at file:line".
std::string gist(const std::string& text) {
  static const std::regex speaker(R"((,? on rank \d+)? \[rank \d+/\d+.*$)");
  return std::regex_replace(text, speaker, "");
}

struct Record {
  int rank;
  bool is_echo;
  std::array<char, 2000> text;  // below PIPE_BUF
};

}  // namespace

Failure failure_of(int rank, const std::exception& error) {
  Failure failure = {rank, false, error.what()};
  if (const auto* ours = dynamic_cast<const Error*>(&error)) {
    const ErrorCode code = ours->code();
    failure.is_echo = code == ErrorCode::kPeerFailed || code == ErrorCode::kTimeout ||
                      code == ErrorCode::kTransport;
  }
  return failure;
}

void Failures::add(const Failure& failure) {
  const std::lock_guard lock(mutex_);
  has_cause_ = has_cause_ || !failure.is_echo;
  Entry& entry = entries_[gist(failure.text)];
  if (entry.ranks.empty()) {
    order_.push_back(&entry);
  }
  if (entry.text.empty() || failure.text.size() < entry.text.size()) {
    entry.text = failure.text;
  }
  entry.is_echo = failure.is_echo;
  entry.ranks.push_back(failure.rank);
}

void Failures::add_killed(int rank, int signal) {
  const std::lock_guard lock(mutex_);
  Entry& entry = entries_[fmt::format("killed {}", rank)];
  entry.text = fmt::format("rank {} was ended by signal {} ({})", rank, signal, strsignal(signal));
  entry.ranks = {rank};
  order_.push_back(&entry);
}

void Failures::print(const std::string& command) const {
  for (const Entry* entry : order_) {
    if (entry->is_echo && has_cause_) {
      continue;
    }
    std::vector<int> ranks = entry->ranks;
    std::sort(ranks.begin(), ranks.end());
    const std::string who = fmt::format(" (so say ranks {})", fmt::join(ranks, ", "));
    fmt::print(stderr, "weft {}: {}{}\n", command, entry->text, ranks.size() > 1 ? who : "");
  }
}

FailurePipe::FailurePipe() {
  WEFT_SYS(Context{}, ErrorCode::kNotAvailable, pipe2(ends_.data(), O_NONBLOCK | O_CLOEXEC));
}

FailurePipe::~FailurePipe() {
  close(ends_[0]);
  close(ends_[1]);
}

void FailurePipe::send(const Failure& failure) {
  Record record = {failure.rank, failure.is_echo, {}};
  std::strncpy(record.text.data(), failure.text.c_str(), record.text.size() - 1);
  static_cast<void>(!write(ends_[1], &record, sizeof(record)));
}

void FailurePipe::receive_all(Failures& failures) {
  Record record = {};
  while (read(ends_[0], &record, sizeof(record)) == static_cast<ssize_t>(sizeof(record))) {
    failures.add({record.rank, record.is_echo, record.text.data()});
  }
}

}  // namespace weft::program
