// SPDX-License-Identifier: Apache-2.0
#include "gpu/fault_world.hpp"

#include <fmt/format.h>

namespace weft::test {

using namespace std::chrono_literals;

FaultWorld::FaultWorld(int num_gpus, std::vector<int> domain_of) {
  setup = gpu_setup(3, num_gpus);
  setup.domain_of = std::move(domain_of);
  setup.has_copy_room = setup.domain_of.empty();
  setup.num_experts = 6;
  setup.max_tokens = 32;
  setup.hidden = setup.domain_of.empty() ? 32 : 512;  // rows that need more room than there is
  Case spec;
  spec.num_tokens = {20, 32, 7};
  spec.scale_cols = 4;
  // Rows of 16 bits go before words have come, but only in one domain; rows of 32 bits never do.
  spec.dtype = setup.domain_of.empty() ? DType::kBFloat16 : DType::kFloat32;
  good = make_case_data(setup, spec);
}

FaultRank::FaultRank(Exchange& used, const CaseData& data)
    : exchange(used), rank(used.rank()), memory(used) {
  const auto own = static_cast<size_t>(rank);
  const RankCall& dispatch = data.calls[0][own];
  const RankCall& combine = data.calls[1][own];
  idx = &memory.add(data.routing[own].topk_idx);
  const auto& weights = memory.add(data.routing[own].weights);
  const auto& x = memory.add(dispatch.x);
  const auto& x_weights = memory.add(dispatch.weights);
  const auto& scales = memory.add(dispatch.scales);
  rows = &memory.add_output(dispatch.rows);
  row_weights = &memory.add_output(dispatch.row_weights);
  const auto& row_scales = memory.add_output(dispatch.row_scales);
  const auto& y = memory.add(combine.rows);
  const auto& y_weights = memory.add(combine.row_weights);
  const auto& sums = memory.add_output(combine.x);
  const auto& sum_weights = memory.add_output(combine.weights);
  memory.upload();
  routing = {.topk_idx = idx->tensor(), .weights = weights.tensor()};
  options = data.routing[own].options;
  dispatch_in = {x.tensor(), x_weights.tensor(), scales.tensor()};
  dispatch_out = {rows->tensor(), row_weights->tensor(), row_scales.tensor()};
  combine_in = {.rows = y.tensor(), .weights = y_weights.tensor()};
  combine_out = {sums.tensor(), sum_weights.tensor()};
}

void FaultRank::plan_and_dispatch(const CallOptions& call) {
  options.row_budget = dispatch_out.rows.rows;
  plan.emplace(exchange.dispatch(routing, options, dispatch_in, dispatch_out, call));
}

void FaultRank::send() {
  CallOptions call;
  call.receives_later = true;
  plan_and_dispatch(call);
}

void FaultRank::set_index(int64_t token, int64_t k, int64_t value) {
  Matrix changed = idx->result();
  changed.as<int64_t>()[token * changed.view().cols + k] = value;
  memory.replace(*idx, changed);
  memory.upload();
}

std::vector<std::string> fault_texts(
    int num_gpus, const FaultCall& call, const std::vector<int>& domain_of
) {
  const FaultWorld world(num_gpus, domain_of);
  std::vector<std::string> texts(3);
  run_threads(3, [&](const Group& group) {
    Exchange exchange = make_exchange(group, world.setup);
    FaultRank own(exchange, world.good);
    own.group = &group;
    own.make_plan();
    const auto thrown = thrown_by([&] { call(own); });
    texts[static_cast<size_t>(group.rank())] = text_of(thrown);
    EXPECT_EQ(thrown.value_or(Thrown{}).code, ErrorCode::kInvalidArgument) << text_of(thrown);
    EXPECT_EQ(run_cases(exchange, {&world.good, 1}), "") << "after: " << text_of(thrown);
    group.barrier();
  });
  return texts;
}

void expect_disagreement(
    int num_gpus,
    const std::string& field,
    const std::pair<std::string, std::string>& values,
    const FaultCall& call
) {
  const std::vector<std::string> texts = fault_texts(num_gpus, call);
  for (int rank = 0; rank < 3; ++rank) {
    const bool is_odd_one = rank == 2;
    const std::string& text = texts[static_cast<size_t>(rank)];
    const auto expected = [&](int other) {
      return fmt::format(
          "{} = {} here and {} on rank {} (must be equal on all ranks) [rank {}/3, peer]",
          field,
          is_odd_one ? values.second : values.first,
          is_odd_one ? values.first : values.second,
          other,
          rank
      );
    };
    // Rank 2 differs from two others, and names either.
    EXPECT_TRUE(text == expected(is_odd_one ? 0 : 2) || (is_odd_one && text == expected(1)))
        << "rank " << rank << " says: " << text << "\nexpected: " << expected(is_odd_one ? 0 : 2);
  }
}

void expect_refusal(
    int num_gpus,
    const std::string& op,
    const std::string& reason,
    const FaultCall& call,
    bool is_known_to_host
) {
  const std::vector<std::string> texts = fault_texts(num_gpus, call);
  const std::string own = reason + " [rank 1/3, peer]";
  EXPECT_EQ(texts[1], own);
  for (const int rank : {0, 2}) {
    const std::string& text = texts[static_cast<size_t>(rank)];
    const std::string why = is_known_to_host ? ": " + own : "";
    EXPECT_TRUE(text.starts_with(op + ": rank 1 refused the call" + why)) << text;
    EXPECT_TRUE(text.ends_with(fmt::format(" [rank {}/3, peer]", rank))) << text;
  }
}

void expect_bad_index_is_refused(int num_gpus, const FaultCall& call) {
  for (const int64_t value : {-2, 6}) {
    expect_refusal(
        num_gpus,
        "plan",
        fmt::format(
            "plan: topk_idx[7, 1] = {} is out of range (num_experts = 6, -1 = no route)", value
        ),
        [&](FaultRank& own) {
          if (own.rank == 1) {
            own.set_index(7, 1, value);
          }
          call(own);
        },
        false
    );
  }
}

void expect_timeout(
    int num_gpus,
    const std::string& op,
    uint32_t number,
    const FaultCall& before,
    const FaultCall& call
) {
  FaultWorld world(num_gpus);
  run_threads(3, [&](const Group& group) {
    Exchange other(group, world.setup.config(group.rank()));
    ExchangeConfig config = world.setup.config(group.rank());
    config.timeout = 500ms;
    Exchange exchange(group, config);
    FaultRank own(exchange, world.good);
    before(own);
    group.barrier();
    if (group.rank() != 2) {
      const auto thrown = thrown_by([&] { call(own); });
      const std::string text = text_of(thrown);
      EXPECT_TRUE(thrown.value_or(Thrown{}).is_timeout) << text;
      EXPECT_TRUE(text.starts_with(fmt::format("{}: rank {} waited 500 ms for ", op, group.rank())))
          << text;
      EXPECT_NE(text.find(fmt::format(" of rank 2 in call {} (seen ", number)), std::string::npos)
          << text;
      EXPECT_EQ(text_of(thrown_by([&] { own.make_plan(); })), text) << "told again";
    }
    group.barrier();
    // Nothing else in this process is harmed.
    EXPECT_EQ(run_cases(other, {&world.good, 1}), "");
    group.barrier();
  });
}

}  // namespace weft::test
