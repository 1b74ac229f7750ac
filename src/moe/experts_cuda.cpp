// SPDX-License-Identifier: Apache-2.0
#include "moe/experts_cuda.hpp"

#include <numeric>

#include "moe/kernels_cuda.hpp"

namespace weft::moe {
namespace {

// Where an expert's rows and weights begin, in elements of one column.
struct Place {
  int64_t expert = 0;
  int64_t begin = 0;
  int64_t count = 0;
};

template <class Visit>
void for_each_expert(std::span<const int64_t> rows_per_expert, const Visit& visit) {
  Place place;
  for (const int64_t count : rows_per_expert) {
    place.count = count;
    visit(place);
    place.begin += count;
    ++place.expert;
  }
}

int64_t sum(std::span<const int64_t> counts) {
  return std::reduce(counts.begin(), counts.end());
}

}  // namespace

void DeviceExperts::forward(const DeviceExpertRows& rows, uint16_t* y) {
  const int64_t num_rows = sum(rows.rows_per_expert);
  gate_up_.resize(static_cast<size_t>(num_rows * 2 * inner_));
  active_.resize(static_cast<size_t>(num_rows * inner_));
  for_each_expert(rows.rows_per_expert, [&](const Place& at) {
    linear_->forward(
        {at.count, hidden_, 2 * inner_},
        rows.x + at.begin * hidden_,
        weights_.in + at.expert * 2 * inner_ * hidden_,
        gate_up_.data() + at.begin * 2 * inner_
    );
  });
  swiglu_forward_cuda(
      {num_rows, inner_, gate_up_.data(), rows.weight}, active_.data(), linear_->stream()
  );
  for_each_expert(rows.rows_per_expert, [&](const Place& at) {
    linear_->forward(
        {at.count, inner_, hidden_},
        active_.data() + at.begin * inner_,
        weights_.out + at.expert * hidden_ * inner_,
        y + at.begin * hidden_
    );
  });
}

void DeviceExperts::backward(
    const DeviceExpertRows& rows, const uint16_t* grad_y, uint16_t* grad_x, float* grad_weight
) {
  const int64_t num_rows = sum(rows.rows_per_expert);
  grad_active_.resize(static_cast<size_t>(num_rows * inner_));
  grad_gate_up_.resize(static_cast<size_t>(num_rows * 2 * inner_));
  for_each_expert(rows.rows_per_expert, [&](const Place& at) {
    const DeviceLinear::Shape shape = {at.count, inner_, hidden_};
    linear_->backward_input(
        shape,
        grad_y + at.begin * hidden_,
        weights_.out + at.expert * hidden_ * inner_,
        grad_active_.data() + at.begin * inner_
    );
  });
  swiglu_backward_cuda(
      {num_rows, inner_, gate_up_.data(), rows.weight},
      grad_active_.data(),
      grad_gate_up_.data(),
      grad_weight,
      linear_->stream()
  );
  for_each_expert(rows.rows_per_expert, [&](const Place& at) {
    const DeviceLinear::Shape shape = {at.count, hidden_, 2 * inner_};
    linear_->backward_input(
        shape,
        grad_gate_up_.data() + at.begin * 2 * inner_,
        weights_.in + at.expert * 2 * inner_ * hidden_,
        grad_x + at.begin * hidden_
    );
  });
}

void DeviceExperts::add_weight_gradients(const DeviceExpertRows& rows, const uint16_t* grad_y) {
  for_each_expert(rows.rows_per_expert, [&](const Place& at) {
    linear_->add_backward_weight(
        {at.count, inner_, hidden_},
        grad_y + at.begin * hidden_,
        active_.data() + at.begin * inner_,
        weights_.grad_out + at.expert * hidden_ * inner_
    );
    linear_->add_backward_weight(
        {at.count, hidden_, 2 * inner_},
        grad_gate_up_.data() + at.begin * 2 * inner_,
        rows.x + at.begin * hidden_,
        weights_.grad_in + at.expert * 2 * inner_ * hidden_
    );
  });
}

}  // namespace weft::moe
