// SPDX-License-Identifier: Apache-2.0
#include "call/config_agreement.hpp"

#include <array>
#include <cstring>
#include <exception>
#include <span>
#include <string_view>

#include "call/refusal.hpp"
#include "call/validate.hpp"

namespace weft {
namespace {

constexpr std::array<std::string_view, 6> kFields = {
    "hidden", "max_tokens", "num_experts", "max_topk", "device is a GPU", "copy_engines"};

// What must be equal on all ranks, and whether this rank's config is good at all.
struct ConfigWord {
  std::array<int64_t, kFields.size()> fields;
  uint64_t is_refused;
  RefusalText refusal;
};

}  // namespace

void agree_on_config(
    const Group& group,
    const ExchangeConfig& config,
    const Context& context,
    const std::function<void()>& more_checks
) {
  const bool is_on_gpu = config.device.kind == Device::Kind::kCuda;
  ConfigWord own = {
      {config.hidden,
       config.max_tokens,
       config.num_experts,
       config.max_topk,
       is_on_gpu,
       config.copy_engines},
      0,
      {}};
  std::exception_ptr failure;
  try {
    validate_config(config, context);
    if (more_checks) {
      more_checks();
    }
  } catch (const Error& error) {
    failure = std::current_exception();
    own.is_refused = 1;
    own.refusal = RefusalText(error.what());
  }
  const std::vector<Bytes> blocks = group.all_gather(std::as_bytes(std::span(&own, 1)));
  if (failure) {
    std::rethrow_exception(failure);
  }
  for (size_t rank = 0; rank < blocks.size(); ++rank) {
    ConfigWord word;
    WEFT_CHECK(
        context,
        blocks[rank].size() == sizeof word,
        ErrorCode::kPeerFailed,
        "exchange: rank {} sent {} bytes of config (expected {}; are all ranks of one version?)",
        rank,
        blocks[rank].size(),
        sizeof word
    );
    std::memcpy(&word, blocks[rank].data(), sizeof word);
    WEFT_CHECK_ARG(
        context, word.is_refused == 0, "exchange: rank {} refused: {}", rank, word.refusal.view()
    );
    for (size_t i = 0; i < kFields.size(); ++i) {
      WEFT_CHECK_ARG(
          context,
          own.fields[i] == word.fields[i],
          "exchange: {} = {} here and {} on rank {} (must be equal on all ranks)",
          kFields[i],
          own.fields[i],
          word.fields[i],
          rank
      );
    }
  }
}

}  // namespace weft
