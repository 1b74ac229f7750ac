// SPDX-License-Identifier: Apache-2.0
#include "core/half.hpp"
#include "train/gpu/math.hpp"
#include "train/gpu/row.cuh"

namespace weft::moe {
namespace {

struct Candidate {
  float prob = -1.0F;
  int expert = -1;
};

// Ties go to the lower index; index -1, nobody, comes last.
__device__ bool is_better(const Candidate& a, const Candidate& b) {
  return a.prob > b.prob ||
         (a.prob == b.prob && static_cast<unsigned>(a.expert) < static_cast<unsigned>(b.expert));
}

__device__ Candidate best_of_warp(Candidate best) {
  for (int offset = kLanes / 2; offset > 0; offset /= 2) {
    Candidate other;
    other.prob = __shfl_xor_sync(0xffffffffU, best.prob, offset);
    other.expert = __shfl_xor_sync(0xffffffffU, best.expert, offset);
    if (is_better(other, best)) {
      best = other;
    }
  }
  return best;
}

// Each lane goes over the same elements every time, so that none reads what another wrote.
__device__ void softmax_in_place(float* row, int size) {
  float largest = -INFINITY;
  for (int e = lane_id(); e < size; e += kLanes) {
    largest = fmaxf(largest, row[e]);
  }
  largest = warp_max(largest);
  float sum = 0.0F;
  for (int e = lane_id(); e < size; e += kLanes) {
    row[e] = expf(row[e] - largest);
    sum += row[e];
  }
  sum = warp_sum(sum);
  for (int e = lane_id(); e < size; e += kLanes) {
    row[e] /= sum;
  }
}

__global__ void choose_kernel(RouterShape shape) {
  const int64_t token = warp_row();
  if (token >= shape.num_tokens) {
    return;
  }
  float* probs = shape.probs + token * shape.num_experts;
  softmax_in_place(probs, shape.num_experts);
  Candidate last = {INFINITY, -1};
  Candidate mine = {};  // of the k that is this lane's
  float sum = 0.0F;
  for (int k = 0; k < shape.topk; ++k) {
    Candidate best = {};
    for (int e = lane_id(); e < shape.num_experts; e += kLanes) {
      const Candidate candidate = {probs[e], e};
      // What is better than the last winner has won already.
      const bool is_free = last.expert < 0 || (e != last.expert && is_better(last, candidate));
      if (is_free && is_better(candidate, best)) {
        best = candidate;
      }
    }
    last = best_of_warp(best);
    if (last.expert < 0) {
      break;  // the probabilities are not numbers
    }
    sum += last.prob;
    if (lane_id() == k) {
      mine = last;
    }
  }
  if (lane_id() < shape.topk) {
    const float weight = shape.topk > 1 ? mine.prob / sum : mine.prob;
    shape.topk_idx[token * shape.topk + lane_id()] = mine.expert;
    shape.weights[token * shape.topk + lane_id()] = mine.expert < 0 ? 0.0F : weight;
  }
}

// The gradient for the probability of expert e: of all tokens', then of the routes that chose it.
// All lanes call it, each for its own e; lane k knows route k.
__device__ float grad_of_prob(int e, int topk, float common, int route_expert, float route_grad) {
  float grad = common;
  for (int k = 0; k < topk; ++k) {
    const int expert = __shfl_sync(0xffffffffU, route_expert, k);
    const float grad_of_route = __shfl_sync(0xffffffffU, route_grad, k);
    if (expert == e) {
      grad += grad_of_route;
    }
  }
  return grad;
}

__global__ void router_backward_kernel(
    RouterShape shape, const float* grad_weights, const float* grad_probs, uint16_t* grad_logits
) {
  const int64_t token = warp_row();
  if (token >= shape.num_tokens) {
    return;
  }
  const int lane = lane_id();
  const int num_experts = shape.num_experts;
  const float* probs = shape.probs + token * num_experts;
  const int64_t route = token * shape.topk + lane;
  const int expert = lane < shape.topk ? shape.topk_idx[route] : -1;
  float prob = 0.0F;
  float grad = 0.0F;
  float share = 0.0F;
  if (expert >= 0) {
    prob = probs[expert];
    grad = grad_weights[route];
    share = grad * shape.weights[route];
  }
  const float sum = warp_sum(prob);
  const float mean = warp_sum(share);  // what the division by the sum takes away
  if (shape.topk > 1) {
    grad = (grad - mean) / sum;
  }
  float dot = 0.0F;
  for (int first = 0; first < num_experts; first += kLanes) {
    const int e = first + lane;
    const bool is_expert = e < num_experts;
    const float g = grad_of_prob(e, shape.topk, is_expert ? grad_probs[e] : 0.0F, expert, grad);
    dot += is_expert ? probs[e] * g : 0.0F;
  }
  dot = warp_sum(dot);
  for (int first = 0; first < num_experts; first += kLanes) {
    const int e = first + lane;
    const bool is_expert = e < num_experts;
    const float g = grad_of_prob(e, shape.topk, is_expert ? grad_probs[e] : 0.0F, expert, grad);
    if (is_expert) {
      grad_logits[token * num_experts + e] = float_to_bf16(probs[e] * (g - dot));
    }
  }
}

}  // namespace

void DeviceMath::choose_experts(const RouterShape& s) {
  launch_rows(choose_kernel, s.num_tokens, stream_, s);
}

void DeviceMath::router_backward(
    const RouterShape& s, const float* grad_weights, const float* grad_probs, uint16_t* grad_logits
) {
  launch_rows(
      router_backward_kernel, s.num_tokens, stream_, s, grad_weights, grad_probs, grad_logits
  );
}

}  // namespace weft::moe
