// SPDX-License-Identifier: Apache-2.0
#include "plan/json_node.hpp"

#include <bit>
#include <charconv>
#include <cmath>

#include "core/check.hpp"

namespace weft {
namespace {

// Long values would drown the message.
std::string shown(const nlohmann::json& value) {
  std::string text = value.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
  return text.size() <= 40 ? text : text.substr(0, 37) + "...";
}

// What the parser says, without its "[json.exception....] ".
std::string_view without_id(std::string_view what) {
  const size_t end = what.find("] ");
  return end == what.npos ? what : what.substr(end + 2);
}

}  // namespace

void JsonNode::fail(std::string_view problem) const {
  raise_error(
      ErrorCode::kFile,
      {},
      fmt::format("load: {}: {} {}", file_, path_.empty() ? "the whole" : path_, problem)
  );
}

JsonNode JsonNode::operator[](std::string_view key) const {
  if (!value_->is_object()) {
    fail(fmt::format("is {} (an object with \"{}\")", shown(*value_), key));
  }
  JsonNode child(*value_, file_, fmt::format("{}/{}", path_, key));
  const auto found = value_->find(key);
  if (found == value_->end()) {
    child.fail("is missing");
  }
  child.value_ = &*found;
  return child;
}

int64_t JsonNode::integer(int64_t low, int64_t high) const {
  const bool is_huge =
      value_->is_number_unsigned() &&
      value_->get<uint64_t>() > static_cast<uint64_t>(std::numeric_limits<int64_t>::max());
  const bool is_int = value_->is_number_integer() && !is_huge;
  if (!is_int || value_->get<int64_t>() < low || value_->get<int64_t>() > high) {
    fail(fmt::format("is {} (an integer from {} to {})", shown(*value_), low, high));
  }
  return value_->get<int64_t>();
}

bool JsonNode::boolean() const {
  if (!value_->is_boolean()) {
    fail(fmt::format("is {} (true or false)", shown(*value_)));
  }
  return value_->get<bool>();
}

std::string_view JsonNode::text() const {
  if (!value_->is_string()) {
    fail(fmt::format("is {} (a string)", shown(*value_)));
  }
  return value_->get_ref<const std::string&>();
}

std::vector<JsonNode> JsonNode::list() const {
  if (!value_->is_array()) {
    fail(fmt::format("is {} (a list)", shown(*value_)));
  }
  std::vector<JsonNode> entries;
  entries.reserve(value_->size());
  for (size_t i = 0; i < value_->size(); ++i) {
    entries.emplace_back((*value_)[i], file_, fmt::format("{}/{}", path_, i));
  }
  return entries;
}

std::vector<JsonNode> JsonNode::list(int64_t length) const {
  std::vector<JsonNode> entries = list();
  if (static_cast<int64_t>(entries.size()) != length) {
    fail(fmt::format("has {} entries (expected {})", entries.size(), length));
  }
  return entries;
}

float JsonNode::number() const {
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
  fail(fmt::format("is {} (a float, or its bits as \"0x7fc00000\")", shown(*value_)));
}

std::vector<float> JsonNode::floats() const {
  std::vector<float> values;
  for (const JsonNode& entry : list()) {
    values.push_back(entry.number());
  }
  return values;
}

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
  raise_error(ErrorCode::kFile, {}, fmt::format("load: {}: {}", file, what));
}

nlohmann::json floats_to_json(const std::vector<float>& values) {
  auto list = nlohmann::json::array();
  for (const float value : values) {
    if (std::isfinite(value)) {
      list.push_back(value);
    } else {
      list.push_back(fmt::format("0x{:08x}", std::bit_cast<uint32_t>(value)));
    }
  }
  return list;
}

}  // namespace weft
