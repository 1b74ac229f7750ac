// SPDX-License-Identifier: Apache-2.0
// A plan as JSON, and back. What follows from the rest (token lists) is made anew on loading.
#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <bit>
#include <charconv>
#include <cmath>
#include <cstdint>
#include <limits>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "core/atomic_file.hpp"
#include "core/check.hpp"
#include "core/json_piece.hpp"
#include "plan/balance/routing.hpp"
#include "plan/build.hpp"
#include "plan/plan_data.hpp"
#include "weft/version.hpp"

namespace weft {
namespace {

constexpr std::string_view kPlanFormat = "weft plan";
constexpr int kPlanVersion = 1;
constexpr std::string_view kLayouts[] = {"rank_major", "expert_major", "expert_strided"};
constexpr std::string_view kOverflows[] = {"drop", "error"};
constexpr std::string_view kOrders[] = {"rank", "topk"};
constexpr int64_t kMaxInt32 = std::numeric_limits<int32_t>::max();
constexpr int64_t kMaxInt64 = std::numeric_limits<int64_t>::max();

using Json = nlohmann::ordered_json;  // keys keep the order in which they are written

// --- writing ---

// Writes what JsonNode::floats() reads.
Json floats_to_json(const std::vector<float>& values) {
  auto list = Json::array();
  for (const float value : values) {
    if (std::isfinite(value)) {
      list.push_back(value);
    } else {
      list.push_back(fmt::format("0x{:08x}", std::bit_cast<uint32_t>(value)));
    }
  }
  return list;
}

// Writes the order of sums, replicas and lost ranks only if they are not the usual ones.
Json shape_to_json(const PlanShape& shape) {
  const PlanOptions& options = shape.options;
  Json json = {
      {"rank", shape.rank},
      {"num_ranks", shape.num_ranks},
      {"num_experts", shape.num_experts},
      {"topk", shape.topk},
      {"num_tokens", shape.num_tokens},
      {"from_map", shape.from_map},
      {"has_weights", shape.has_weights},
      {"layout", name_of(options.layout, kLayouts)},
      {"pad_multiple", options.pad_multiple},
      {"expert_stride", options.expert_stride},
      {"row_budget", options.row_budget ? Json(*options.row_budget) : Json()},
      {"overflow", name_of(options.overflow, kOverflows)}};
  if (options.order != SumOrder::kRank) {
    json["order"] = name_of(options.order, kOrders);
  }
  if (options.balance.replicas > 0) {
    json["replicas"] = options.balance.replicas;
    json["min_rows"] = options.balance.min_rows;
    json["placement"] = options.balance.placement;
    if (options.balance.block_rows > 1) {
      json["block_rows"] = options.balance.block_rows;
    }
    if (options.balance.replica_rows > 0) {
      json["replica_rows"] = options.balance.replica_rows;
    }
  }
  if (!shape.lost.empty()) {
    json["lost"] = shape.lost;
  }
  return json;
}

Json output_to_json(const PlanData& plan) {
  return {
      {"num_rows", plan.num_rows},
      {"required_rows", plan.required_rows},
      {"overflow", plan.overflow},
      {"rows_per_expert", plan.rows_per_expert},
      {"padded_rows_per_expert", plan.padded_rows_per_expert},
      {"expert_begin", plan.expert_begin},
      {"padding", plan.padding},
      {"row_experts", plan.row_experts}};
}

Json arrivals_to_json(const std::vector<Arrivals>& pairs) {
  auto list = Json::array();
  for (const Arrivals& arrivals : pairs) {
    list.push_back(
        {{"token", arrivals.token},
         {"route_begin", arrivals.route_begin},
         {"slot", arrivals.slot},
         {"k", arrivals.k},
         {"expert", arrivals.expert},
         {"weight", floats_to_json(arrivals.weight)}}
    );
  }
  return list;
}

// --- reading ---

// Unlike ordered_json it never copies a value that it holds, which may nest a million deep.
using Value = nlohmann::json;

// A JSON value that knows where it stands, so that every fault names file and key path.
class JsonNode {
 public:
  JsonNode(const Value& value, std::string_view file, std::string path = {})
      : value_(&value), file_(file), path_(std::move(path)) {}

