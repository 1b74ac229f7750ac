// SPDX-License-Identifier: Apache-2.0
#include "train/gpu/experts.hpp"

#include <numeric>

#include "train/gpu/kernels.hpp"

namespace weft::moe {
namespace {

int64_t sum(std::span<const int64_t> counts) {
  return std::reduce(counts.begin(), counts.end());
}

}  // namespace

// visit(at): where an expert's rows and weights begin, and how many rows it has.
template <class Visit>
void DeviceExperts::for_each_expert(const DeviceExpertRows& rows, const Visit& visit) const {
  Place at = {.into = {0, hidden_, 2 * inner_}, .out_of = {0, inner_, hidden_}};
  for (const int64_t count : rows.rows_per_expert) {
    at.into.rows = at.out_of.rows = count;
    visit(at);
    at.x += count * hidden_;
    at.gate_up += count * 2 * inner_;
    at.active += count * inner_;
    at.weight_in += 2 * inner_ * hidden_;
    at.weight_out += hidden_ * inner_;
  }
}

void DeviceExperts::forward(const DeviceExpertRows& rows, uint16_t* y) {
  const int64_t num_rows = sum(rows.rows_per_expert);
  gate_up_.resize(static_cast<size_t>(num_rows * 2 * inner_));
  active_.resize(static_cast<size_t>(num_rows * inner_));
  for_each_expert(rows, [&](const Place& at) {
    const uint16_t* in = weights_.in + at.weight_in;
    linear_->forward(at.into, rows.x + at.x, in, gate_up_.data() + at.gate_up);
  });
  swiglu_forward_cuda(
      {num_rows, inner_, gate_up_.data(), rows.weight}, active_.data(), linear_->stream()
  );
  for_each_expert(rows, [&](const Place& at) {
    const uint16_t* out = weights_.out + at.weight_out;
    linear_->forward(at.out_of, active_.data() + at.active, out, y + at.x);
  });
}

void DeviceExperts::backward(
    const DeviceExpertRows& rows, const uint16_t* grad_y, uint16_t* grad_x, float* grad_weight
) {
  const int64_t num_rows = sum(rows.rows_per_expert);
  grad_active_.resize(static_cast<size_t>(num_rows * inner_));
  grad_gate_up_.resize(static_cast<size_t>(num_rows * 2 * inner_));
  for_each_expert(rows, [&](const Place& at) {
    const uint16_t* out = weights_.out + at.weight_out;
    linear_->backward_input(at.out_of, grad_y + at.x, out, grad_active_.data() + at.active);
  });
  swiglu_backward_cuda(
      {num_rows, inner_, gate_up_.data(), rows.weight},
      grad_active_.data(),
      grad_gate_up_.data(),
      grad_weight,
      linear_->stream()
  );
  for_each_expert(rows, [&](const Place& at) {
    const uint16_t* in = weights_.in + at.weight_in;
    linear_->backward_input(at.into, grad_gate_up_.data() + at.gate_up, in, grad_x + at.x);
  });
}

void DeviceExperts::add_weight_gradients(const DeviceExpertRows& rows, const uint16_t* grad_y) {
  for_each_expert(rows, [&](const Place& at) {
    linear_->add_backward_weight(
        at.out_of, grad_y + at.x, active_.data() + at.active, weights_.grad_out + at.weight_out
    );
    linear_->add_backward_weight(
        at.into, grad_gate_up_.data() + at.gate_up, rows.x + at.x, weights_.grad_in + at.weight_in
    );
  });
}

}  // namespace weft::moe
