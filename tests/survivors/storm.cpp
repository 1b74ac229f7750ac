// SPDX-License-Identifier: Apache-2.0
#include "survivors/storm.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <csignal>
#include <optional>
#include <string>
#include <string_view>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <thread>
#include <unistd.h>
#include <utility>
#include <vector>

#include "group/control_plane.hpp"
#include "support/run_case.hpp"
#include "support/watch.hpp"
#include "survivors/fates.hpp"
#include "survivors/shared.hpp"
#include "survivors/survivors.hpp"

namespace weft::test {
namespace {

using namespace std::chrono_literals;

// Shared memory by which the processes of a storm talk.
struct Board {
  using Numbers = std::array<std::atomic<int>, kMostRanks>;  // by rank
  Numbers pid = {};
  Numbers came = {};    // the return with which the rank's process was started, 0: none
  Numbers is_in = {};   // that process is a rank
  Numbers wanted = {};  // the return with which one shall come in its place; 0: none
  // Last return: its number, and the round from which all go on.
  std::atomic<int> number = 0;
  std::atomic<uint64_t> round = 0;
  std::array<char, 2048> invitation = {};
  std::atomic<bool> is_over = false;
  std::array<StormCount, kMostRanks> counts = {};  // of those who came, by rank
};

// Thrown by a rank that leaves between two calls.
struct Leaves {};

bool says(const std::exception& error, std::string_view what) {
  return std::string_view(error.what()).find(what) != std::string_view::npos;
}

// A rank of a storm, as its process runs it.
class StormRank {
 public:
  // number: of the return with which it comes; 0: it is there from the beginning.
  // comes_again: the one that came before with that return was lost.
  StormRank(
      const Storm& storm,
      int rank,
      Board& board,
      const Fate& fate,
      int number = 0,
      bool comes_again = false
  )
      : storm_(storm),
        rank_(rank),
        fate_(fate),
        number_(number),
        comes_again_(comes_again),
        board_(board),
        watch_(1, storm.bound / 2) {
    board.pid[static_cast<size_t>(rank)] = ::getpid();
    board.came[static_cast<size_t>(rank)] = number;
    ::alarm(static_cast<unsigned>(storm.bound.count()));
  }

  // Runs the rank. Returns what went wrong; empty if all is right.
  std::string run(const Group& group) {
    try {
      begin(group);
      return run_rounds();
    } catch (const Leaves&) {
      exchange_.reset();
      std::this_thread::sleep_for(std::chrono::milliseconds(storm_.seed % 3 * 20));
      return "";
    } catch (const PeerError& error) {
      const bool may_be = fate_.end == End::kStopped || fate_.end == End::kMasked;
      return may_be && says(error, "was given up by the others") ? "" : error.what();
    } catch (const std::exception& error) {
      return error.what();
    }
  }

 private:
  void begin(const Group& group) {
    ExchangeConfig config = storm_.setup.config();
    config.on_peer_loss = PeerLoss::kShrink;
    config.on_loss = [this](const CallReport& /*report*/) { meet(fate_.when == When::kLoss); };
    if (number_ == 0) {
      exchange_.emplace(make_exchange(group, storm_.setup, config));
      group.barrier();
      start_clock();
    } else {
      if (!comes_again_) {
        start_clock();
      }
      exchange_.emplace(make_exchange(group, storm_.setup, config));
      board_.is_in[static_cast<size_t>(rank_)] = 1;
      number_ = board_.number;
      call_back(board_.round);
      if (comes_again_) {  // not before: all would call each other back for ever
        start_clock();
      }
    }
  }

  std::string run_rounds() {
    const SurvivorRounds rounds(storm_.setup, storm_.spec);
    for (uint64_t round = board_.round;; ++round) {
      std::string problem = rounds.run(*exchange_, storm_.seed + round, [&](int call) {
        check_masked();
        if (call < 3) {
          begin_step();
        }
      });
      problem += problem_;
      if (!problem.empty()) {
        return problem;
      }
      const size_t num_alive = exchange_->report().alive.size();
      const bool is_last_life = number_ == storm_.num_returns;
      if (num_alive == 1 && is_last_life) {
        return "";
      }
      const bool is_time = num_alive == 1 || calls_back(storm_, round);
      if (num_alive < storm_.fates[0].size() && !is_last_life && is_time) {
        ++number_;
        call_back(round + 1);
      }
    }
  }

