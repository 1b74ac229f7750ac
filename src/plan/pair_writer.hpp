// SPDX-License-Identifier: Apache-2.0
// Fills the arrivals of one (source, receiver) pair, or a part of them, route by route.
#pragma once

#include <cstddef>
#include <cstdint>

#include "plan/plan_data.hpp"

namespace weft {

class PairWriter {
 public:
  struct Route {
    int32_t slot;
    int32_t k;
    int32_t expert;  // local
    float weight;
  };

  static void resize(Arrivals& out, size_t num_arrivals, size_t num_routes, bool has_weights) {
    out.token.resize(num_arrivals);
    out.route_begin.resize(num_arrivals + 1);
    out.slot.resize(num_routes);
    out.k.resize(num_routes);
    out.expert.resize(num_routes);
    out.weight.resize(has_weights ? num_routes : 0);
  }

  // `out` has room for what add() will bring, from these places on.
  explicit PairWriter(Arrivals& out, size_t first_arrival = 0, size_t first_route = 0)
      : token_(out.token.data()),
        route_begin_(out.route_begin.data()),
        slot_(out.slot.data()),
        k_(out.k.data()),
        expert_(out.expert.data()),
        weight_(out.weight.empty() ? nullptr : out.weight.data()),
        num_arrivals_(first_arrival),
        num_routes_(first_route) {}

  // Adds a route: tokens ascend, a token's routes have the order of Arrivals. Has no branches:
  // which route begins an arrival cannot be predicted.
  void add(int32_t token, const Route& route) {
    const bool is_new = token != last_token_;
    last_token_ = token;
    first_ = is_new ? static_cast<int32_t>(num_routes_) : first_;
    num_arrivals_ += is_new ? 1 : 0;
    token_[num_arrivals_ - 1] = token;
    route_begin_[num_arrivals_ - 1] = first_;
    slot_[num_routes_] = route.slot;
    k_[num_routes_] = route.k;
    expert_[num_routes_] = route.expert;
    if (weight_ != nullptr) {
      weight_[num_routes_] = route.weight;
    }
    ++num_routes_;
  }

  // Cuts `out` to what came; called on the last part's writer.
  void finish(Arrivals& out) const {
    resize(out, num_arrivals_, num_routes_, weight_ != nullptr);
    out.route_begin.back() = static_cast<int32_t>(num_routes_);
  }

 private:
  int32_t* token_;
  int32_t* route_begin_;
  int32_t* slot_;
  int32_t* k_;
  int32_t* expert_;
  float* weight_;
  int32_t last_token_ = -1;
  int32_t first_ = 0;  // route of the last arrival
  size_t num_arrivals_;
  size_t num_routes_;
};

}  // namespace weft