  // These throw Error (kFile) for a key or an entry that is missing and for a value of another kind
  // or out of range.
  [[nodiscard]] JsonNode operator[](std::string_view key) const {
    if (!value_->is_object()) {
      fail("is {} (an object with \"{}\")", json_piece(*value_), key);
    }
    JsonNode child(*value_, file_, fmt::format("{}/{}", path_, key));
    const auto found = value_->find(key);
    if (found == value_->end()) {
      child.fail("is missing");
    }
    child.value_ = &*found;
    return child;
  }

  [[nodiscard]] bool has(std::string_view key) const { return value_->contains(key); }

  [[nodiscard]] int64_t integer(int64_t low, int64_t high) const {
    const bool is_huge =
        value_->is_number_unsigned() &&
        value_->get<uint64_t>() > static_cast<uint64_t>(std::numeric_limits<int64_t>::max());
    require(
        value_->is_number_integer() && !is_huge && value_->get<int64_t>() >= low &&
            value_->get<int64_t>() <= high,
        fmt::format("an integer from {} to {}", low, high)
    );
    return value_->get<int64_t>();
  }

  [[nodiscard]] bool boolean() const {
    require(value_->is_boolean(), "true or false");
    return value_->get<bool>();
  }

  [[nodiscard]] std::string_view text() const {
    require(value_->is_string(), "a string");
    return value_->get_ref<const std::string&>();
  }

  // Returns the enumerator of this name; they count from 0.
  template <class Enum>
  [[nodiscard]] Enum one_of(std::span<const std::string_view> names) const {
    const auto found = std::ranges::find(names, text());
    require(found != names.end(), fmt::format("\"{}\"", fmt::join(names, "\" or \"")));
    return static_cast<Enum>(found - names.begin());
  }

  [[nodiscard]] bool is_null() const { return value_->is_null(); }

  [[nodiscard]] std::vector<JsonNode> list(std::optional<int64_t> length = {}) const {
    require(value_->is_array(), "a list");
    const auto size = static_cast<int64_t>(value_->size());
    if (size != length.value_or(size)) {
      fail("has {} entries (expected {})", size, *length);
    }
    std::vector<JsonNode> entries;
    for (size_t i = 0; i < value_->size(); ++i) {
      entries.emplace_back((*value_)[i], file_, fmt::format("{}/{}", path_, i));
    }
    return entries;
  }

  template <class Int>
  [[nodiscard]] std::vector<Int> integers(
      std::optional<int64_t> length = {}, int64_t low = 0, int64_t high = kMaxInt32
  ) const {
    std::vector<Int> values;
    for (const JsonNode& entry : list(length)) {
      values.push_back(static_cast<Int>(entry.integer(low, high)));
    }
    return values;
  }

  // Reads finite numbers, or bits of other floats as "0x7fc00000".
  [[nodiscard]] std::vector<float> floats() const {
    std::vector<float> values;
    for (const JsonNode& entry : list()) {
      values.push_back(entry.number());
    }
    return values;
  }

  // Throws unless the value is the one that follows from the rest of the file.
  void must_be(const Value& expected) const {
    if (!expected.is_array()) {
      require(*value_ == expected, json_piece(expected) + " by the rest of the plan");
      return;
    }
    const std::vector<JsonNode> entries = list(static_cast<int64_t>(expected.size()));
    for (size_t i = 0; i < entries.size(); ++i) {
      entries[i].must_be(expected[i]);
    }
  }

