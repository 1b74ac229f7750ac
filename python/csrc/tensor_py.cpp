// SPDX-License-Identifier: Apache-2.0
// From DLPack and to it: what Weft calls a type, and what DLPack does.
#include "tensor_py.hpp"

#include <algorithm>
#include <array>
#include <string>

#include "weft/error.hpp"

namespace weft::py {
namespace {

using Code = nb::dlpack::dtype_code;

[[noreturn]] void refuse(const std::string& problem) {
  throw Error(ErrorCode::kInvalidArgument, problem, -1, "");
}

struct Kind {
  DType dtype;
  Code code;
  uint8_t bits;
};

constexpr std::array<Kind, 7> kKinds = {{
    {DType::kBFloat16, Code::Bfloat, 16},
    {DType::kFloat16, Code::Float, 16},
    {DType::kFloat32, Code::Float, 32},
    {DType::kInt32, Code::Int, 32},
    {DType::kInt64, Code::Int, 64},
    {DType::kBool, Code::Bool, 8},
    {DType::kByte, Code::UInt, 8},
}};

// Every type of one byte but bool is kByte.
std::optional<DType> dtype_of(const nb::dlpack::dtype& dtype) {
  const auto is_it = [&](const Kind& kind) {
    return kind.code == static_cast<Code>(dtype.code) && kind.bits == dtype.bits;
  };
  if (dtype.lanes != 1) {
    return {};
  }
  const auto* const found = std::ranges::find_if(kKinds, is_it);
  if (found != kKinds.end()) {
    return found->dtype;
  }
  return dtype.bits == 8 ? std::optional(DType::kByte) : std::nullopt;
}

nb::dlpack::dtype dlpack_of(DType dtype) {
  const Kind& kind = *std::ranges::find(kKinds, dtype, &Kind::dtype);
  return {static_cast<uint8_t>(kind.code), kind.bits, 1};
}

Device device_of(const Array& array, const char* name) {
  switch (array.device_type()) {
    case nb::device::cpu::value:
    case nb::device::cuda_host::value:
      return {};
    case nb::device::cuda::value:
      return {Device::Kind::kCuda, array.device_id()};
    default:
      refuse(std::string(name) + " lies on a device that is neither CPU nor CUDA");
  }
}

}  // namespace

Tensor view_of(const Array& array, const char* name) {
  const std::optional<DType> dtype = dtype_of(array.dtype());
  if (!dtype) {
    refuse(
        std::string(name) +
        " has a dtype that Weft cannot move (bfloat16, float16, float32, int32, int64, bool or one "
        "byte wide)"
    );
  }
  if (array.ndim() != 1 && array.ndim() != 2) {
    refuse(std::string(name) + " has " + std::to_string(array.ndim()) + " dimensions (1 or 2)");
  }
  Tensor tensor;
  tensor.data = static_cast<std::byte*>(array.data());
  tensor.dtype = *dtype;
  tensor.rows = static_cast<int64_t>(array.shape(0));
  tensor.cols = array.ndim() == 2 ? static_cast<int64_t>(array.shape(1)) : 1;
  tensor.device = device_of(array, name);
  if (array.size() > 0 && array.ndim() == 2) {
    if (tensor.cols > 1 && array.stride(1) != 1) {
      refuse(std::string(name) + " is not contiguous (elements of a row must be adjacent)");
    }
    tensor.row_stride = tensor.rows > 1 ? array.stride(0) : tensor.cols;
  }
  return tensor;
}

Tensor view_of(const MaybeArray& array, const char* name) {
  return array ? view_of(*array, name) : Tensor{};
}

nb::object array_of(
    const Tensor& tensor, std::shared_ptr<const void> owner, std::initializer_list<size_t> shape
) {
  using Owner = std::shared_ptr<const void>;
  auto kept = std::make_unique<Owner>(std::move(owner));
  const nb::capsule capsule(kept.get(), [](void* data) noexcept {
    delete static_cast<Owner*>(data);  // NOLINT(cppcoreguidelines-owning-memory): a capsule's way
  });
  static_cast<void>(kept.release());
  const bool is_cuda = tensor.device.kind == Device::Kind::kCuda;
  const nb::ndarray<nb::pytorch> array(
      tensor.data,
      shape.size(),
      shape.begin(),
      capsule,
      nullptr,
      dlpack_of(tensor.dtype),
      is_cuda ? nb::device::cuda::value : nb::device::cpu::value,
      is_cuda ? tensor.device.index : 0
  );
  return nb::cast(array);
}

}  // namespace weft::py
