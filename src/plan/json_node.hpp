// SPDX-License-Identifier: Apache-2.0
// A JSON value that knows where it stands, so that every fault names file and key path.
#pragma once

#include <nlohmann/json.hpp>

#include <cstdint>
#include <limits>
#include <string>
#include <string_view>
#include <vector>

namespace weft {

class JsonNode {
 public:
  JsonNode(const nlohmann::json& value, std::string_view file, std::string path = {})
      : value_(&value), file_(file), path_(std::move(path)) {}

  // Throw Error (kFile): a key or an entry that is missing, a value of another kind or out of
  // range.
  [[nodiscard]] JsonNode operator[](std::string_view key) const;
  [[nodiscard]] int64_t integer(int64_t low, int64_t high) const;
  [[nodiscard]] bool boolean() const;
  [[nodiscard]] std::string_view text() const;
  [[nodiscard]] bool is_null() const { return value_->is_null(); }
  [[nodiscard]] std::vector<JsonNode> list() const;
  [[nodiscard]] std::vector<JsonNode> list(int64_t length) const;

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
  // A finite number, or the bits of another float as "0x7fc00000".
  [[nodiscard]] std::vector<float> floats() const;

  // "load: FILE: PATH PROBLEM"
  [[noreturn]] void fail(std::string_view problem) const;

 private:
  [[nodiscard]] float number() const;
  const nlohmann::json* value_;
  std::string_view file_;
  std::string path_;  // JSON pointer
};

// Throws Error (kFile) naming the byte where the text stops to be JSON.
[[nodiscard]] nlohmann::json parse_json(std::string_view text, std::string_view file);

// The counterpart of floats().
[[nodiscard]] nlohmann::json floats_to_json(const std::vector<float>& values);

}  // namespace weft
