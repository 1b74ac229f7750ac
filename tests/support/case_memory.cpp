// SPDX-License-Identifier: Apache-2.0
#include "support/case_memory.hpp"

#include <algorithm>
#include <stdexcept>

#include "core/gpu/device_memory.hpp"

namespace weft::test {
namespace {

constexpr uint64_t kAlignment = 256;

uint64_t size_of(const Tensor& tensor) {
  return static_cast<uint64_t>(tensor.num_bytes());
}

}  // namespace

CaseMemory::CaseMemory(Exchange& exchange)
    : exchange_(&exchange), device_(exchange.config().device) {}

const CaseMemory::Placed& CaseMemory::add(Matrix content, bool is_direct) {
  Placed& placed = all_.emplace_back();
  placed.host_ = std::move(content);
  if (!placed.host_.view().is_given()) {
    return placed;
  }
  const Tensor whole = placed.host_.with_guards();
  placed.tensor_ = placed.host_.view();
  placed.tensor_.device = device_;
  if (is_direct) {
    placed.buffer_ = exchange_->allocate(whole.rows, whole.cols, whole.dtype);
  } else {
    placed.offset_ = num_bytes_;
    num_bytes_ += (size_of(whole) + kAlignment - 1) / kAlignment * kAlignment;
  }
  return placed;
}

const CaseMemory::Placed& CaseMemory::add_output(const Matrix& like, bool is_direct) {
  const ConstTensor view = like.view();
  return add(view.is_given() ? Matrix(view.dtype, view.rows, view.cols) : Matrix(), is_direct);
}

void CaseMemory::replace(const Placed& placed, const Matrix& content) {
  const ConstTensor old = placed.host_.view();
  const ConstTensor now = content.view();
  if (old.rows != now.rows || old.cols != now.cols || old.dtype != now.dtype) {
    throw std::invalid_argument("replace: the new matrix has another shape");
  }
  std::find_if(all_.begin(), all_.end(), [&](const Placed& each) {
    return &each == &placed;
  })->host_ = content;
}

std::byte* CaseMemory::begin_of(const Placed& placed) const {
  std::byte* direct = placed.buffer_.tensor().data;
  return direct != nullptr ? direct : memory_.get() + placed.offset_;
}

void CaseMemory::upload() {
  host_.resize(num_bytes_);
  if (!memory_) {
    memory_ = allocate_on(device_, num_bytes_);
  }
  for (Placed& placed : all_) {
    if (!placed.tensor_.is_given()) {
      continue;
    }
    const Tensor whole = placed.host_.with_guards();
    std::byte* begin = begin_of(placed);
    placed.tensor_.data = begin + (placed.host_.view().data - whole.data);
    if (placed.buffer_.tensor().data != nullptr) {
      copy_between(begin, device_, whole.data, {}, size_of(whole));
    } else {
      std::copy_n(whole.data, size_of(whole), host_.data() + placed.offset_);
    }
  }
  copy_between(memory_.get(), device_, host_.data(), {}, num_bytes_);
}

void CaseMemory::download() {
  copy_between(host_.data(), {}, memory_.get(), device_, num_bytes_);
  for (Placed& placed : all_) {
    if (!placed.tensor_.is_given()) {
      continue;
    }
    const Tensor whole = placed.host_.with_guards();
    if (placed.buffer_.tensor().data != nullptr) {
      copy_between(whole.data, {}, begin_of(placed), device_, size_of(whole));
    } else {
      std::copy_n(host_.data() + placed.offset_, size_of(whole), whole.data);
    }
  }
}

}  // namespace weft::test
