// SPDX-License-Identifier: Apache-2.0
// Fills the arrivals of one (source, receiver) pair, route by route.
#pragma once

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

  // The numbers bound what add() will bring; dropped routes make it less.
  PairWriter(Arrivals& out, int64_t num_arrivals, int64_t num_routes, bool has_weights)
      : out_(&out), has_weights_(has_weights) {
    resize(static_cast<size_t>(num_arrivals), static_cast<size_t>(num_routes));
  }

  // Tokens come in ascending order, the routes of a token in the order that Arrivals wants. Without
  // branches: which route begins an arrival cannot be predicted.
  void add(int32_t token, const Route& route) {
    Arrivals& out = *out_;
    const bool is_new = token != last_token_;
    last_token_ = token;
    first_ = is_new ? static_cast<int32_t>(num_routes_) : first_;
    num_arrivals_ += is_new ? 1 : 0;
    out.token[num_arrivals_ - 1] = token;
    out.route_begin[num_arrivals_ - 1] = first_;
    out.slot[num_routes_] = route.slot;
    out.k[num_routes_] = route.k;
    out.expert[num_routes_] = route.expert;
    if (has_weights_) {
      out.weight[num_routes_] = route.weight;
    }
    ++num_routes_;
  }

  void finish() {
    resize(num_arrivals_, num_routes_);
    out_->route_begin.back() = static_cast<int32_t>(num_routes_);
  }

 private:
  void resize(size_t num_arrivals, size_t num_routes) {
    out_->token.resize(num_arrivals);
    out_->route_begin.resize(num_arrivals + 1);
    out_->slot.resize(num_routes);
    out_->k.resize(num_routes);
    out_->expert.resize(num_routes);
    out_->weight.resize(has_weights_ ? num_routes : 0);
  }

  Arrivals* out_;
  bool has_weights_;
  int32_t last_token_ = -1;
  int32_t first_ = 0;  // route of the last arrival
  size_t num_arrivals_ = 0;
  size_t num_routes_ = 0;
};

}  // namespace weft
