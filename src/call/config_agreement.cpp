// SPDX-License-Identifier: Apache-2.0
#include "call/config_agreement.hpp"

#include <cstring>
#include <exception>
#include <span>
#include <string_view>

#include "call/refusal.hpp"
#include "call/validate.hpp"

namespace weft {
namespace {

// What must be equal on all ranks, and whether this rank's config is good at all.
struct ConfigWord {
  int64_t hidden;
  int64_t max_tokens;
  int64_t num_experts;
  int64_t max_topk;
  int64_t is_on_gpu;
  int64_t copy_engines;
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
  ConfigWord own = {
      config.hidden,
      config.max_tokens,
      config.num_experts,
      config.max_topk,
      config.device.kind == Device::Kind::kCuda,
      config.copy_engines,
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
    const auto compare = [&](std::string_view name, int64_t mine, int64_t theirs) {
      WEFT_CHECK_ARG(
          context,
          mine == theirs,
          "exchange: {} = {} here and {} on rank {} (must be equal on all ranks)",
          name,
          mine,
          theirs,
          rank
      );
    };
    compare("hidden", own.hidden, word.hidden);
    compare("max_tokens", own.max_tokens, word.max_tokens);
    compare("num_experts", own.num_experts, word.num_experts);
    compare("max_topk", own.max_topk, word.max_topk);
    compare("device is a GPU", own.is_on_gpu, word.is_on_gpu);
    compare("copy_engines", own.copy_engines, word.copy_engines);
  }
}

}  // namespace weft
