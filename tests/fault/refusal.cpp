// SPDX-License-Identifier: Apache-2.0
#include "refusal.hpp"

#include <gtest/gtest.h>

#include "support/run_case.hpp"

namespace weft::test {
namespace {

bool is_untouched(const Matrix& matrix) {
  Tensor view = const_cast<Matrix&>(matrix).view();
  return is_canary(view) && matrix.has_guards_untouched();
}

RankCall canaries(const CaseData& good, size_t rank) {
  const auto like = [](const ConstTensor& tensor) {
    return Matrix(tensor.dtype, tensor.rows, tensor.cols);
  };
  const RankCall& dispatch = good.calls[0][rank];
  RankCall scratch;
  scratch.x = like(dispatch.x.view());
  scratch.weights = like(dispatch.weights.view());
  scratch.rows = like(dispatch.rows.view());
  scratch.row_weights = like(dispatch.row_weights.view());
  scratch.row_scales = like(dispatch.row_scales.view());
  return scratch;
}

}  // namespace

RefusalWorld::RefusalWorld() {
  setup.num_ranks = 3;
  setup.num_experts = 6;
  setup.max_tokens = 32;
  Case spec;
  spec.num_tokens = {20, 32, 7};
  spec.scale_cols = 4;
  good = make_case_data(setup, spec);
}

std::vector<std::string> refused_texts(const RefusalCall& call) {
  const RefusalWorld world;
  std::vector<std::string> texts(3);
  run_threads(3, [&](const Group& group) {
    const auto rank = static_cast<size_t>(group.rank());
    Exchange exchange(group, world.setup.config());
    const RankRouting& routing = world.good.routing[rank];
    RefusalRank own = {
        exchange,
        group.rank(),
        world.good,
        exchange.plan(routing.routing(), routing.options),
        canaries(world.good, rank)};
    const auto thrown = thrown_by([&] { call(own); });
    texts[rank] = text_of(thrown);
    EXPECT_EQ(thrown.value_or(Thrown{}).code, ErrorCode::kInvalidArgument) << texts[rank];
    for (const Matrix* matrix :
         {&own.scratch.x,
          &own.scratch.weights,
          &own.scratch.rows,
          &own.scratch.row_weights,
          &own.scratch.row_scales}) {
      EXPECT_TRUE(is_untouched(*matrix)) << "a refused call wrote on rank " << rank;
    }
    EXPECT_EQ(run_cases(exchange, {&world.good, 1}), "") << "after: " << texts[rank];
  });
  return texts;
}

void expect_refusal_of_rank_1(
    const std::string& operation, const std::string& reason, const RefusalCall& call
) {
  const std::vector<std::string> texts = refused_texts(call);
  const std::string own = reason + " [rank 1/3, loopback]";
  EXPECT_EQ(texts[1], own);
  for (const int rank : {0, 2}) {
    const std::string& text = texts[static_cast<size_t>(rank)];
    EXPECT_TRUE(text.starts_with(operation + ": rank 1 refused the call: " + own)) << text;
    EXPECT_TRUE(text.ends_with(" [rank " + std::to_string(rank) + "/3, loopback]")) << text;
  }
}

}  // namespace weft::test