  // Until all are there, who begin with `round`.
  void call_back(uint64_t round) {
    for (;;) {
      const std::vector<int> alive = exchange_->report().alive;
      std::vector<int> lost;
      for (int rank = 0; rank < storm_.setup.num_ranks; ++rank) {
        if (!std::ranges::binary_search(alive, rank)) {
          lost.push_back(rank);
        }
      }
      if (rank_ == storm_.last) {
        want(lost, round);
      }
      if (lost.empty()) {
        return;
      }
      watch_.enter(0, "readmit");
      ::alarm(static_cast<unsigned>(storm_.bound.count()));
      try {
        exchange_->readmit(lost);
      } catch (const PeerError& error) {
        if (!says(error, "was lost again")) {
          throw;
        }
      }
    }
  }

  void want(const std::vector<int>& lost, uint64_t round) {
    board_.number = number_;
    board_.round = round;
    if (board_.invitation[0] == 0) {
      exchange_->invitation().copy(board_.invitation.data(), board_.invitation.size() - 1);
    }
    for (int rank = 0; rank < storm_.setup.num_ranks; ++rank) {
      const bool is_lost = std::ranges::binary_search(lost, rank);
      board_.wanted[static_cast<size_t>(rank)] = is_lost ? number_ : 0;
    }
  }

  void start_clock() {
    if (fate_.end == End::kNone || fate_.end == End::kMasked || fate_.end == End::kLeft) {
      return;
    }
    // A rank whose call or loss does not come is lost all the same, 2 s late.
    const auto after = fate_.when == When::kTime ? fate_.time : fate_.time + 2s;
    std::thread([this, after] {
      std::this_thread::sleep_for(after);
      meet(true);
    }).detach();
  }

  // The fate of this rank, if it is time.
  void meet(bool is_time) {
    if (is_time && fate_.end == End::kKilled) {
      std::raise(SIGKILL);
    }
    if (is_time && fate_.end == End::kStopped && !has_stopped_.exchange(true)) {
      ::kill(::getpid(), SIGSTOP);
    }
  }

  void check_masked() {
    const std::vector<int> alive = exchange_->report().alive;
    for (const int rank : masked_) {
      if (std::ranges::binary_search(alive, rank)) {
        problem_ = fmt::format("rank {} was masked before a call and is alive after it", rank);
      }
    }
    masked_.clear();
  }

  void begin_step() {
    watch_.enter(0, "a call");
    ::alarm(static_cast<unsigned>(storm_.bound.count()));
    const std::vector<int> alive = exchange_->report().alive;
    const auto lives = [&](int rank) { return std::ranges::binary_search(alive, rank); };
    for (int rank = 0; rank < storm_.setup.num_ranks; ++rank) {
      const auto at = static_cast<size_t>(rank);
      const Fate& fate = storm_.fates[static_cast<size_t>(board_.came[at])][at];
      // If the one who should mask it is lost, the last one does.
      const bool is_time = step_ >= fate.step && (rank_ == fate.masker || step_ >= fate.step + 20);
      if (fate.end == End::kMasked && rank != rank_ && lives(rank) && is_time &&
          (rank_ == fate.masker || rank_ == storm_.last)) {
        masked_.push_back(rank);
      }
      if (fate.end == End::kStopped && rank_ == storm_.last && !lives(rank)) {
        ::kill(board_.pid[static_cast<size_t>(rank)], SIGCONT);
      }
    }
    if (!masked_.empty()) {
      exchange_->mask(masked_);
    }
    if (fate_.end == End::kLeft && step_ >= fate_.step) {
      throw Leaves();
    }
    meet(fate_.when == When::kStep && step_ == fate_.step);
    ++step_;
  }

  const Storm& storm_;
  int rank_;
  Fate fate_;
  int number_;  // of the last return
  bool comes_again_;
  Board& board_;
  Watch watch_;
  std::optional<Exchange> exchange_;
  int step_ = 0;
  std::atomic<bool> has_stopped_ = false;
  std::vector<int> masked_;
  std::string problem_;
};

// One more process has ended. status: 128 + signal if it was killed.
void add(StormCount& count, End end, int status) {
  if (status == 128 + SIGALRM || status == 128 + SIGTERM) {
    ++count.hung;
  } else if (status != (end == End::kKilled ? 128 + SIGKILL : 0)) {
    ++count.wrong;
  } else {
    count.killed += end == End::kKilled ? 1 : 0;
    count.stopped += end == End::kStopped ? 1 : 0;
    count.left += end == End::kLeft ? 1 : 0;
    count.masked += end == End::kMasked ? 1 : 0;
  }
}

int run_rank(StormRank& rank, const Storm& storm, const Group& group) {
  const std::string problem = rank.run(group);
  if (!problem.empty()) {
    fmt::print(stderr, "storm {}, rank {}: {}\n", storm.seed, group.rank(), problem);
  }
  return problem.empty() ? 0 : 1;
}

// A process that sees to it that one comes in the place of a rank whenever that is wanted.
class Supervisor {
 public:
  Supervisor(const Storm& storm, int rank, Board& board)
      : storm_(storm), rank_(rank), at_(static_cast<size_t>(rank)), board_(board), pid_(::fork()) {
    if (pid_ == 0) {
      ::prctl(PR_SET_PDEATHSIG, SIGKILL);
      run();
      ::_exit(0);
    }
  }
  [[nodiscard]] bool has_ended_well() const {
    int status = 0;
    return ::waitpid(pid_, &status, 0) == pid_ && status == 0;
  }

