// SPDX-License-Identifier: Apache-2.0
#include "simulate/model.hpp"

#include <nlohmann/json.hpp>

#include <algorithm>
#include <array>
#include <cmath>
#include <string>

#include "core/atomic_file.hpp"
#include "core/check.hpp"

namespace weft::sim {
namespace {

constexpr double kTiny = 1e-9;  // least of what is divided by

constexpr std::array kFields = {
    ModelField{
        "link_gbps", &Model::link_gbps, kTiny, "GB/s out of, and into, a rank inside its domain"},
    ModelField{"link_latency_us", &Model::link_latency_us, 0, "from a rank's store to its peer"},
    ModelField{"link_signal_us", &Model::link_signal_us, 0, "of the sender, for a chunk's signal"},
    ModelField{"copy_gbps", &Model::copy_gbps, kTiny, "GB/s a rank copies or sums in its memory"},
    ModelField{"one_mover", &Model::one_mover, 0, "1: who sends also copies, so the times add"},
    ModelField{"card_gbps", &Model::card_gbps, kTiny, "GB/s out of, and into, a network card"},
    ModelField{"card_latency_us", &Model::card_latency_us, 0, "from card to card"},
    ModelField{"card_messages", &Model::card_messages, kTiny, "million messages/s of a card"},
    ModelField{"card_window", &Model::card_window, 1, "messages of a rank not yet confirmed"},
    ModelField{"post_us", &Model::post_us, 0, "of a proxy thread, for a message"},
    ModelField{"proxies", &Model::proxies, 1, "proxy threads of a rank"},
    ModelField{"message_rows", &Model::message_rows, 1, "most rows of a network message"},
    ModelField{"call_us", &Model::call_us, 0, "of a dispatch or combine, whatever it moves"},
    ModelField{"plan_base_us", &Model::plan_base_us, 0, "of a plan, whatever it holds"},
    ModelField{"plan_token_ns", &Model::plan_token_ns, 0, "of a plan, for each token of a rank"},
    ModelField{
        "plan_count_ns",
        &Model::plan_count_ns,
        0,
        "of a plan, for each of ranks x (experts + ranks) counts"},
};

[[noreturn]] void refuse_file(const std::string& path, std::string_view problem) {
  raise_error(ErrorCode::kFile, {}, fmt::format("load: {}: {}", path, problem));
}

template <class T>
T read(
    const std::string& path, const nlohmann::json& json, const std::string& at, const char* wanted
) {
  try {
    return json.at(nlohmann::json::json_pointer(at)).get<T>();
  } catch (const nlohmann::json::exception&) {
    refuse_file(path, fmt::format("{} is no {}", at, wanted));
  }
}

std::string names_of_fields() {
  std::string names;
  for (const ModelField& field : kFields) {
    names += (names.empty() ? "" : ", ") + std::string(field.name);
  }
  return names;
}

}  // namespace

std::span<const ModelField> model_fields() {
  return kFields;
}

void set_field(Model& model, std::string_view name, double value, std::string_view origin) {
  const auto field = std::ranges::find(kFields, name, &ModelField::name);
  WEFT_CHECK_ARG(Context{}, field != kFields.end(), "{} is not one of {}", name, names_of_fields());
  WEFT_CHECK_ARG(
      Context{},
      std::isfinite(value) && value >= field->least,
      "{}={} is below {}",
      name,
      value,
      field->least
  );
  model.*field->value = value;
  model.origin[std::string(name)] = origin;
}

double plan_work_us(const Model& model, int num_ranks, int num_experts, int64_t num_tokens) {
  const double counts = num_ranks * (static_cast<double>(num_experts) + num_ranks);
  const double tokens = static_cast<double>(num_tokens);
  return model.plan_base_us + (model.plan_token_ns * tokens + model.plan_count_ns * counts) / 1e3;
}

std::string model_json(const Model& model) {
  nlohmann::ordered_json json = {
      {"name", model.name}, {"values", nlohmann::ordered_json::object()}};
  for (const ModelField& field : kFields) {
    const auto origin = model.origin.find(field.name);
    json["values"][std::string(field.name)] = {
        {"value", model.*field.value},
        {"meaning", field.meaning},
        {"origin", origin == model.origin.end() ? "assumed" : origin->second}};
  }
  json["plan_samples"] = nlohmann::ordered_json::array();
  for (const PlanSample& sample : model.plan_samples) {
    json["plan_samples"].push_back(
        {{"ranks", sample.num_ranks},
         {"experts", sample.num_experts},
         {"tokens", sample.num_tokens},
         {"us", sample.us}}
    );
  }
  return json.dump(2) + "\n";
}

Model load_model(const std::string& path) {
  const auto json = nlohmann::json::parse(read_whole_file(path), nullptr, false);
  if (json.is_discarded() || !json.is_object()) {
    refuse_file(path, "it is not a JSON object");
  }
  Model model;
  model.name = read<std::string>(path, json, "/name", "text");
  for (const ModelField& field : kFields) {
    const std::string at = fmt::format("/values/{}", field.name);
    const auto value = read<double>(path, json, at + "/value", "number");
    if (!std::isfinite(value) || value < field.least) {
      refuse_file(path, fmt::format("{} is {} (at least {})", at, value, field.least));
    }
    const auto origin = read<std::string>(path, json, at + "/origin", "text");
    set_field(model, field.name, value, origin);
  }
  const size_t num_samples = json.contains("plan_samples") ? json["plan_samples"].size() : 0;
  for (size_t i = 0; i < num_samples; ++i) {
    const std::string at = fmt::format("/plan_samples/{}", i);
    model.plan_samples.push_back(
        {read<int>(path, json, at + "/ranks", "number"),
         read<int>(path, json, at + "/experts", "number"),
         read<int64_t>(path, json, at + "/tokens", "number"),
         read<double>(path, json, at + "/us", "number")}
    );
  }
  return model;
}

Model h200_model() {
  constexpr const char* kCard = "assumed: a 400 Gb/s card for each rank";
  constexpr const char* kProxy = "assumed";
  Model model;
  model.name = "h200";
  set_field(model, "link_gbps", 350, "measured: bulk stores of 64 SMs, all GPUs to all others");
  set_field(model, "link_latency_us", 0.8, "measured: half of a signal to a peer GPU and back");
  set_field(model, "link_signal_us", 0, "measured: hidden behind the rows, part of call_us");
  set_field(model, "copy_gbps", 2150, "measured: copy inside a GPU, read and written 4.3 TB/s");
  set_field(model, "one_mover", 0, "by design: pushing and copying SMs differ");
  set_field(model, "card_gbps", 50, kCard);
  set_field(model, "card_latency_us", 5, "assumed: card, two switches, card");
  set_field(model, "card_messages", 100, kCard);
  set_field(model, "card_window", 256, kProxy);
  set_field(model, "post_us", 0.3, kProxy);
  set_field(model, "proxies", 1, kProxy);
  set_field(model, "message_rows", 32, "by design: a message is a packed chunk");
  set_field(
      model, "call_us", 24.5, "measured: what a dispatch of 128 tokens takes beyond its bytes"
  );
  set_field(model, "plan_base_us", 24.2, "measured: plan of 128 tokens, 4 ranks, 256 experts");
  set_field(model, "plan_token_ns", 0.66, "measured: plan of 4,096 tokens less that of 128");
  set_field(model, "plan_count_ns", 0.0025, "assumed: counts are read at 1.6 TB/s by 32 blocks");
  return model;
}

}  // namespace weft::sim
