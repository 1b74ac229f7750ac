// SPDX-License-Identifier: Apache-2.0
// A copy of a host matrix in the memory that an exchange works on, a CPU's or a GPU's.
#pragma once

#include <memory>

#include "core/device_memory.hpp"
#include "weft/exchange.hpp"

namespace weft::program {

class DeviceCopy {
 public:
  // A matrix that is not given stays so.
  DeviceCopy(const Device& device, const ConstTensor& host) {
    if (host.is_given()) {
      memory_ = allocate_on(device, static_cast<uint64_t>(host.num_bytes()));
      fill(device, memory_.get(), host);
    }
  }
  // In memory of the exchange.
  DeviceCopy(Exchange& exchange, const ConstTensor& host)
      : buffer_(exchange.allocate(host.rows, host.cols, host.dtype)) {
    fill(exchange.config().device, buffer_.tensor().data, host);
  }

  [[nodiscard]] const Tensor& tensor() const { return tensor_; }

  void read_back(const Tensor& host) const {
    copy_between(
        host.data, {}, tensor_.data, tensor_.device, static_cast<uint64_t>(tensor_.num_bytes())
    );
  }

 private:
  void fill(const Device& device, std::byte* data, const ConstTensor& host) {
    tensor_ = {data, host.dtype, host.rows, host.cols, -1, device};
    copy_between(data, device, host.data, {}, static_cast<uint64_t>(host.num_bytes()));
  }

  Tensor tensor_;
  std::shared_ptr<std::byte> memory_;
  Buffer buffer_;
};

}  // namespace weft::program
