// SPDX-License-Identifier: Apache-2.0
#include "moe/checkpoint_header.hpp"

#include <nlohmann/json.hpp>

#include <algorithm>
#include <string_view>

#include "core/check.hpp"

namespace weft::moe {
namespace {

using Json = nlohmann::ordered_json;

constexpr std::string_view kMagic = "weft-moe-checkpoint 1 ";
constexpr size_t kChecksumDigits = 16;

// What must be equal to go on; also the fields as they stand in the file.
Json identity(const CheckpointHeader& header) {
  return {
      {"window", header.model.window},
      {"hidden", header.model.hidden},
      {"expert_hidden", header.model.expert_hidden},
      {"num_blocks", header.model.num_blocks},
      {"num_experts", header.model.num_experts},
      {"topk", header.model.topk},
      {"balance_weight", header.model.balance_weight},
      {"global_batch", header.global_batch},
      {"seed", header.seed},
      {"dtype", dtype_name(header.dtype)},
      {"text_bytes", header.text_bytes},
      {"text_checksum", header.text_checksum},
      {"num_elements", header.num_elements}};
}

std::string hex(uint64_t value) {
  return fmt::format("{:016x}", value);
}

[[noreturn]] void fail(const std::string& path, std::string_view problem) {
  raise_error(ErrorCode::kFile, {}, fmt::format("resume: {}: {}", path, problem));
}

// The JSON text between the first line and the zeros, its checksum proven.
std::string_view json_text(std::string_view bytes, const std::string& path) {
  if (!bytes.starts_with(kMagic)) {
    fail(path, fmt::format("not a checkpoint (it does not begin with \"{}\")", kMagic));
  }
  const std::string_view digits = bytes.substr(kMagic.size(), kChecksumDigits);
  std::string_view text = bytes.substr(kMagic.size() + kChecksumDigits + 1);
  text = text.substr(0, text.find('\0'));
  if (digits != hex(checksum(std::as_bytes(std::span(text))))) {
    fail(path, "the header is damaged (its checksum differs)");
  }
  return text;
}

}  // namespace

HeaderBytes encode_header(const CheckpointHeader& header, uint64_t data_checksum) {
  Json json = identity(header);
  json["steps_done"] = header.steps_done;
  json["data_checksum"] = data_checksum;
  const std::string text = json.dump(1) + "\n";
  const std::string all =
      fmt::format("{}{}\n{}", kMagic, hex(checksum(std::as_bytes(std::span(text)))), text);
  HeaderBytes bytes = {};
  WEFT_ASSERT(all.size() < bytes.size());
  std::ranges::copy(std::as_bytes(std::span(all)), bytes.begin());
  return bytes;
}

HeaderContents decode_header(
    std::span<const std::byte> bytes, const CheckpointHeader& expected, const std::string& path
) {
  const std::string_view all(reinterpret_cast<const char*>(bytes.data()), bytes.size());
  const Json json = Json::parse(json_text(all, path), nullptr, false);
  if (!json.is_object()) {
    fail(path, "the header is not JSON");
  }
  const Json wanted = identity(expected);
  for (const auto& [field, value] : wanted.items()) {
    if (!json.contains(field)) {
      fail(path, fmt::format("the header lacks \"{}\"", field));
    }
    if (json[field] != value) {
      const auto theirs = json[field].dump();
      fail(path, fmt::format("{} = {} ({} in this run)", field, theirs, value.dump()));
    }
  }
  const auto number = [&](const char* field) -> const Json& {
    if (!json.contains(field) || !json[field].is_number_integer()) {
      fail(path, fmt::format("the header lacks \"{}\"", field));
    }
    return json[field];
  };
  const HeaderContents contents = {
      number("steps_done").get<int64_t>(), number("data_checksum").get<uint64_t>()};
  if (contents.steps_done < 0) {
    fail(path, fmt::format("steps_done = {} (at least 0)", contents.steps_done));
  }
  return contents;
}

}  // namespace weft::moe
