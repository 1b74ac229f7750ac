// SPDX-License-Identifier: Apache-2.0
// The public class: checks what holds for every executor and hands over to the one that was chosen.
#include "weft/exchange.hpp"

#include <fmt/ranges.h>

#include <numeric>
#include <vector>

#include "call/call.hpp"
#include "call/executor.hpp"
#include "core/check.hpp"
#include "core/float_state.hpp"
#include "core/log.hpp"
#include "group/control_plane.hpp"
#include "plan/build.hpp"

namespace weft {

namespace {

bool is_addressable(int64_t rows, int64_t cols, int64_t element) {
  int64_t bytes = 0;
  return !__builtin_mul_overflow(rows, cols, &bytes) &&
         !__builtin_mul_overflow(bytes, element, &bytes) && bytes < int64_t{1} << 62;
}

// Throws in a child of fork(), whose inherited exchange is not its own; destructors there leave
// everything as it is.
void check_own(const std::unique_ptr<Executor>& executor) {
  check_maker("exchange", executor->maker(), executor->context());
}

// Scope of a call: checks its process, sets standard floats.
class OwnCall {
 public:
  explicit OwnCall(const std::unique_ptr<Executor>& executor) : executor_(*executor) {
    check_own(executor);
  }
  Executor* operator->() const { return &executor_; }

