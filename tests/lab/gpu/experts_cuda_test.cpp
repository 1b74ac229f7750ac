// SPDX-License-Identifier: Apache-2.0
// The experts on a GPU against those of the host, whose weights and rows are rounded alike.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "core/half.hpp"
#include "lab/train/gradient_check.hpp"
#include "train/gpu/rank.hpp"
#include "train/layers/experts.hpp"
#include "train_gpu_test.hpp"

namespace weft::moe {
namespace {

constexpr int kHidden = 64;
constexpr int kInner = 40;
constexpr int kExperts = 4;
constexpr int kRows = 90;
const std::vector<int64_t> kRowsPerExpert = {50, 0, 39, 1};

std::vector<uint16_t> rounded(std::span<const float> values) {
  std::vector<uint16_t> bits(values.size());
  std::ranges::transform(values, bits.begin(), float_to_bf16);
  return bits;
}

void round_all(std::span<float> values) {
  std::ranges::transform(values, values.begin(), [](float v) {
    return bf16_to_float(float_to_bf16(v));
  });
}

std::vector<float> widened(std::span<const uint16_t> bits) {
  std::vector<float> values(bits.size());
  std::ranges::transform(bits, values.begin(), bf16_to_float);
  return values;
}

template <class T>
std::vector<T> fetched(const DeviceArray<T>& array, cudaStream_t stream) {
  std::vector<T> values(array.size());
  array.download(values, stream);
  WEFT_CUDA(Context{}, cudaStreamSynchronize(stream));
  return values;
}

// Every rounding to bf16 on the way costs up to 1/256 of a term.
void expect_close(const char* name, std::span<const float> seen, std::span<const float> expected) {
  ASSERT_EQ(seen.size(), expected.size()) << name;
  float largest = 0;
  for (const float value : expected) {
    largest = std::max(largest, std::abs(value));
  }
  EXPECT_GT(largest, 0) << name;
  for (size_t i = 0; i < seen.size(); ++i) {
    ASSERT_NEAR(seen[i], expected[i], 0.015F * largest) << name << "[" << i << "]";
  }
}

struct HostResult {
  std::vector<float> y = std::vector<float>(kRows * kHidden);
  std::vector<float> grad_x = std::vector<float>(kRows * kHidden);
  std::vector<float> grad_weight = std::vector<float>(kRows);
};

struct DeviceResult {
  std::vector<uint16_t> y;
  std::vector<uint16_t> grad_x;
  std::vector<float> grad_weight;
  std::vector<float> grad_in;
  std::vector<float> grad_out;
};

class DeviceExpertsTest : public TrainGpuTest {
 protected:
  OwnedParameter in{static_cast<size_t>(kExperts * 2 * kInner * kHidden), 1};
  OwnedParameter out{static_cast<size_t>(kExperts * kHidden * kInner), 2};
  std::vector<float> x = random_values(kRows * kHidden, 3);
  std::vector<float> weight = random_values(kRows, 4);
  std::vector<float> probe = random_values(kRows * kHidden, 5);

  void SetUp() override {
    TrainGpuTest::SetUp();
    for (const auto values :
         {std::span(in.value), std::span(out.value), std::span(x), std::span(probe)}) {
      round_all(values);
    }
  }

  HostResult run_host() {
    HostMath math;
    Experts<HostMath> experts(
        math, {in.value.data(), out.value.data(), in.grad.data(), out.grad.data()}, kHidden, kInner
    );
    const Experts<HostMath>::Rows rows = {x.data(), weight.data(), kRowsPerExpert};
    HostResult result;
    experts.forward(rows, result.y.data());
    experts.backward(rows, probe.data(), result.grad_x.data(), result.grad_weight.data());
    experts.add_weight_gradients(rows, probe.data());
    return result;
  }

  DeviceResult run_device() const {
    const GpuStream stream(0);
    DeviceMath math(stream.get());
    DeviceArray<uint16_t> in_bits;
    DeviceArray<uint16_t> out_bits;
    DeviceArray<uint16_t> rows;
    DeviceArray<uint16_t> grad_y;
    DeviceArray<float> weights;
    in_bits.upload(rounded(in.value), stream.get());
    out_bits.upload(rounded(out.value), stream.get());
    rows.upload(rounded(x), stream.get());
    grad_y.upload(rounded(probe), stream.get());
    weights.upload(weight, stream.get());
    WEFT_CUDA(Context{}, cudaStreamSynchronize(stream.get()));  // before temporaries go
    DeviceArray<float> grad_in(in.value.size());
    DeviceArray<float> grad_out(out.value.size());
    DeviceArray<float> grad_weight(kRows);
    DeviceArray<uint16_t> y(rows.size());
    DeviceArray<uint16_t> grad_x(rows.size());
    grad_in.clear(stream.get());
    grad_out.clear(stream.get());
    Experts<DeviceMath> experts(
        math, {in_bits.data(), out_bits.data(), grad_in.data(), grad_out.data()}, kHidden, kInner
    );
    const Experts<DeviceMath>::Rows expert_rows = {rows.data(), weights.data(), kRowsPerExpert};
    experts.forward(expert_rows, y.data());
    experts.backward(expert_rows, grad_y.data(), grad_x.data(), grad_weight.data());
    experts.add_weight_gradients(expert_rows, grad_y.data());
    return {
        fetched(y, stream.get()),
        fetched(grad_x, stream.get()),
        fetched(grad_weight, stream.get()),
        fetched(grad_in, stream.get()),
        fetched(grad_out, stream.get())};
  }
};

TEST_F(DeviceExpertsTest, ComputesAndLearnsAsTheHostDoes) {
  const HostResult host = run_host();
  const DeviceResult device = run_device();
  expect_close("y", widened(device.y), host.y);
  expect_close("grad_x", widened(device.grad_x), host.grad_x);
  expect_close("grad_weight", device.grad_weight, host.grad_weight);
  expect_close("grad_in", device.grad_in, in.grad);
  expect_close("grad_out", device.grad_out, out.grad);
}

TEST_F(DeviceExpertsTest, RepeatsItsBits) {
  const DeviceResult first = run_device();
  const DeviceResult second = run_device();
  EXPECT_EQ(first.y, second.y);
  EXPECT_EQ(first.grad_x, second.grad_x);
  EXPECT_EQ(first.grad_weight, second.grad_weight);
  EXPECT_EQ(first.grad_in, second.grad_in);
  EXPECT_EQ(first.grad_out, second.grad_out);
}

}  // namespace
}  // namespace weft::moe
