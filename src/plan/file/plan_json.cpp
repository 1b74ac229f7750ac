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
#include <string>
#include <string_view>
#include <vector>

#include "core/atomic_file.hpp"
#include "core/check.hpp"
#include "plan/build.hpp"
#include "plan/plan_data.hpp"
#include "plan/slots.hpp"
#include "weft/version.hpp"

namespace weft {
namespace {

constexpr std::string_view kPlanFormat = "weft plan";
constexpr int kPlanVersion = 1;

// --- reading ---

// A JSON value that knows where it stands, so that every fault names file and key path.
class JsonNode {
 public:
  JsonNode(const nlohmann::json& value, std::string_view file, std::string path = {})
      : value_(&value), file_(file), path_(std::move(path)) {}

  // These throw Error (kFile) for a key or an entry that is missing and for a value of another kind
  // or out of range.
  [[nodiscard]] JsonNode operator[](std::string_view key) const {
    if (!value_->is_object()) {
      fail("is {} (an object with \"{}\")", shown(), key);
    }
    JsonNode child(*value_, file_, fmt::format("{}/{}", path_, key));
    const auto found = value_->find(key);
    if (found == value_->end()) {
      child.fail("is missing");
    }
    child.value_ = &*found;
    return child;
  }

  [[nodiscard]] int64_t integer(int64_t low, int64_t high) const {
    const bool is_huge =
        value_->is_number_unsigned() &&
        value_->get<uint64_t>() > static_cast<uint64_t>(std::numeric_limits<int64_t>::max());
    const bool is_int = value_->is_number_integer() && !is_huge;
    if (!is_int || value_->get<int64_t>() < low || value_->get<int64_t>() > high) {
      fail("is {} (an integer from {} to {})", shown(), low, high);
    }
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

  [[nodiscard]] bool is_null() const { return value_->is_null(); }

  [[nodiscard]] std::vector<JsonNode> list() const {
    require(value_->is_array(), "a list");
    std::vector<JsonNode> entries;
    entries.reserve(value_->size());
    for (size_t i = 0; i < value_->size(); ++i) {
      entries.emplace_back((*value_)[i], file_, fmt::format("{}/{}", path_, i));
    }
    return entries;
  }

  [[nodiscard]] std::vector<JsonNode> list(int64_t length) const {
    std::vector<JsonNode> entries = list();
    if (static_cast<int64_t>(entries.size()) != length) {
      fail("has {} entries (expected {})", entries.size(), length);
    }
    return entries;
  }

  template <class Int>
  [[nodiscard]] std::vector<Int> integers(
      int64_t low = 0, int64_t high = std::numeric_limits<Int>::max()
  ) const {
    std::vector<Int> values;
    for (const JsonNode& entry : list()) {
      values.push_back(static_cast<Int>(entry.integer(low, high)));
    }
    return values;
  }
  template <class Int>
  [[nodiscard]] std::vector<Int> integers_of(int64_t length, int64_t low = 0) const {
    static_cast<void>(list(length));
    return integers<Int>(low);
  }

  // Finite numbers, or the bits of other floats as "0x7fc00000".
  [[nodiscard]] std::vector<float> floats() const {
    std::vector<float> values;
    for (const JsonNode& entry : list()) {
      values.push_back(entry.number());
    }
    return values;
  }

  // "load: FILE: PATH PROBLEM"
  template <class... Args>
  [[noreturn]] void fail(fmt::format_string<Args...> format, Args&&... args) const {
    const std::string_view place = path_.empty() ? "the whole" : std::string_view(path_);
    const std::string problem = fmt::format(format, std::forward<Args>(args)...);
    WEFT_RAISE(Context{}, ErrorCode::kFile, "load: {}: {} {}", file_, place, problem);
  }

 private:
  // Long values would drown the message.
  [[nodiscard]] std::string shown() const {
    std::string text = value_->dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
    return text.size() <= 40 ? text : text.substr(0, 37) + "...";
  }

  void require(bool is_right, std::string_view expected) const {
    if (!is_right) {
      fail("is {} ({})", shown(), expected);
    }
  }

  [[nodiscard]] float number() const {
    if (value_->is_string()) {
      const std::string_view text = this->text();
      uint32_t bits = 0;
      const auto end = text.data() + text.size();
      if (text.size() == 10 && text.starts_with("0x") &&
          std::from_chars(text.data() + 2, end, bits, 16).ptr == end) {
        return std::bit_cast<float>(bits);
      }
    } else if (value_->is_number()) {
      const auto value = static_cast<float>(value_->get<double>());
      if (std::isfinite(value)) {
        return value;
      }
    }
    fail("is {} (a float, or its bits as \"0x7fc00000\")", shown());
  }

  const nlohmann::json* value_;
  std::string_view file_;
  std::string path_;  // JSON pointer
};

// What the parser says, without its "[json.exception....] ".
std::string_view without_id(std::string_view what) {
  const size_t end = what.find("] ");
  return end == what.npos ? what : what.substr(end + 2);
}

// Throws Error (kFile) naming the byte where the text stops to be JSON.
nlohmann::json parse_json(std::string_view text, std::string_view file) {
  std::string what;
  try {
    return nlohmann::json::parse(text);
  } catch (const nlohmann::json::parse_error& error) {
    what = fmt::format("not JSON at byte {} ({})", error.byte, without_id(error.what()));
  } catch (const nlohmann::json::out_of_range& error) {  // a number beyond the range of a double
    what = without_id(error.what());
  }
  if (text.empty()) {
    what = "the file is empty (expected a plan as JSON)";
  }
  WEFT_RAISE(Context{}, ErrorCode::kFile, "load: {}: {}", file, what);
}

constexpr int64_t kMaxInt32 = std::numeric_limits<int32_t>::max();

Layout layout_from(const JsonNode& node) {
  for (const Layout layout : {Layout::kRankMajor, Layout::kExpertMajor, Layout::kExpertStrided}) {
    if (node.text() == layout_name(layout)) {
      return layout;
    }
  }
  node.fail("is \"{}\" (\"rank_major\", \"expert_major\" or \"expert_strided\")", node.text());
}

Overflow overflow_from(const JsonNode& node) {
  if (node.text() != "drop" && node.text() != "error") {
    node.fail("is \"{}\" (\"drop\" or \"error\")", node.text());
  }
  return node.text() == "error" ? Overflow::kError : Overflow::kDrop;
}

PlanShape shape_from(const JsonNode& node) {
  PlanShape shape;
  shape.num_ranks = static_cast<int>(node["num_ranks"].integer(1, kMaxInt32));
  shape.rank = static_cast<int>(node["rank"].integer(0, shape.num_ranks - 1));
  shape.num_experts = static_cast<int>(node["num_experts"].integer(1, kMaxInt32));
  if (shape.num_experts % shape.num_ranks != 0) {
    node["num_experts"].fail(
        "is {} (a multiple of num_ranks = {})", shape.num_experts, shape.num_ranks
    );
  }
  shape.topk = static_cast<int>(node["topk"].integer(1, kMaxTopk));
  shape.num_tokens = node["num_tokens"].integer(0, kMaxInt32 / shape.topk);
  shape.from_map = node["from_map"].boolean();
  shape.has_weights = node["has_weights"].boolean();
  shape.options.layout = layout_from(node["layout"]);
  shape.options.pad_multiple = node["pad_multiple"].integer(1, kMaxInt32);
  shape.options.expert_stride = node["expert_stride"].integer(0, kMaxInt32);
  if (const JsonNode budget = node["row_budget"]; !budget.is_null()) {
    shape.options.row_budget = budget.integer(0, kMaxInt32);
  }
  shape.options.overflow = overflow_from(node["overflow"]);
  return shape;
}

void read_padding(const JsonNode& node, PlanData& plan) {
  int64_t previous = 0;
  for (const JsonNode& pair : node.list()) {
    const std::vector<JsonNode> ends = pair.list(2);
    const int64_t begin = ends[0].integer(previous, plan.num_rows);
    previous = ends[1].integer(begin, plan.num_rows);
    plan.padding.emplace_back(begin, previous);
  }
}

void read_output(const JsonNode& node, PlanData& plan) {
  const int64_t num_local = plan.shape.num_local_experts();
  plan.num_rows = node["num_rows"].integer(0, kMaxInt32);
  plan.required_rows = node["required_rows"].integer(0, std::numeric_limits<int64_t>::max());
  plan.overflow = node["overflow"].boolean();
  plan.rows_per_expert = node["rows_per_expert"].integers_of<int64_t>(num_local);
  plan.padded_rows_per_expert = node["padded_rows_per_expert"].integers_of<int64_t>(num_local);
  plan.expert_begin = node["expert_begin"].integers_of<int64_t>(num_local);
  read_padding(node["padding"], plan);
  const bool is_rank_major = plan.shape.options.layout == Layout::kRankMajor;
  plan.row_experts = node["row_experts"].integers_of<int32_t>(
      is_rank_major ? plan.num_rows * plan.shape.topk : 0, -1
  );
  for (size_t e = 0; e < plan.expert_begin.size() && !is_rank_major; ++e) {
    const int64_t padded = plan.padded_rows_per_expert[e];
    if (plan.rows_per_expert[e] > padded || padded > plan.num_rows ||
        plan.expert_begin[e] > plan.num_rows - padded) {
      node["expert_begin"].fail(
          "puts expert {} at {} with {} rows, padded to {} (num_rows = {})",
          e,
          plan.expert_begin[e],
          plan.rows_per_expert[e],
          padded,
          plan.num_rows
      );
    }
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

// `sent` says again, by receiver, what route_expert and route_slot say by token.
void check_sent(const JsonNode& node, const PlanData& plan) {
  const int per_rank = plan.shape.num_local_experts();
  int64_t sent = 0;
  for (size_t rank = 0; rank < plan.sent.size(); ++rank) {
    const Arrivals& arrivals = plan.sent[rank];
    sent += arrivals.num_routes();
    for (int64_t i = 0; i < arrivals.size(); ++i) {
      const auto token = static_cast<size_t>(arrivals.token[static_cast<size_t>(i)]);
      const auto last = static_cast<size_t>(arrivals.route_begin[static_cast<size_t>(i) + 1]);
      for (auto r = static_cast<size_t>(arrivals.route_begin[static_cast<size_t>(i)]); r < last;
           ++r) {
        const size_t route =
            token * static_cast<size_t>(plan.shape.topk) + static_cast<size_t>(arrivals.k[r]);
        const int64_t expert = static_cast<int64_t>(rank) * per_rank + arrivals.expert[r];
        if (plan.route_slot[route] != arrivals.slot[r] || plan.route_expert[route] != expert) {
          node.fail("disagrees with route_expert and route_slot (rank {}, route {})", rank, r);
        }
      }
    }
  }
  const auto is_kept = [](int32_t slot) { return slot >= 0; };
  const int64_t kept = std::ranges::count_if(plan.route_slot, is_kept);
  if (sent != kept) {
    node.fail("has {} routes (route_slot has {})", sent, kept);
  }
}

void read_routes(const JsonNode& whole, PlanData& plan) {
  const int64_t num_routes = plan.shape.num_tokens * plan.shape.topk;
  plan.global_routes = whole["global_routes"].integers_of<int64_t>(plan.shape.num_experts);
  static_cast<void>(whole["route_expert"].list(num_routes));
  plan.route_expert = whole["route_expert"].integers<int32_t>(-1, plan.shape.num_experts - 1);
  plan.route_slot = whole["route_slot"].integers_of<int32_t>(num_routes, -1);

  ArrivalBounds bounds;
  bounds.topk = plan.shape.topk;
  bounds.num_local_experts = plan.shape.num_local_experts();
  bounds.one_row = plan.shape.options.layout == Layout::kRankMajor;
  // A pair has two ends: the bounds of this rank's are known, the other's are not.
  bounds.num_tokens = plan.shape.num_tokens;
  bounds.num_rows = kMaxInt32;
  plan.sent = arrivals_from(whole["sent"], plan.shape.num_ranks, bounds);
  bounds.num_tokens = kMaxInt32;
  bounds.num_rows = plan.num_rows;
  add_received(plan, arrivals_from(whole["received"], plan.shape.num_ranks, bounds));
}

// Checks every size and bound, so that executors may follow the plan. Throws Error (kFile).
PlanData plan_from_json(const JsonNode& whole) {
  if (const JsonNode format = whole["format"]; format.text() != kPlanFormat) {
    format.fail("is \"{}\" (expected \"{}\")", format.text(), kPlanFormat);
  }
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
  read_output(whole["output"], plan);
  const std::vector<int32_t> row_experts = plan.row_experts;
  const std::vector<int64_t> rows_per_expert = plan.rows_per_expert;
  read_routes(whole, plan);
  if (plan.row_experts != row_experts || plan.rows_per_expert != rows_per_expert) {
    whole["received"].fail("disagrees with rows_per_expert or row_experts");
  }
  check_sent(whole["sent"], plan);
  link_tokens(plan);
  return plan;
}

// --- writing ---

using Json = nlohmann::ordered_json;

// The counterpart of JsonNode::floats().
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

Json shape_to_json(const PlanShape& shape) {
  const PlanOptions& options = shape.options;
  return {
      {"rank", shape.rank},
      {"num_ranks", shape.num_ranks},
      {"num_experts", shape.num_experts},
      {"topk", shape.topk},
      {"num_tokens", shape.num_tokens},
      {"from_map", shape.from_map},
      {"has_weights", shape.has_weights},
      {"layout", layout_name(options.layout)},
      {"pad_multiple", options.pad_multiple},
      {"expert_stride", options.expert_stride},
      {"row_budget", options.row_budget ? Json(*options.row_budget) : Json()},
      {"overflow", options.overflow == Overflow::kError ? "error" : "drop"}};
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
  const nlohmann::json whole = parse_json(text, name);
  return Plan(std::make_shared<const PlanData>(plan_from_json(JsonNode(whole, name))));
}

void Plan::save(const std::string& path) const {
  write_file_atomically(path, to_json());
}

Plan Plan::load(const std::string& path) {
  return from_json(read_whole_file(path), path);
}

}  // namespace weft
