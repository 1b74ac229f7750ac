// SPDX-License-Identifier: Apache-2.0
#include "moe/rmsnorm.hpp"

#include <cmath>

namespace weft::moe {
namespace {

constexpr float kEpsilon = 1e-6F;

}  // namespace

void RmsNorm::forward(const Matrix& x, Matrix& y) {
  const int64_t hidden = x.cols();
  x_ = x;
  y.resize(x.rows(), hidden);
  inverse_rms_.resize(static_cast<size_t>(x.rows()));
  const float* gain = gain_.value.data();
  for (int64_t t = 0; t < x.rows(); ++t) {
    const float* in = x.row(t);
    float* out = y.row(t);
    float sum = 0.0F;
    for (int64_t h = 0; h < hidden; ++h) {
      sum += in[h] * in[h];
    }
    const float scale = 1.0F / std::sqrt(sum / static_cast<float>(hidden) + kEpsilon);
    inverse_rms_[static_cast<size_t>(t)] = scale;
    for (int64_t h = 0; h < hidden; ++h) {
      out[h] = in[h] * scale * gain[h];
    }
  }
}

void RmsNorm::backward(const Matrix& grad_y, Matrix& grad_x, const Shards& shards) {
  for (size_t i = 0; i < shards.size(); ++i) {
    for (int64_t t = shards[i].begin; t < shards[i].end; ++t) {
      backward_row(t, grad_y.row(t), grad_x.row(t), gain_.grad_of(i).data());
    }
  }
}

void RmsNorm::backward_row(int64_t token, const float* gy, float* gx, float* grad_gain) const {
  const int64_t hidden = x_.cols();
  const float* gain = gain_.value.data();
  const float* in = x_.row(token);
  const float scale = inverse_rms_[static_cast<size_t>(token)];
  float dot = 0.0F;
  for (int64_t h = 0; h < hidden; ++h) {
    dot += gy[h] * gain[h] * in[h];
    grad_gain[h] += gy[h] * in[h] * scale;
  }
  // The scale depends on every element of the row.
  const float pull = dot * scale * scale / static_cast<float>(hidden);
  for (int64_t h = 0; h < hidden; ++h) {
    gx[h] += scale * (gy[h] * gain[h] - in[h] * pull);
  }
}

}  // namespace weft::moe
