// SPDX-License-Identifier: Apache-2.0
#include "train_agreement.hpp"

#include <array>
#include <span>
#include <vector>

#include "core/check.hpp"
#include "group/block_value.hpp"

namespace weft::program {
namespace {

struct Agreed {
  const char* name;
  int64_t value;
};

// 0: not asked for.
std::array<Agreed, 4> agreed_options(const TrainOptions& options) {
  const bool keeps = !options.checkpoint_path.empty();
  const bool saves_routing = !options.routing_path.empty();
  return {
      {{"--steps", options.steps},
       {"--resume", options.is_resumed},
       {"--checkpoint-every (with --checkpoint)", keeps ? options.checkpoint_every : 0},
       {"--routing-every (with --save-routing)", saves_routing ? options.routing_every : 0}}};
}

}  // namespace

void agree_on_options(const Group& group, const TrainOptions& options) {
  const Context context = {group.rank(), group.num_ranks()};
  const auto mine = agreed_options(options);
  std::array<int64_t, std::tuple_size_v<decltype(mine)>> values = {};
  for (size_t i = 0; i < values.size(); ++i) {
    values[i] = mine[i].value;
  }
  const std::vector<Bytes> blocks = group.all_gather(std::as_bytes(std::span(values)));
  for (size_t rank = 0; rank < blocks.size(); ++rank) {
    const auto theirs = block_value<decltype(values)>(blocks[rank], rank, context);
    for (size_t i = 0; i < values.size(); ++i) {
      WEFT_CHECK_ARG(
          context,
          theirs[i] == values[i],
          "train: {} = {} here and {} on rank {} (0: not given; must be equal on all ranks)",
          mine[i].name,
          values[i],
          theirs[i],
          rank
      );
    }
  }
}

}  // namespace weft::program
