// SPDX-License-Identifier: Apache-2.0
#include "transport/faulty/faulty_transport.hpp"

#include <algorithm>
#include <map>
#include <utility>

#include "core/check.hpp"
#include "core/env.hpp"

namespace weft {
namespace {

constexpr std::string_view kPrefix = "faulty:";
constexpr double kMostExact = 9007199254740992.0;  // 2^53: above, doubles skip integers

// The part before `separator`; `text` keeps what is behind it.
std::string_view take_until(std::string_view& text, char separator) {
  const std::string_view part = text.substr(0, text.find(separator));
  text.remove_prefix(std::min(part.size() + 1, text.size()));
  return part;
}

void set_value(FaultPlan& plan, std::string_view key, std::string_view text) {
  const auto value = parse_number<double>(text);
  WEFT_CHECK_ARG(
      Context{},
      value && *value >= 0,
      "open(faulty): {} = \"{}\" is not a number from 0 on",
      key,
      text
  );
  WEFT_CHECK_ARG(
      Context{}, *value <= kMostExact, "open(faulty): {} = {} is too large", key, *value
  );
  static const std::map<std::string_view, double FaultPlan::*> probabilities = {
      {"drop", &FaultPlan::drop},
      {"delay", &FaultPlan::delay},
      {"fail", &FaultPlan::fail},
      {"reorder", &FaultPlan::reorder}};
  if (const auto found = probabilities.find(key); found != probabilities.end()) {
    WEFT_CHECK_ARG(
        Context{}, *value <= 1, "open(faulty): {} = {} is no probability (at most 1)", key, *value
    );
    plan.*found->second = *value;
  } else if (key == "seed") {
    plan.seed = static_cast<uint64_t>(*value);
  } else if (key == "hold_us") {
    plan.hold = std::chrono::microseconds(static_cast<int64_t>(*value));
  } else {
    WEFT_CHECK_ARG(
        Context{},
        key == "hide_mapped",
        "open(faulty): unknown key \"{}\" (seed, drop, delay, fail, reorder, hold_us, hide_mapped)",
        key
    );
    plan.hide_mapped = *value != 0;
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
      rank_(group.rank()),
      num_ranks_(group.num_ranks()),
      name_(fmt::format("faulty:{}", inner_->name())),
      random_(plan.seed * 1'000'003 + static_cast<uint64_t>(group.rank())),
      sender_([this](const std::stop_token& stop) { send_due_forever(stop); }) {}

FaultyTransport::~FaultyTransport() {
  close();
}

FaultyTransport::Counts FaultyTransport::counts() const {
  const std::lock_guard lock(mutex_);
  return counts_;
}

Context FaultyTransport::context() const {
  return {.rank = rank_, .num_ranks = num_ranks_, .transport = name_};
}

bool FaultyTransport::roll(double probability) {
  return std::uniform_real_distribution<double>()(random_) < probability;
}

FaultyTransport::Fate FaultyTransport::next_fate() {
  if (roll(plan_.drop)) {
    ++counts_.dropped;
    return Fate::kDrop;
  }
  if (roll(plan_.delay)) {
    ++counts_.delayed;
    return Fate::kDelay;
  }
  ++counts_.passed;
  return Fate::kPass;
}

void FaultyTransport::start_call(int rank) {
  if (failure_ != nullptr) {
    std::rethrow_exception(failure_);
  }
  if (roll(plan_.fail)) {
    ++counts_.failed_calls;
    WEFT_RAISE(context(), ErrorCode::kTransport, "put: to rank {} failed (on purpose)", rank);
  }
}

void FaultyTransport::hold(Held held) {
  const auto longest = std::max<int64_t>(plan_.hold.count(), 1);
  const auto wait = std::uniform_int_distribution<int64_t>(1, longest)(random_);
  held.due = Clock::now() + std::chrono::microseconds(wait);
  held_.push_back(std::move(held));
  held_changed_.notify_one();
}

Region FaultyTransport::lend(std::byte* data, uint64_t bytes, const Device& device) {
  const std::string obstacle = lend_obstacle(device);
  WEFT_CHECK(context(), obstacle.empty(), ErrorCode::kNotAvailable, "lend: {}", obstacle);
  return inner_->lend(data, bytes, device);
}

// What is held back is copied by this process.
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
      const Fate fate = next_fate();
      if (fate == Fate::kPass) {
        now.push_back(put);
      } else if (fate == Fate::kDelay) {
        Held held = {
            .due = {}, .rank = rank, .is_raise = false, .amount = 0, .put = put, .bytes = {}};
        const auto* source = static_cast<const std::byte*>(put.source);
        held.bytes.assign(source, source + put.bytes);
        hold(std::move(held));
      }
    }
    if (roll(plan_.reorder)) {
      ++counts_.reordered_calls;
      std::shuffle(now.begin(), now.end(), random_);
    }
  }
  if (!now.empty()) {
    inner_->put(rank, now);
  }
}

void FaultyTransport::raise(int rank, uint32_t signal, uint64_t amount) {
  Fate fate = Fate::kPass;
  {
    const std::lock_guard lock(mutex_);
    start_call(rank);
    fate = next_fate();
    if (fate == Fate::kDelay) {
      hold(
          {.due = {},
           .rank = rank,
           .is_raise = true,
           .amount = amount,
           .put = {.signal = signal},
           .bytes = {}}
      );
    }
  }
  if (fate == Fate::kPass) {
    inner_->raise(rank, signal, amount);
  }
}

std::byte* FaultyTransport::mapped(int rank, uint32_t region) const {
  return plan_.hide_mapped ? nullptr : inner_->mapped(rank, region);
}

// In random order: what is due together has no order of its own.
std::vector<FaultyTransport::Held> FaultyTransport::take_due(Clock::time_point now) {
  const auto first_due = std::partition(held_.begin(), held_.end(), [now](const Held& held) {
    return held.due > now;
  });
  std::vector<Held> due(std::make_move_iterator(first_due), std::make_move_iterator(held_.end()));
  held_.erase(first_due, held_.end());
  std::shuffle(due.begin(), due.end(), random_);
  return due;
}

// Without mutex_: the inner transport may take its time.
void FaultyTransport::send(std::vector<Held> held) {
  for (Held& one : held) {
    try {
      if (one.is_raise) {
        inner_->raise(one.rank, one.put.signal, one.amount);
      } else {
        one.put.source = one.bytes.data();
        inner_->put(one.rank, std::span(&one.put, 1));
      }
    } catch (...) {
      const std::lock_guard lock(mutex_);
      failure_ = failure_ != nullptr ? failure_ : std::current_exception();
    }
  }
}

void FaultyTransport::send_due(Clock::time_point now) {
  std::unique_lock lock(mutex_);
  std::vector<Held> due = take_due(now);
  lock.unlock();
  send(std::move(due));
}

void FaultyTransport::progress() {
  send_due(Clock::now());
  inner_->progress();
}

// A rank that goes to sleep may sleep until a peer answers what is held here.
void FaultyTransport::park(uint32_t seen, std::chrono::nanoseconds at_most) {
  send_due(Clock::time_point::max());
  inner_->park(seen, at_most);
}

void FaultyTransport::send_due_forever(const std::stop_token& stop) {
  std::unique_lock lock(mutex_);
  while (!stop.stop_requested()) {
    if (held_.empty()) {
      held_changed_.wait(lock, stop, [this] { return !held_.empty(); });
      continue;
    }
    const auto next = std::min_element(
        held_.begin(), held_.end(), [](const Held& a, const Held& b) { return a.due < b.due; }
    );
    const Clock::time_point due_time = next->due;
    held_changed_.wait_until(lock, stop, due_time, [] { return false; });
    std::vector<Held> due = take_due(Clock::now());
    lock.unlock();
    send(std::move(due));
    lock.lock();
  }
}

void FaultyTransport::close() {
  std::unique_lock lock(mutex_);
  if (std::exchange(is_closed_, true)) {
    return;
  }
  std::vector<Held> all = take_due(Clock::time_point::max());
  lock.unlock();
  sender_.request_stop();
  sender_.join();
  send(std::move(all));
  inner_->close();
}

}  // namespace weft