  // "load: FILE: PATH PROBLEM"
  template <class... Args>
  [[noreturn]] void fail(fmt::format_string<Args...> format, Args&&... args) const {
    const std::string_view place = path_.empty() ? "the whole" : std::string_view(path_);
    const std::string problem = fmt::format(format, std::forward<Args>(args)...);
    WEFT_RAISE(Context{}, ErrorCode::kFile, "load: {}: {} {}", file_, place, problem);
  }

  void require(bool is_right, std::string_view expected) const {
    if (!is_right) {
      fail("is {} ({})", json_piece(*value_), expected);
    }
  }

 private:
  [[nodiscard]] float number() const {
    float value = NAN;
    bool is_right = false;
    if (value_->is_string()) {
      const std::string_view text = this->text();
      uint32_t bits = 0;
      const auto end = text.data() + text.size();
      is_right = text.size() == 10 && text.starts_with("0x") &&
                 std::from_chars(text.data() + 2, end, bits, 16).ptr == end;
      value = std::bit_cast<float>(bits);
    } else if (value_->is_number()) {
      value = static_cast<float>(value_->get<double>());
      is_right = std::isfinite(value);
    }
    require(is_right, "a float, or its bits as \"0x7fc00000\"");
    return value;
  }

  const Value* value_;
  std::string_view file_;
  std::string path_;  // JSON pointer
};

// Throws Error (kFile) naming the byte where the text stops being JSON.
Value parse_json(std::string_view text, std::string_view file) {
  std::string what;
  const auto without_id = [](std::string_view said) {  // "[json.exception....] "
    const size_t end = said.find("] ");
    return end == said.npos ? said : said.substr(end + 2);
  };
  try {
    return Value::parse(text);
  } catch (const Value::parse_error& error) {
    what = fmt::format("not JSON at byte {} ({})", error.byte, without_id(error.what()));
  } catch (const Value::out_of_range& error) {  // a number beyond the range of a double
    what = without_id(error.what());
  }
  if (text.empty()) {
    what = "the file is empty (expected a plan as JSON)";
  }
  WEFT_RAISE(Context{}, ErrorCode::kFile, "load: {}: {}", file, what);
}

void read_balance(const JsonNode& node, PlanShape& shape) {
  Balancing& balance = shape.options.balance;
  const int per_rank = shape.num_local_experts();
  balance.replicas =
      static_cast<int>(node["replicas"].integer(1, std::min(kMostReplicas, per_rank - 1)));
  balance.min_rows = node["min_rows"].integer(1, kMaxInt32);
  if (node.has("block_rows")) {
    balance.block_rows = node["block_rows"].integer(1, kMostBlockRows);
  }
  if (node.has("replica_rows")) {
    balance.replica_rows = node["replica_rows"].integer(1, kMostReplicaRows);
  }
  balance.placement = node["placement"].integers<int32_t>(
      int64_t{shape.num_ranks} * balance.replicas, -1, shape.num_chosen_experts() - 1
  );
  try {
    check_balancing(balance, shape.num_ranks, shape.num_chosen_experts(), {});
  } catch (const Error& error) {
    node["placement"].fail("fits no plan: {}", error.what());
  }
}

// Checks that no route, of any rank, goes to a place without a replica. Throws Error (kFile).
void check_empty_places(const JsonNode& whole, const PlanData& plan) {
  const Balancing& balance = plan.shape.options.balance;
  const PhysicalExperts shape = {
      plan.shape.num_ranks, plan.shape.num_chosen_experts(), balance.replicas};
  for (int i = 0; i < static_cast<int>(balance.placement.size()); ++i) {
    const int physical = shape.place_of(i / balance.replicas, i % balance.replicas);
    if (balance.placement[static_cast<size_t>(i)] >= 0) {
      continue;
    }
    const auto refuse_if = [&](bool has_route, std::string_view name) {
      if (has_route) {
        whole[name].fail("has a route to physical expert {} (no replica is there)", physical);
      }
    };
    refuse_if(plan.global_routes[static_cast<size_t>(physical)] > 0, "global_routes");
    refuse_if(
        std::ranges::find(plan.route_expert, physical) != plan.route_expert.end(), "route_expert"
    );
  }
}

void read_lost(const JsonNode& node, PlanShape& shape) {
  shape.lost = node.integers<int>({}, 0, shape.num_ranks - 1);
  const bool is_ascending =
      std::ranges::adjacent_find(shape.lost, std::greater_equal()) == shape.lost.end();
  node.require(is_ascending && !is_among(shape.lost, shape.rank), "other ranks, ascending");
}

PlanShape shape_from(const JsonNode& node) {
  PlanShape shape;
  shape.num_ranks = static_cast<int>(node["num_ranks"].integer(1, kMaxInt32));
  shape.rank = static_cast<int>(node["rank"].integer(0, shape.num_ranks - 1));
  shape.num_experts = static_cast<int>(node["num_experts"].integer(1, kMaxInt32));
  node["num_experts"].require(
      shape.num_experts % shape.num_ranks == 0,
      fmt::format("a multiple of num_ranks = {}", shape.num_ranks)
  );
  shape.topk = static_cast<int>(node["topk"].integer(1, kMaxTopk));
  shape.num_tokens = node["num_tokens"].integer(0, kMaxInt32 / shape.topk);
  shape.from_map = node["from_map"].boolean();
  shape.has_weights = node["has_weights"].boolean();
  shape.options.layout = node["layout"].one_of<Layout>(kLayouts);
  shape.options.pad_multiple = node["pad_multiple"].integer(1, kMaxInt32);
  shape.options.expert_stride = node["expert_stride"].integer(0, kMaxInt32);
  if (const JsonNode budget = node["row_budget"]; !budget.is_null()) {
    shape.options.row_budget = budget.integer(0, kMaxInt32);
  }
  shape.options.overflow = node["overflow"].one_of<Overflow>(kOverflows);
  if (node.has("order")) {
    shape.options.order = node["order"].one_of<SumOrder>(kOrders);
  }
  if (node.has("replicas")) {
    read_balance(node, shape);
  }
  if (node.has("lost")) {
    read_lost(node["lost"], shape);
  }
  return shape;
}

// Reads the shape of this rank's output, which follows from the routes of all ranks. Nothing is
// known of the others' outputs.
void read_output_shape(const JsonNode& whole, PlanData& plan) {
  const PlanOptions& options = plan.shape.options;
  const auto num_ranks = static_cast<size_t>(plan.shape.num_ranks);
  const auto rank = static_cast<size_t>(plan.shape.rank);
  GroupTotals totals = {
      .routes = whole["global_routes"].integers<int64_t>(plan.shape.num_experts),
      .arrivals = std::vector<int64_t>(num_ranks),
      .budgets = std::vector<int64_t>(num_ranks)};
  totals.arrivals[rank] = whole["output"]["required_rows"].integer(0, kMaxInt64);
  totals.budgets[rank] = options.row_budget.value_or(-1);
  try {
    check_options(options, {});
    PlanOptions dropping = options;
    dropping.overflow = Overflow::kDrop;
    const GroupShape group = group_shape(totals, dropping, {});
    whole["shape"]["expert_stride"].must_be(group.rule.stride);
    shape_output(plan, group);
  } catch (const Error& error) {
    if (error.code() == ErrorCode::kFile) {
      throw;
    }
    whole["shape"].fail("fits no plan: {}", error.what());
  }
}

std::vector<Arrivals> arrivals_from(
    const JsonNode& node, int num_ranks, const ArrivalBounds& bounds
) {
  std::vector<Arrivals> pairs;
  for (const JsonNode& entry : node.list(num_ranks)) {
    Arrivals arrivals;
    arrivals.one_row = bounds.one_row;
    arrivals.token = entry["token"].integers<int32_t>();
    arrivals.route_begin = entry["route_begin"].integers<int32_t>();
    arrivals.slot = entry["slot"].integers<int32_t>();
    arrivals.k = entry["k"].integers<int32_t>();
    arrivals.expert = entry["expert"].integers<int32_t>();
    arrivals.weight = entry["weight"].floats();
    if (const std::string fault = arrivals_fault(arrivals, bounds); !fault.empty()) {
      entry.fail("is malformed: {}", fault);
    }
    pairs.push_back(std::move(arrivals));
  }
  return pairs;
}

// Checks that the rows of an expert, or with one_row all rows, follow each other by source, then
// token. `next` [local experts]: the row that comes next, -1: any.
void check_rows(const JsonNode& node, const Arrivals& pair, std::span<int64_t> next) {
  for (int64_t i = 0; i < pair.size(); ++i) {
    auto route = static_cast<size_t>(pair.route_begin[static_cast<size_t>(i)]);
    for (const int32_t slot : pair.slots(i)) {
      int64_t& row = next[pair.one_row ? 0 : static_cast<size_t>(pair.expert[route])];
      if (row >= 0 && slot != row) {
        node.fail("has slot[{}] = {} (the next row is {})", route, slot, row);
      }
      row = slot + 1;
      ++route;
    }
  }
}

// Also fills route_slot, which has by token what `sent` has by receiver.
void check_sent(const JsonNode& node, PlanData& plan) {
  const int per_rank = plan.shape.num_local_experts();
  const std::vector<JsonNode> entries = node.list();
  plan.route_slot.assign(plan.route_expert.size(), -1);
  for (size_t rank = 0; rank < plan.sent.size(); ++rank) {
    const Arrivals& pair = plan.sent[rank];
    std::vector<int64_t> next(static_cast<size_t>(per_rank), -1);
    check_rows(entries[rank], pair, next);
    for (size_t i = 0; i < pair.token.size(); ++i) {
      const auto end = static_cast<size_t>(pair.route_begin[i + 1]);
      for (auto r = static_cast<size_t>(pair.route_begin[i]); r < end; ++r) {
        const auto route = static_cast<size_t>(pair.token[i] * plan.shape.topk + pair.k[r]);
        if (plan.route_expert[route] != static_cast<int>(rank) * per_rank + pair.expert[r]) {
          entries[rank].fail("disagrees with route_expert (route {})", r);
        }
        plan.route_slot[route] = pair.slot[r];
      }
    }
  }
  for (size_t i = 0; i < plan.route_slot.size(); ++i) {
    plan.overflow = plan.overflow || (plan.route_expert[i] >= 0 && plan.route_slot[i] < 0);
  }
}

void check_received(const JsonNode& node, const PlanData& plan) {
  const bool is_rank_major = plan.shape.options.layout == Layout::kRankMajor;
  const std::vector<JsonNode> entries = node.list();
  std::vector<int64_t> next = plan.expert_begin;
  for (size_t source = 0; source < entries.size(); ++source) {
    check_rows(entries[source], plan.received[source], next);
  }
  for (size_t e = 0; e < next.size(); ++e) {
    const int64_t all_rows = e == 0 ? std::min(plan.num_rows, plan.required_rows) : 0;
    const int64_t end = plan.expert_begin[e] + (is_rank_major ? all_rows : plan.rows_per_expert[e]);
    if (next[e] != end) {
      node.fail("fills the rows of expert {} up to {} (expected {})", e, next[e], end);
    }
  }
  const auto own = static_cast<size_t>(plan.shape.rank);
  if (!(plan.sent[own] == plan.received[own])) {
    entries[own].fail("disagrees with what this rank sends to itself");
  }
}

// Checks this rank's routes, of which those dropped are in route_expert only, with those that it
// receives of others: no more than all ranks' routes, and without others as many.
void check_route_counts(const JsonNode& node, const PlanData& plan) {
  const PlanShape& shape = plan.shape;
  std::vector<int64_t> known(plan.global_routes.size());
  for (const int32_t expert : plan.route_expert) {
    if (expert >= 0) {
      ++known[static_cast<size_t>(expert)];
    }
  }
  const auto first =
      static_cast<size_t>(shape.rank) * static_cast<size_t>(shape.num_local_experts());
  for (size_t source = 0; source < plan.received.size(); ++source) {
    if (source != static_cast<size_t>(shape.rank)) {
      for (const int32_t expert : plan.received[source].expert) {
        ++known[first + static_cast<size_t>(expert)];
      }
    }
  }
  const bool is_alone = shape.num_ranks == 1;
  for (size_t e = 0; e < known.size(); ++e) {
    const int64_t all = plan.global_routes[e];
    if (is_alone ? known[e] != all : known[e] > all) {
      node.fail(
          "and what is received have {} routes to expert {} (global_routes has {})",
          known[e],
          e,
          all
      );
    }
  }
}

void read_routes(const JsonNode& whole, PlanData& plan) {
  const int64_t num_routes = plan.shape.num_tokens * plan.shape.topk;
  plan.route_expert =
      whole["route_expert"].integers<int32_t>(num_routes, -1, plan.shape.num_experts - 1);
  check_empty_places(whole, plan);
  // A pair has two ends: bounds of this rank's are known, of the other's not.
  const ArrivalBounds sent(plan.shape, plan.shape.num_tokens, kMaxInt32);
  const ArrivalBounds received(plan.shape, kMaxInt32, plan.num_rows);
  plan.sent = arrivals_from(whole["sent"], plan.shape.num_ranks, sent);
  check_sent(whole["sent"], plan);
  whole["route_slot"].must_be(plan.route_slot);
  // Checks the size before memory is taken.
  static_cast<void>(
      whole["output"]["row_experts"].list(received.one_row ? plan.num_rows * plan.shape.topk : 0)
  );
  add_received(plan, arrivals_from(whole["received"], plan.shape.num_ranks, received));
  check_received(whole["received"], plan);
  check_route_counts(whole["route_expert"], plan);
}

// Reads routes and weights and compares all else, which follows, so executors may follow the plan.
// Throws Error (kFile).
PlanData plan_from_json(const JsonNode& whole) {
  const JsonNode format = whole["format"];
  format.require(format.text() == kPlanFormat, fmt::format("expected \"{}\"", kPlanFormat));
  const JsonNode version = whole["version"];
  if (const int64_t number = version.integer(0, kMaxInt32); number != kPlanVersion) {
    version.fail(
        "is {} (Weft {} reads plans of version {}: save the plan again with it)",
        number,
        weft::version(),
        kPlanVersion
    );
  }
  PlanData plan;
  plan.shape = shape_from(whole["shape"]);
  read_output_shape(whole, plan);
  read_routes(whole, plan);
  const Value output = output_to_json(plan);
  for (const auto& [key, value] : output.items()) {
    whole["output"][key].must_be(value);
  }
  link_tokens(plan);
  return plan;
}

}  // namespace

std::string Plan::to_json() const {
  const Json whole = {
      {"format", kPlanFormat},
      {"version", kPlanVersion},
      {"shape", shape_to_json(data().shape)},
      {"output", output_to_json(data())},
      {"global_routes", data().global_routes},
      {"route_expert", data().route_expert},
      {"route_slot", data().route_slot},
      {"sent", arrivals_to_json(data().sent)},
      {"received", arrivals_to_json(data().received)}};
  return whole.dump() + "\n";
}

Plan Plan::from_json(std::string_view text, std::string_view name) {
  const Value whole = parse_json(text, name);
  return Plan(std::make_shared<const PlanData>(plan_from_json(JsonNode(whole, name))));
}

void Plan::save(const std::string& path) const {
  write_file_atomically(path, to_json());
}

Plan Plan::load(const std::string& path) {
  return from_json(read_whole_file(path), path);
}

}  // namespace weft
