// SPDX-License-Identifier: Apache-2.0
// From routing to plan in steps without communication; the exchange carries counts and records
// between the steps.
//
//   read_routing -> count_routes -> [counts travel] -> place_routes -> encode_records
//   -> [records travel] -> add_received -> Plan
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <initializer_list>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "core/check.hpp"
#include "plan/plan_data.hpp"
#include "plan/slots.hpp"
#include "weft/exchange.hpp"
#include "weft/routing.hpp"

namespace weft {

[[nodiscard]] std::string device_text(const Device& device);  // "cpu", "cuda 1"

struct TensorShape {
  int64_t rows;
  int64_t cols;
  [[nodiscard]] std::string text() const { return fmt::format("[{}, {}]", rows, cols); }
  friend bool operator==(const TensorShape&, const TensorShape&) = default;
};

// Checks of one call's tensors: given, on the exchange's device, of one of some types, of a shape
// if one is wanted, rows adjacent. Throws Error (kInvalidArgument) that begins with `verb`.
struct TensorCheck {
  std::string_view verb;
  const Context& context;
  Device device;

  void operator()(
      std::string_view name,
      const ConstTensor& tensor,
      std::initializer_list<DType> dtypes,
      TensorShape wanted = {-1, -1}  // of any shape
  ) const;
};

// Routing in one form, whatever the caller gave. Rows hold their experts in k order, unused places
// are -1.
struct RouteTable {
  int64_t num_tokens = 0;
  int topk = 0;
  bool from_map = false;
  std::vector<int32_t> expert;  // [num_tokens, topk]
  std::vector<float> weight;    // [num_tokens, topk] or empty
  bool has_weights = false;     // tells a rank without tokens whether the group carries weights
};

// Error for a routing that an exchange with more room takes.
class NoRoom final : public Error {
 public:
  explicit NoRoom(Error error) : Error(std::move(error)) {}
};

struct RoutingShape {
  int64_t num_tokens = 0;
  int topk = 0;  // max_topk for a map
  bool from_map = false;
};

// Checks what can be checked without reading the routing's memory. `limits` says how many experts,
// tokens and choices there may be, and where the memory lies. Throws Error (kInvalidArgument),
// NoRoom where these limits are too low.
[[nodiscard]] RoutingShape check_routing(
    const Routing& routing, const ExchangeConfig& limits, const Context& context
);

// Checks everything about the caller's routing: which of the two forms, dtype, device, shape,
// contiguity, range of every index, T <= max_tokens, topk <= max_topk, weights. Throws as
// check_routing(), naming e.g. `topk_idx[17, 3]`.
[[nodiscard]] RouteTable read_routing(
    const Routing& routing,
    int num_experts,
    int max_topk,
    int64_t max_tokens,
    const Context& context
);

// Refuses options wrong by themselves (pad_multiple < 1, a budget with kExpertStrided, ...). Throws
// Error (kInvalidArgument).
void check_options(const PlanOptions& options, const Context& context);

// Refuses options that GPUs of several domains lack. Throws Error (kUnsupported).
void check_options_between_gpus(const PlanOptions& options, const Context& context);

// Returns the rows of a rank's output if the options tell, so that no rank waits for the plan.
[[nodiscard]] std::optional<int64_t> given_rows(const PlanOptions& options, int num_local_experts);

// Counts that one rank tells all others before slots can be known.
struct RankCounts {
  int64_t num_tokens = 0;
  int64_t row_budget = -1;        // -1: exact
  std::vector<int32_t> routes;    // [num_experts]
  std::vector<int32_t> arrivals;  // [num_ranks] (token, rank) pairs
};

// Adds the routes and arrivals of the tokens from `begin` to before `end`.
void add_counts(const RouteTable& routes, int64_t begin, int64_t end, RankCounts& counts);

[[nodiscard]] RankCounts count_routes(
    const RouteTable& routes, int num_experts, int num_ranks, const PlanOptions& options
);

// Shape of every rank's output, derived from the counts of all ranks; equal on all ranks.
//
// kExpertMajor and kExpertStrided; with kRankMajor only `rows` has a meaning.
struct ExpertBlock {
  int64_t rows = 0;   // routes of all ranks
  int64_t begin = 0;  // first slot
  int64_t limit = 0;  // first slot that is not the block's
};

struct OutputShape {
  int64_t required_rows = 0;
  int64_t num_rows = 0;
  bool overflow = false;  // some route to this rank is dropped
};

struct GroupShape {
  BlockRule rule;                    // stride resolved
  std::vector<ExpertBlock> experts;  // [num_experts]
  std::vector<OutputShape> outputs;  // [num_ranks]
};

// Sums of the counts of all ranks, and each rank's budget.
struct GroupTotals {
  std::vector<int64_t> routes;        // [num_experts]
  std::vector<int64_t> arrivals;      // [num_ranks]
  std::vector<int64_t> budgets = {};  // [num_ranks], -1: exact
};

// Throws Error (kInvalidArgument) if an output has more rows than slots can number, or lacks room
// under Overflow::kError; the text is the same on every rank.
[[nodiscard]] GroupShape group_shape(
    const GroupTotals& totals, const PlanOptions& options, const Context& context
);
[[nodiscard]] GroupShape group_shape(
    std::span<const RankCounts> counts,
    int num_experts,
    const PlanOptions& options,
    const Context& context
);

// Fills in what this rank will receive, as far as counts tell.
void shape_output(PlanData& plan, const GroupShape& group);

// How threads share work that falls into parts. Results do not depend on it.
struct Sharing {
  size_t num_parts = 1;
  // visit(i) for each i below `count`, in any order, on any threads; empty: here, in order.
  std::function<void(size_t count, const std::function<void(size_t)>& visit)> for_each = {};

