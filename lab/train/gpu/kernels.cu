// SPDX-License-Identifier: Apache-2.0
#include <type_traits>

#include "core/half.hpp"
#include "train/gpu/math.hpp"

namespace weft::moe {
namespace {

// Kernels that give every row a warp: where a thread stands, and sums over its warp, in an order
// that is always the same.
constexpr int kLanes = 32;
constexpr int kRowThreads = 256;
constexpr int kRowsPerBlock = kRowThreads / kLanes;
constexpr int kFlatThreads = 256;

// The same for all lanes of a warp.
__device__ int64_t warp_row() {
  return static_cast<int64_t>(blockIdx.x) * kRowsPerBlock + threadIdx.x / kLanes;
}
__device__ int lane_id() {
  return static_cast<int>(threadIdx.x) % kLanes;
}
__device__ int64_t flat_index() {
  return static_cast<int64_t>(blockIdx.x) * kFlatThreads + threadIdx.x;
}

// Every lane gets the result.
__device__ float warp_sum(float value) {
  for (int offset = kLanes / 2; offset > 0; offset /= 2) {
    value += __shfl_xor_sync(0xffffffffU, value, offset);
  }
  return value;
}
__device__ float warp_max(float value) {
  for (int offset = kLanes / 2; offset > 0; offset /= 2) {
    value = fmaxf(value, __shfl_xor_sync(0xffffffffU, value, offset));
  }
  return value;
}

unsigned num_blocks(int64_t size, int64_t per_block) {
  return static_cast<unsigned>((size + per_block - 1) / per_block);
}

template <class Kernel, class... Args>
void launch(Kernel kernel, dim3 blocks, int threads, cudaStream_t stream, const Args&... args) {
  kernel<<<blocks, static_cast<unsigned>(threads), 0, stream>>>(args...);
  WEFT_CUDA(Context{}, cudaGetLastError());
}
// A warp for each row, or a thread for each element; nothing where there is none.
template <class Kernel, class... Args>
void launch_rows(Kernel kernel, int64_t rows, cudaStream_t stream, const Args&... args) {
  if (rows > 0) {
    launch(kernel, num_blocks(rows, kRowsPerBlock), kRowThreads, stream, args...);
  }
}
template <class Kernel, class... Args>
void launch_flat(Kernel kernel, int64_t size, cudaStream_t stream, const Args&... args) {
  if (size > 0) {
    launch(kernel, num_blocks(size, kFlatThreads), kFlatThreads, stream, args...);
  }
}

__global__ void adamw_kernel(AdamRates rates, DeviceAdam adam) {
  const int64_t i = flat_index();
  if (i < adam.size) {
    adamw_element(rates, adam.value[i], adam.grad[i], adam.mean[i], adam.square[i]);
    adam.rounded[i] = float_to_bf16(adam.value[i]);
  }
}

__global__ void to_bf16_kernel(const float* from, uint16_t* to, int64_t size) {
  const int64_t i = flat_index();
  if (i < size) {
    to[i] = float_to_bf16(from[i]);
  }
}

__global__ void to_float_kernel(const uint16_t* from, float* to, int64_t size) {
  const int64_t i = flat_index();
  if (i < size) {
    to[i] = bf16_to_float(from[i]);
  }
}

template <class From>  // float, or uint16_t for bf16
__global__ void add_kernel(const From* from, float* to, int64_t size) {
  const int64_t i = flat_index();
  if (i < size) {
    if constexpr (std::is_same_v<From, float>) {
      to[i] += from[i];
    } else {
      to[i] += bf16_to_float(from[i]);
    }
  }
}

constexpr int64_t kSumParts = 64;

struct ColumnSums {
  const float* values = nullptr;  // [rows, cols]
  int64_t rows = 0;
  int64_t cols = 0;
  float* parts = nullptr;  // [kSumParts, cols]
  float* sums = nullptr;   // [cols]
  bool adds = false;       // to what is in `sums`
};

// A thread sums one column over the rows of part blockIdx.y.
__global__ void sum_parts_kernel(ColumnSums call) {
  const int64_t col = flat_index();
  if (col >= call.cols) {
    return;
  }
  const int64_t part = blockIdx.y;
  const int64_t end = call.rows * (part + 1) / kSumParts;
  float sum = 0.0F;
  for (int64_t row = call.rows * part / kSumParts; row < end; ++row) {
    sum += call.values[row * call.cols + col];
  }
  call.parts[part * call.cols + col] = sum;
}

__global__ void add_parts_kernel(ColumnSums call) {
  const int64_t col = flat_index();
  if (col >= call.cols) {
    return;
  }
  float sum = 0.0F;
  for (int64_t part = 0; part < kSumParts; ++part) {
    sum += call.parts[part * call.cols + col];
  }
  call.sums[col] = call.adds ? call.sums[col] + sum : sum;
}

constexpr int kThreads = 128;

// A block makes the token blockIdx.x.
__global__ void embed_kernel(EmbeddingShape shape, const float* table, float* x) {
  const int64_t token = blockIdx.x;
  const uint8_t* window = shape.windows + token * shape.window;
  for (int64_t h = threadIdx.x; h < shape.hidden; h += kThreads) {
    float sum = 0.0F;
    for (int64_t p = 0; p < shape.window; ++p) {
      sum += table[(p * kNumBytes + window[p]) * shape.hidden + h];
    }
    x[token * shape.hidden + h] = sum;
  }
}

// A block sums the gradients of one vector of the table, in token order: byte blockIdx.x at
// position blockIdx.y.
__global__ void embed_backward_kernel(
    EmbeddingShape shape, const float* grad_x, float* grad_table
) {
  const int64_t byte = blockIdx.x;
  const int64_t position = blockIdx.y;
  float* grad = grad_table + (position * kNumBytes + byte) * shape.hidden;
  for (int64_t h = threadIdx.x; h < shape.hidden; h += kThreads) {
    float sum = 0.0F;
    for (int64_t token = 0; token < shape.num_tokens; ++token) {
      if (shape.windows[token * shape.window + position] == byte) {
        sum += grad_x[token * shape.hidden + h];
      }
    }
    grad[h] += sum;
  }
}

__global__ void cross_entropy_kernel(LossShape shape, float* losses, uint16_t* grad_logits) {
  const int64_t token = warp_row();
  if (token >= shape.num_tokens) {
    return;
  }
  const float* logits = shape.logits + token * shape.num_classes;
  uint16_t* grad = grad_logits + token * shape.num_classes;
  const int64_t target = shape.targets[token];
  float largest = -INFINITY;
  for (int64_t c = lane_id(); c < shape.num_classes; c += kLanes) {
    largest = fmaxf(largest, logits[c]);
  }
  largest = warp_max(largest);
  float sum = 0.0F;
  for (int64_t c = lane_id(); c < shape.num_classes; c += kLanes) {
    sum += expf(logits[c] - largest);
  }
  sum = warp_sum(sum);
  for (int64_t c = lane_id(); c < shape.num_classes; c += kLanes) {
    const float prob = expf(logits[c] - largest) / sum;
    grad[c] = float_to_bf16((c == target ? prob - 1.0F : prob) * shape.scale);
  }
  if (lane_id() == 0) {
    losses[token] = largest - logits[target] + logf(sum);
  }
}

__global__ void norm_kernel(NormShape shape, uint16_t* y) {
  const int64_t token = warp_row();
  if (token >= shape.num_tokens) {
    return;
  }
  const float* in = shape.x + token * shape.hidden;
  float sum = 0.0F;
  for (int64_t h = lane_id(); h < shape.hidden; h += kLanes) {
    sum += in[h] * in[h];
  }
  sum = warp_sum(sum);
  const float scale = 1.0F / sqrtf(sum / static_cast<float>(shape.hidden) + kNormEpsilon);
  for (int64_t h = lane_id(); h < shape.hidden; h += kLanes) {
    y[token * shape.hidden + h] = float_to_bf16(in[h] * scale * shape.gain[h]);
  }
  if (lane_id() == 0) {
    shape.inverse_rms[token] = scale;
  }
}

__global__ void norm_backward_kernel(
    NormShape shape, const float* grad_y, float* grad_x, float* gain_terms
) {
  const int64_t token = warp_row();
  if (token >= shape.num_tokens) {
    return;
  }
  const int64_t first = token * shape.hidden;
  const float* in = shape.x + first;
  const float* gy = grad_y + first;
  const float scale = shape.inverse_rms[token];
  float dot = 0.0F;
  for (int64_t h = lane_id(); h < shape.hidden; h += kLanes) {
    dot += gy[h] * shape.gain[h] * in[h];
    gain_terms[first + h] = gy[h] * in[h] * scale;
  }
  // The scale depends on every element of the row.
  const float pull = warp_sum(dot) * scale * scale / static_cast<float>(shape.hidden);
  for (int64_t h = lane_id(); h < shape.hidden; h += kLanes) {
    grad_x[first + h] += scale * (gy[h] * shape.gain[h] - in[h] * pull);
  }
}

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

__device__ float sigmoid(float x) {
  return 1.0F / (1.0F + expf(-x));
}

__global__ void swiglu_kernel(SwigluRows<uint16_t> shape, uint16_t* active) {
  const int64_t row = warp_row();
  if (row >= shape.rows) {
    return;
  }
  const uint16_t* gates = shape.gate_up + row * 2 * shape.inner;
  const uint16_t* ups = gates + shape.inner;
  const float weight = shape.weight[row];
  for (int64_t f = lane_id(); f < shape.inner; f += kLanes) {
    const float gate = bf16_to_float(gates[f]);
    const float value = gate * sigmoid(gate) * bf16_to_float(ups[f]) * weight;
    active[row * shape.inner + f] = float_to_bf16(value);
  }
}

__global__ void swiglu_backward_kernel(
    SwigluRows<uint16_t> shape,
    const uint16_t* grad_active,
    uint16_t* grad_gate_up,
    float* grad_weight
) {
  const int64_t row = warp_row();
  if (row >= shape.rows) {
    return;
  }
  const int64_t first = row * 2 * shape.inner;
  const uint16_t* gates = shape.gate_up + first;
  const uint16_t* ups = gates + shape.inner;
  uint16_t* grad_gates = grad_gate_up + first;
  uint16_t* grad_ups = grad_gates + shape.inner;
  const float weight = shape.weight[row];
  float sum = 0.0F;
  for (int64_t f = lane_id(); f < shape.inner; f += kLanes) {
    const float gate = bf16_to_float(gates[f]);
    const float up = bf16_to_float(ups[f]);
    const float grad_out = bf16_to_float(grad_active[row * shape.inner + f]);
    const float s = sigmoid(gate);
    const float silu = gate * s;
    sum += grad_out * silu * up;
    const float grad = grad_out * weight;
    grad_ups[f] = float_to_bf16(grad * silu);
    grad_gates[f] = float_to_bf16(grad * up * (s + silu * (1.0F - s)));
  }
  sum = warp_sum(sum);
  if (lane_id() == 0) {
    grad_weight[row] = sum;
  }
}

}  // namespace

void adamw_update_cuda(const AdamStep& step, const DeviceAdam& adam, cudaStream_t stream) {
  launch_flat(adamw_kernel, adam.size, stream, AdamRates(step), adam);
}

void to_bf16_cuda(const float* from, uint16_t* to, int64_t size, cudaStream_t stream) {
  launch_flat(to_bf16_kernel, size, stream, from, to, size);
}

void add_cuda(const uint16_t* from, float* to, int64_t size, cudaStream_t stream) {
  launch_flat(add_kernel<uint16_t>, size, stream, from, to, size);
}

void DeviceMath::add(const float* from, float* to, int64_t size) {
  launch_flat(add_kernel<float>, size, stream_, from, to, size);
}

void DeviceMath::widen(const uint16_t* from, float* to, int64_t size) {
  launch_flat(to_float_kernel, size, stream_, from, to, size);
}

void DeviceMath::reserve(size_t elements, int64_t cols) {
  gain_terms_.resize(elements);
  sum_parts_.resize(static_cast<size_t>(kSumParts * cols));
}

void DeviceMath::sum_columns(
    const float* values, int64_t rows, int64_t cols, float* sums, bool adds
) {
  sum_parts_.resize(static_cast<size_t>(kSumParts * cols));
  const ColumnSums call = {values, rows, cols, sum_parts_.data(), sums, adds};
  const unsigned blocks = num_blocks(cols, kFlatThreads);
  const dim3 parts(blocks, static_cast<unsigned>(kSumParts));
  launch(sum_parts_kernel, parts, kFlatThreads, stream_, call);
  launch(add_parts_kernel, blocks, kFlatThreads, stream_, call);
}

void DeviceMath::column_sums(const float* values, int64_t rows, int64_t cols, float* sums) {
  sum_columns(values, rows, cols, sums, false);
}

void DeviceMath::embed(const EmbeddingShape& s, const float* table, float* x) {
  if (s.num_tokens > 0) {
    launch(embed_kernel, static_cast<unsigned>(s.num_tokens), kThreads, stream_, s, table, x);
  }
}

void DeviceMath::embed_backward(
    const EmbeddingShape& s,
    const float* grad_x,
    const Weight<uint16_t>& table,
    const Shards& /*shards*/
) {
  const dim3 vectors(static_cast<unsigned>(kNumBytes), static_cast<unsigned>(s.window));
  launch(embed_backward_kernel, vectors, kThreads, stream_, s, grad_x, table.grad);
}

void DeviceMath::cross_entropy(const LossShape& s, float* losses, uint16_t* grad_logits) {
  launch_rows(cross_entropy_kernel, s.num_tokens, stream_, s, losses, grad_logits);
}

void DeviceMath::norm(const NormShape& s, uint16_t* y) {
  launch_rows(norm_kernel, s.num_tokens, stream_, s, y);
}

void DeviceMath::norm_backward(
    const NormShape& s,
    const float* grad_y,
    float* grad_x,
    const Weight<uint16_t>& gain,
    const Shards& /*shards*/
) {
  gain_terms_.resize(static_cast<size_t>(s.num_tokens * s.hidden));
  float* terms = gain_terms_.data();
  launch_rows(norm_backward_kernel, s.num_tokens, stream_, s, grad_y, grad_x, terms);
  sum_columns(terms, s.num_tokens, s.hidden, gain.grad, true);
}

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

void DeviceMath::swiglu(const SwigluRows<uint16_t>& s, uint16_t* active) {
  launch_rows(swiglu_kernel, s.rows, stream_, s, active);
}

void DeviceMath::swiglu_backward(
    const SwigluRows<uint16_t>& s,
    const uint16_t* grad_active,
    uint16_t* grad_gate_up,
    float* grad_weight
) {
  launch_rows(swiglu_backward_kernel, s.rows, stream_, s, grad_active, grad_gate_up, grad_weight);
}

}  // namespace weft::moe