 private:
  StandardFloats floats_;
  Executor& executor_;
};

void let_go(std::unique_ptr<Executor>& executor) {
  if (executor != nullptr && executor->maker() != ::getpid()) {
    static_cast<void>(executor.release());
  }
}

}  // namespace

Plan Executor::dispatch_routed(
    const Routing& routing,
    const PlanOptions& options,
    const DispatchInput& in,
    const DispatchOutput& out,
    const CallOptions& call
) {
  Plan plan = make_plan(routing, options, call);
  dispatch(plan, in, out, call);
  return plan;
}

void Executor::place_rows(
    const Plan& /*plan*/,
    const DispatchInput& /*in*/,
    const DispatchOutput& /*out*/,
    const CallOptions& /*call*/
) {
  WEFT_RAISE(context(), ErrorCode::kInvalidArgument, "{}", kNothingToPlace);
}

CallReport Executor::report() const {
  CallReport report;
  report.alive.resize(static_cast<size_t>(context().num_ranks));
  std::iota(report.alive.begin(), report.alive.end(), 0);
  return report;
}

namespace {

[[noreturn]] void refuse_to_survive(std::string_view verb, const Context& context) {
  WEFT_RAISE(
      context,
      ErrorCode::kUnsupported,
      "{}: the exchange was not made with on_peer_loss = shrink",
      verb
  );
}

}  // namespace

void Executor::mask(std::span<const int> /*ranks*/) {
  refuse_to_survive("mask", context());
}

std::string Executor::invitation() const {
  refuse_to_survive("invitation", context());
}

void Executor::readmit(std::span<const int> /*ranks*/) {
  refuse_to_survive("readmit", context());
}

bool Executor::grow(int64_t /*max_tokens*/, int /*max_topk*/) {
  refuse_to_survive("grow", context());
}

Exchange::Exchange(const Group& group, const ExchangeConfig& config)
    : executor_(
          config.device.kind == Device::Kind::kCuda
              ? make_cuda_exchange(group, config, group.topology().domains)
              : make_cpu_exchange(group, config)
      ) {
  const Topology& topology = group.topology();
  std::vector<size_t> sizes;
  for (const std::vector<int>& domain : topology.domains) {
    sizes.push_back(domain.size());
  }
  log(LogLevel::kDebug,
      "exchange: rank {} of {} on {}, transport {}, domains of {} ranks",
      group.rank(),
      group.num_ranks(),
      config.device.kind == Device::Kind::kCuda ? "a GPU" : "the CPU",
      executor_->config().transport,
      fmt::join(sizes, " + "));
}
Exchange::Exchange(std::unique_ptr<Executor> executor) : executor_(std::move(executor)) {}
Exchange::~Exchange() {
  let_go(executor_);
}
Exchange::Exchange(Exchange&&) noexcept = default;
Exchange& Exchange::operator=(Exchange&& other) noexcept {
  let_go(executor_);
  executor_ = std::move(other.executor_);
  return *this;
}

Plan Exchange::plan(const Routing& routing, const PlanOptions& options, const CallOptions& call) {
  return OwnCall(executor_)->make_plan(routing, options, call);
}

void Exchange::dispatch(
    const Plan& plan, const DispatchInput& in, const DispatchOutput& out, const CallOptions& call
) {
  OwnCall(executor_)->dispatch(plan, in, out, call);
}

Plan Exchange::dispatch(
    const Routing& routing,
    const PlanOptions& options,
    const DispatchInput& in,
    const DispatchOutput& out,
    const CallOptions& call
) {
  try {
    WEFT_CHECK_ARG(
        executor_->context(),
        given_rows(options, 1) || executor_->writes_alone(routing, options, in, call),
        "dispatch: the number of rows is open while the output is given (row_budget or "
        "expert_stride must be given, with overflow drop, where it is not one launch)"
    );
  } catch (const Error& refusal) {
    if (!OwnCall(executor_)->refuse(Op::kPlanAndDispatch, refusal, call)) {
      throw untold(refusal);
    }
    throw;
  }
  return OwnCall(executor_)->dispatch_routed(routing, options, in, out, call);
}

bool Exchange::writes_alone(
    const Routing& routing,
    const PlanOptions& options,
    const DispatchInput& in,
    const CallOptions& call
) const {
  return executor_->writes_alone(routing, options, in, call);
}

void Exchange::place_rows(
    const Plan& plan, const DispatchInput& in, const DispatchOutput& out, const CallOptions& call
) {
  OwnCall(executor_)->place_rows(plan, in, out, call);
}

void Exchange::receive(const Plan& plan, const CallOptions& call) {
  OwnCall(executor_)->receive(plan, call);
}

bool Exchange::is_open(const Plan& plan) const {
  return executor_->is_open(plan);
}

void Exchange::combine(
    const Plan& plan, const CombineInput& in, const CombineOutput& out, const CallOptions& call
) {
  OwnCall(executor_)->combine(plan, in, out, call);
}

void Exchange::refuse(Op op, std::string_view reason, const CallOptions& call) {
  if (!OwnCall(executor_)->refuse(op, reason, call)) {
    raise_error(
        ErrorCode::kUnsupported,
        executor_->context(),
        fmt::format(
            "{}: {} (the call was being captured: no other rank hears of it)", op_name(op), reason
        )
    );
  }
}

bool Exchange::is_outgrown() const {
  return executor_->is_outgrown();
}

void Exchange::check() {
  OwnCall(executor_)->check();
}

CallReport Exchange::report() const {
  return executor_->report();
}

void Exchange::mask(std::span<const int> ranks) {
  OwnCall(executor_)->mask(ranks);
}

std::string Exchange::invitation() const {
  return executor_->invitation();
}

void Exchange::readmit(std::span<const int> ranks) {
  OwnCall(executor_)->readmit(ranks);
}

bool Exchange::grow(int64_t max_tokens, int max_topk) {
  return OwnCall(executor_)->grow(max_tokens, max_topk);
}

void Exchange::add_waits(const Tensor& sums, int64_t times, void* stream) {
  check_own(executor_);
  const TensorCheck tensor{"add_waits", executor_->context(), executor_->config().device};
  tensor("sums", sums, {DType::kInt64}, {1, executor_->context().num_ranks});
  executor_->add_waits(reinterpret_cast<int64_t*>(sums.data), times, {.stream = stream});
}

Buffer Exchange::allocate(int64_t rows, int64_t cols, DType dtype) {
  WEFT_CHECK_ARG(
      executor_->context(),
      rows >= 0 && cols >= 0 && is_addressable(rows, cols, dtype_bytes(dtype)),
      "allocate: shape [{}, {}] (expected no negative size, and less than 2^62 B)",
      rows,
      cols
  );
  Tensor shape = {.data = nullptr, .dtype = dtype, .rows = rows, .cols = cols};
  shape.device = config().device;
  return OwnCall(executor_)->allocate(shape);
}

void Exchange::release_pooled() {
  OwnCall(executor_)->release_pooled();
}
int Exchange::rank() const {
  return executor_->context().rank;
}
int Exchange::num_ranks() const {
  return executor_->context().num_ranks;
}
const ExchangeConfig& Exchange::config() const {
  return executor_->config();
}
ExchangeStats Exchange::stats() const {
  return executor_->stats();
}
Footprint Exchange::footprint() const {
  return executor_->footprint();
}

}  // namespace weft
