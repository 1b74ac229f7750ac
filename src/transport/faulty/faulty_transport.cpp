// SPDX-License-Identifier: Apache-2.0
#include "transport/faulty/faulty_transport.hpp"

#include <algorithm>
#include <map>
#include <utility>

#include "core/env.hpp"
#include "transport/common.hpp"

namespace weft {
namespace {

constexpr std::string_view kPrefix = "faulty:";
constexpr double kMostExact = 9007199254740992.0;  // 2^53: above, doubles skip integers

// Returns the part before `separator`; `text` keeps what is behind it.
std::string_view take_until(std::string_view& text, char separator) {
  const std::string_view part = text.substr(0, text.find(separator));
  text.remove_prefix(std::min(part.size() + 1, text.size()));
  return part;
}

void set_value(FaultPlan& plan, std::string_view key, std::string_view text) {
  static const std::map<std::string_view, double FaultPlan::*> probabilities = {
      {"drop", &FaultPlan::drop},
      {"delay", &FaultPlan::delay},
      {"fail", &FaultPlan::fail},
      {"reorder", &FaultPlan::reorder}};
  const auto refuse = [&](std::string_view why) {
    WEFT_RAISE(Context{}, ErrorCode::kInvalidArgument, "open(faulty): {} = {}", key, why);
  };
  const double value = parse_number<double>(text).value_or(-1);
  if (!(value >= 0)) {
    refuse(fmt::format("\"{}\" is not a number from 0 on", text));
  }
  if (value > kMostExact) {
    refuse(fmt::format("{} is too large", value));
  }
  if (const auto found = probabilities.find(key); found != probabilities.end()) {
    if (value > 1) {
      refuse(fmt::format("{} is no probability (at most 1)", value));
    }
    plan.*found->second = value;
  } else if (key == "seed") {
    plan.seed = static_cast<uint64_t>(value);
  } else if (key == "hold_us") {
    plan.hold = std::chrono::microseconds(static_cast<int64_t>(value));
  } else {
    WEFT_CHECK_ARG(
        Context{},
        key == "hide_mapped",
        "open(faulty): unknown key \"{}\" (seed, drop, delay, fail, reorder, hold_us, hide_mapped)",
        key
    );
    plan.hide_mapped = value != 0;
  }
}

}  // namespace

std::optional<FaultyName> parse_faulty_name(std::string_view name) {
  if (!name.starts_with(kPrefix)) {
    return std::nullopt;
  }
  name.remove_prefix(kPrefix.size());
  FaultyName parsed;
  parsed.inner = take_until(name, '?');
  while (!name.empty()) {
    std::string_view value = take_until(name, '&');
    const std::string_view key = take_until(value, '=');
    set_value(parsed.plan, key, value);
  }
  return parsed;
}

FaultyTransport::FaultyTransport(
    std::unique_ptr<Transport> inner, const FaultPlan& plan, const Group& group
)
    : inner_(std::move(inner)),
      plan_(plan),
      name_(fmt::format("faulty:{}", inner_->name())),
      context_(context_of(group, name_)),
      random_(plan.seed * 1'000'003 + static_cast<uint64_t>(group.rank())),
      sender_([this](const std::stop_token& stop) { send_due_forever(stop); }) {}

void FaultyTransport::start_call(int rank) {
  if (failure_ != nullptr) {
    std::rethrow_exception(failure_);
  }
  if (roll(plan_.fail)) {
    WEFT_RAISE(context_, ErrorCode::kTransport, "put: to rank {} failed (on purpose)", rank);
  }
}

bool FaultyTransport::passes(const std::function<Send()>& make_send) {
  if (roll(plan_.drop)) {
    return false;
  }
  if (!roll(plan_.delay)) {
    return true;
  }
  const auto longest = std::max<int64_t>(plan_.hold.count(), 1);
  const auto wait = std::uniform_int_distribution<int64_t>(1, longest)(random_);
  held_.push_back({Clock::now() + std::chrono::microseconds(wait), make_send()});
  held_changed_.notify_one();
  return false;
}

Region FaultyTransport::lend(std::byte* data, uint64_t bytes, const Device& device) {
  const std::string obstacle = lend_obstacle(device);
  WEFT_CHECK(context_, obstacle.empty(), ErrorCode::kNotAvailable, "lend: {}", obstacle);
  return inner_->lend(data, bytes, device);
}

// Refuses a GPU's memory: puts that are held back are copied by this process.
std::string FaultyTransport::lend_obstacle(const Device& device) const {
  return device.kind == Device::Kind::kCpu
             ? inner_->lend_obstacle(device)
             : fmt::format("transport {} cannot hold back what lies in a GPU's memory", name_);
}

void FaultyTransport::put(int rank, std::span<const Put> puts) {
  std::vector<Put> now;
  {
    const std::lock_guard lock(mutex_);
    start_call(rank);
    for (const Put& put : puts) {
      const auto send_later = [&]() -> Send {
        const auto* source = static_cast<const std::byte*>(put.source);
        // The caller may reuse its source.
        return [rank, put, bytes = Bytes(source, source + put.bytes)](Transport& inner) {
          Put late = put;
          late.source = bytes.data();
          inner.put(rank, std::span(&late, 1));
        };
      };
      if (passes(send_later)) {
        now.push_back(put);
      }
    }
    if (roll(plan_.reorder)) {
      std::shuffle(now.begin(), now.end(), random_);
    }
  }
  if (!now.empty()) {
    inner_->put(rank, now);
  }
}

void FaultyTransport::raise(int rank, uint32_t signal, uint64_t amount) {
  const Send send = [=](Transport& inner) { inner.raise(rank, signal, amount); };
  std::unique_lock lock(mutex_);
  start_call(rank);
  const bool is_now = passes([&] { return Send(send); });
  lock.unlock();
  if (is_now) {
    send(*inner_);
  }
}

// Takes out the sends that are due, in random order: they have no order of their own.
std::vector<FaultyTransport::Held> FaultyTransport::take_due(Clock::time_point now) {
  const auto first_due = std::partition(held_.begin(), held_.end(), [now](const Held& held) {
    return held.due > now;
  });
  std::vector<Held> due(std::make_move_iterator(first_due), std::make_move_iterator(held_.end()));
  held_.erase(first_due, held_.end());
  std::shuffle(due.begin(), due.end(), random_);
  return due;
}

// Sends without mutex_, as the inner transport may take its time; but with it if that only copies:
// copies of one rank are ordered by memory that each rank maps at an address of its own, an order
// that a detector of races among threads would not see.
void FaultyTransport::send(const std::vector<Held>& held) {
  const bool only_copies = name_ == "faulty:shm" || name_ == "faulty:loopback";
  for (const Held& one : held) {
    std::unique_lock lock(mutex_, std::defer_lock);
    if (only_copies) {
      lock.lock();
    }
    try {
      one.send(*inner_);
    } catch (...) {
      if (!lock.owns_lock()) {
        lock.lock();
      }
      failure_ = failure_ != nullptr ? failure_ : std::current_exception();
    }
  }
}

void FaultyTransport::send_due(Clock::time_point now) {
  std::unique_lock lock(mutex_);
  const std::vector<Held> due = take_due(now);
  lock.unlock();
  send(due);
}

void FaultyTransport::send_due_forever(const std::stop_token& stop) {
  std::unique_lock lock(mutex_);
  while (!stop.stop_requested()) {
    if (held_.empty()) {
      held_changed_.wait(lock, stop, [this] { return !held_.empty(); });
      continue;
    }
    const Clock::time_point next = std::ranges::min_element(held_, {}, &Held::due)->due;
    held_changed_.wait_until(lock, stop, next, [] { return false; });
    const std::vector<Held> due = take_due(Clock::now());
    lock.unlock();
    send(due);
    lock.lock();
  }
}

void FaultyTransport::close() {
  if (std::exchange(is_closed_, true)) {
    return;
  }
  sender_.request_stop();
  sender_.join();
  send_due(Clock::time_point::max());
  inner_->close();
}

}  // namespace weft