  void each(size_t count, const std::function<void(size_t)>& visit) const {
    if (for_each) {
      for_each(count, visit);
      return;
    }
    for (size_t i = 0; i < count; ++i) {
      visit(i);
    }
  }
};

// Finds this rank's slots and the shape of its output, from all ranks' counts. `received` stays
// empty. Throws Error for Overflow::kError, with one text on all ranks (but for their names).
[[nodiscard]] PlanData place_routes(
    const RouteTable& routes,
    std::span<const RankCounts> counts,  // by rank
    int rank,
    const PlanOptions& options,
    const Context& context,
    const Sharing& sharing = {}
);

// Bounds of one pair's arrivals that came from outside: another process or a file.
struct ArrivalBounds {
  ArrivalBounds(const PlanShape& shape, int64_t source_tokens, int64_t receiver_rows)
      : num_tokens(source_tokens),
        num_rows(receiver_rows),
        topk(shape.topk),
        num_local_experts(shape.num_local_experts()),
        one_row(shape.options.layout == Layout::kRankMajor) {}

  int64_t num_tokens;
  int64_t num_rows;
  int topk;
  int num_local_experts;
  bool one_row;
};

// Pack a pair's arrivals, and unpack. Decoding checks every bound: the bytes come from another
// process.
[[nodiscard]] std::vector<std::byte> encode_records(const Arrivals& arrivals);
[[nodiscard]] Arrivals decode_records(
    std::span<const std::byte> bytes,
    const ArrivalBounds& bounds,
    int source_rank,
    const Context& context
);
// Most bytes that encode_records can return.
[[nodiscard]] uint64_t max_record_bytes(int64_t max_tokens, int max_topk);

// Returns why executors cannot follow arrivals, e.g. "slot[3] = 70 is out of range (num_rows =
// 64)"; empty: they can.
[[nodiscard]] std::string arrivals_fault(const Arrivals& arrivals, const ArrivalBounds& bounds);

// Join one source's records for several receivers, and split them; the latter throws what
// decode_records throws.
[[nodiscard]] std::vector<std::byte> bundle_records(std::span<const std::vector<std::byte>> records
);
[[nodiscard]] std::vector<std::span<const std::byte>> unbundle_records(
    std::span<const std::byte> bundle, size_t num_receivers, int source_rank, const Context& context
);
// Most bytes of a bundle for so many receivers.
[[nodiscard]] uint64_t max_bundle_bytes(int64_t max_tokens, int max_topk, int num_receivers);

// Completes the plan: `received` by source rank, then what follows from it (row_experts).
void add_received(PlanData& plan, std::vector<Arrivals> received);

// Fills token_begin and token_arrivals from `sent`.
void link_tokens(PlanData& plan);

// Returns a plan's part on a GPU, as the executor that made it has it. Throws Error
// (kInvalidArgument) for a plan of another executor.
template <class MadePlan>
[[nodiscard]] const MadePlan& device_plan_as(const PlanData& plan, const Context& context) {
  const auto* made = dynamic_cast<const MadePlan*>(plan.device.get());
  WEFT_CHECK_ARG(
      context, made != nullptr, "plan {} was made by another kind of exchange", plan.call
  );
  return *made;
}

// Makes all ranks' plans at once, without an exchange: for files, tests and tools.
[[nodiscard]] std::vector<Plan> build_plans(
    std::span<const RouteTable> routes,  // by rank
    int num_experts,
    const PlanOptions& options,
    std::span<const int64_t> row_budgets = {}  // by rank, -1: exact; empty: options.row_budget
);

}  // namespace weft
