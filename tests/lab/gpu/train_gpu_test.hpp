// SPDX-License-Identifier: Apache-2.0
// What tests of the model on GPUs need of a machine.
#pragma once

#include <gtest/gtest.h>

#include "core/gpu/devices.hpp"
#include "support/gpus.hpp"
#include "train/step_model.hpp"
#include "weft/error.hpp"

namespace weft::moe {

// Skips without a GPU, or without cuBLAS.
class TrainGpuTest : public testing::Test {
 protected:
  void SetUp() override {
    const GpuList& list = test::gpus_here();
    if (list.gpus.empty()) {
      GTEST_SKIP() << "no GPU: " << list.none_reason;
    }
    try {
      check_can_train_on_gpu(0);
    } catch (const Error& error) {
      GTEST_SKIP() << error.what();
    }
  }
};

}  // namespace weft::moe