 private:
  void run() {
    while (!board_.is_over) {
      const int number = board_.wanted[at_];
      if (number > 0) {
        const bool comes_again = std::exchange(last_number_, number) == number;
        Fate fate = storm_.fates[static_cast<size_t>(number)][at_];
        if (comes_again) {  // it is not lost on its way again
          fate.when = When::kStep;
        }
        const pid_t child = ::fork();
        if (child == 0) {
          ::prctl(PR_SET_PDEATHSIG, SIGKILL);
          StormRank rank(storm_, rank_, board_, fate, number, comes_again);
          ::_exit(run_rank(rank, storm_, Group::rejoin(rank_, board_.invitation.data())));
        }
        await(child, fate.end);
      }
      std::this_thread::sleep_for(1ms);
    }
  }

  void await(pid_t child, End end) {
    int status = 0;
    bool is_late = false;
    while (::waitpid(child, &status, WNOHANG) == 0) {
      // It shall not be there when the next is called.
      if (!is_late && board_.is_in[at_] == 0 && (board_.wanted[at_] == 0 || board_.is_over)) {
        is_late = true;
        ::kill(child, SIGKILL);
      }
      std::this_thread::sleep_for(1ms);
    }
    StormCount& count = board_.counts[at_];
    count.returned += board_.is_in[at_].exchange(0);
    if (!is_late) {
      add(count, end, WIFSIGNALED(status) ? 128 + WTERMSIG(status) : WEXITSTATUS(status));
    }
  }

  const Storm& storm_;
  int rank_;
  size_t at_;
  Board& board_;
  int last_number_ = 0;
  pid_t pid_;
};

}  // namespace

StormCount& StormCount::operator+=(const StormCount& other) {
  killed += other.killed;
  stopped += other.stopped;
  left += other.left;
  masked += other.masked;
  returned += other.returned;
  wrong += other.wrong;
  hung += other.hung;
  return *this;
}

StormCount run_storm(uint64_t seed, const StormLimits& limits) {
  const Storm storm = make_storm(seed, limits);
  const Shared<Board> board;
  std::vector<Supervisor> supervisors;
  for (int rank = 0; storm.num_returns > 0 && rank < storm.setup.num_ranks; ++rank) {
    supervisors.emplace_back(storm, rank, *board);
  }
  const auto body = [&](const Group& group) {
    const auto at = static_cast<size_t>(group.rank());
    StormRank rank(storm, group.rank(), *board, storm.fates[0][at]);
    const int status = run_rank(rank, storm, group);
    if (group.rank() == storm.last) {
      for (const auto& pid : board->pid) {
        if (pid != 0 && pid != ::getpid()) {
          ::kill(pid, SIGCONT);
        }
      }
    }
    return status;
  };
  // Their own alarm ends those that hang.
  const auto statuses = run_forked(storm.setup.num_ranks, body, {.notice = 2 * storm.bound});
  board->is_over = true;
  StormCount count;
  for (size_t rank = 0; rank < statuses.size(); ++rank) {
    add(count, storm.fates[0][rank].end, statuses[rank]);
  }
  for (const Supervisor& supervisor : supervisors) {
    count.wrong += supervisor.has_ended_well() ? 0 : 1;
  }
  for (const StormCount& more : board->counts) {
    count += more;
  }
  if (count.wrong + count.hung > 0) {
    fmt::print(stderr, "storm {}: statuses {}\n", storm.seed, fmt::join(statuses, " "));
  }
  return count;
}

StormCount run_storms(int64_t num_lost, const StormLimits& limits) {
  StormCount count;
  for (uint64_t seed = 1; count.lost() < num_lost && count.wrong + count.hung == 0; ++seed) {
    const StormCount storm = run_storm(seed, limits);
    if (storm.lost() == 0) {
      return count;  // who asked for ranks that are lost will miss them
    }
    count += storm;
  }
  return count;
}

}  // namespace weft::test
