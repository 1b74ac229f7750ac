// SPDX-License-Identifier: Apache-2.0
// An exchange as Python holds it: calls without the interpreter's lock, one at a time, which Ctrl-C
// can interrupt.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <exception>
#include <functional>
#include <mutex>
#include <optional>
#include <thread>
#include <type_traits>
#include <utility>
#include <vector>

#include "bind.hpp"
#include "core/interrupt.hpp"
#include "weft/exchange.hpp"

namespace weft::py {

// Collective calls of this thread. A failure in Python before a call has begun is refused.
inline thread_local int64_t num_begun = 0;
inline thread_local int64_t num_refused = 0;

// Signals are for the main thread: no other need ask, nor take the interpreter's lock for that.
struct MainThread {
  unsigned long id =
      nb::cast<unsigned long>(nb::module_::import_("threading").attr("main_thread")().attr("ident")
      );
};
inline bool is_main_thread() {
  return PyThread_get_thread_ident() == looked_up<MainThread>().id;
}

// Returns whether a Python signal handler has raised, e.g. KeyboardInterrupt.
inline bool has_signal() {
  const nb::gil_scoped_acquire gil;
  return PyErr_CheckSignals() != 0;
}

// Core exchange behind Python's. Calls run without the interpreter's lock and one at a time:
// forward and backward may come from different threads. No thread waits for a call with the
// interpreter's lock held, which that call needs now and then.
class Calls {
 public:
  Calls(const Group& group, const ExchangeConfig& config) : exchange_(group, config) {}

  [[nodiscard]] const Exchange& exchange() const { return exchange_; }

  template <class Body>
  auto locked(const Body& body) {
    const InterruptScope scope(is_main_thread() ? &is_interrupted : &is_asked);
    const nb::gil_scoped_release no_gil;
    const std::scoped_lock lock(mutex_);
    const Within within(this);
    return body(exchange_);
  }

  // Runs a call of all ranks.
  template <class Body>
  auto begin(const Body& body) {
    ++num_begun;
    return locked(body);
  }

  // Runs a local body that changes nothing. While another thread waits in a call, that thread
  // runs it: a rank can tell for whom it waits.
  template <class Body>
  auto asked(const Body& body) {
    using Answer = std::invoke_result_t<Body, Exchange&>;
    std::optional<Answer> answer;
    std::exception_ptr problem;
    const std::function<void()> ask = [&] {
      try {
        answer.emplace(body(exchange_));
      } catch (...) {
        problem = std::current_exception();
      }
    };
    const nb::gil_scoped_release no_gil;
    for (Question question(*this, ask); !question.is_answered();) {
      if (const std::unique_lock lock(mutex_, std::try_to_lock); lock) {
        answer_all();
      } else {
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
      }
    }
    if (problem) {
      std::rethrow_exception(problem);
    }
    return *std::move(answer);
  }

  // Makes a GPU segment for torch's allocator, which holds its own lock meanwhile. Takes no lock of
  // a call, as on_loss may allocate.
  [[nodiscard]] Buffer segment(int64_t rows, int64_t cols) {
    return exchange_.allocate(rows, cols, DType::kByte);
  }

  // Number of rows of the last plan that told it, for the memory of the next; -1 before.
  int64_t last_rows = -1;
  // How many more the next may need: none while their number stays.
  int64_t spare_rows = 0;

 private:
  // A question that stays in the list for its lifetime.
  class Question {
   public:
    Question(Calls& calls, const std::function<void()>& ask) : calls_(calls), ask_(ask) {
      const std::scoped_lock lock(calls_.questions_mutex_);
      calls_.questions_.push_back(this);
      ++calls_.num_questions_;
    }
    ~Question() {
      const std::scoped_lock lock(calls_.questions_mutex_);
      std::erase(calls_.questions_, this);
    }
    Question(const Question&) = delete;
    Question& operator=(const Question&) = delete;
    [[nodiscard]] bool is_answered() const { return is_answered_; }
    void answer() {
      if (!is_answered_) {
        ask_();
        is_answered_ = true;
      }
    }

   private:
    Calls& calls_;
    const std::function<void()>& ask_;
    std::atomic<bool> is_answered_ = false;
  };

  // The call that this thread is in.
  class Within {
   public:
    explicit Within(Calls* calls) : outer_(std::exchange(current, calls)) {}
    ~Within() { current = outer_; }
    Within(const Within&) = delete;
    Within& operator=(const Within&) = delete;
    static inline thread_local Calls* current = nullptr;

   private:
    Calls* outer_;
  };

  // A call polls this while it waits (core/interrupt.hpp).
  static bool is_asked() {
    if (Within::current != nullptr && Within::current->num_questions_ > 0) {
      Within::current->answer_all();
    }
    return false;
  }
  static bool is_interrupted() { return is_asked() || has_signal(); }

  // Needs mutex_. Does not nest: an answer may wait for a GPU.
  void answer_all() {
    const std::scoped_lock lock(questions_mutex_);
    if (num_questions_ > 0) {
      num_questions_ = 0;
      std::ranges::for_each(questions_, &Question::answer);
    }
  }

  std::recursive_mutex mutex_;  // ExchangeConfig::on_loss may ask for the report
  std::mutex questions_mutex_;
  std::vector<Question*> questions_;
  std::atomic<int> num_questions_ = 0;
  Exchange exchange_;
};

}  // namespace weft::py
