// SPDX-License-Identifier: Apache-2.0
#include "torch_tensor.hpp"

#include <algorithm>
#include <dlfcn.h>
#include <memory>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>
#include <tuple>
#include <utility>

namespace weft::py {
namespace {

using DlTensor = nb::dlpack::dltensor;
using DlCode = nb::dlpack::dtype_code;

constexpr int32_t kDlCpu = 1;
constexpr int32_t kDlCuda = 2;
constexpr int32_t kTorchCpu = 0;
constexpr int32_t kTorchCuda = 1;

// A tensor that is handed over with what keeps its memory (DLManagedTensorVersioned).
struct DlOwned {
  uint32_t major = 1;
  uint32_t minor = 0;
  void* owner = nullptr;
  void (*free)(DlOwned* self) = nullptr;
  uint64_t flags = 0;
  DlTensor tensor;
};

// The C exchange API of DLPack, version 1 (dlpack.h): functions of a type of tensors.
struct DlExchange {
  uint32_t major;
  uint32_t minor;
  void* previous;
  void* allocate;
  void* from_object;
  int (*to_object)(DlOwned* tensor, void** made);  // taken over; not 0: a Python error is set
  int (*read)(void* object, DlTensor* found);      // borrowed; not 0: a Python error is set
  void* stream;
};

// Functions of torch's stable C interface (torch/csrc/inductor/aoti_torch/c/shim.h); 0 is success.
using EmptyStrided = int32_t(
    int64_t num_dims,
    const int64_t* sizes,
    const int64_t* strides,
    int32_t type,
    int32_t device_type,
    int32_t device,
    void** made
);
using Reinterpret = int32_t(
    void* tensor,
    int64_t num_dims,
    const int64_t* sizes,
    const int64_t* strides,
    int64_t offset,
    void** made
);
using GetData = int32_t(void* tensor, void** data);
using Delete = int32_t(void* tensor);

// Parts of this process's torch; null or None where it lacks them.
struct Torch {
  nb::object module = nb::module_::import_("torch");
  nb::object tensor = module.attr("Tensor");
  nb::object outputs = nb::module_::import_("weft.outputs");
  const DlExchange* exchange = nullptr;
  EmptyStrided* empty_strided = nullptr;
  Reinterpret* reinterpret = nullptr;  // of memory of another tensor
  GetData* get_data = nullptr;
  Delete* free = nullptr;
  // Makes tensors of capsules of empty_strided's handles, which it takes over. The function for one
  // tensor would leak each.
  nb::object to_tensors;

  Torch() {
    const nb::object api = nb::getattr(tensor, "__dlpack_c_exchange_api__", nb::none());
    if (!api.is_none()) {
      const auto* found =
          static_cast<const DlExchange*>(PyCapsule_GetPointer(api.ptr(), "dlpack_exchange_api"));
      if (found == nullptr) {
        PyErr_Clear();
      } else if (found->major == 1) {
        exchange = found;
      }
    }
    void* library = dlopen("libtorch_cpu.so", RTLD_LAZY | RTLD_NOLOAD);
    const nb::object shim = nb::getattr(module.attr("_C"), "_aoti", nb::none());
    to_tensors = nb::getattr(shim, "alloc_tensors_by_stealing_from_void_ptrs", nb::none());
    if (library != nullptr && !to_tensors.is_none()) {
      empty_strided =
          reinterpret_cast<EmptyStrided*>(dlsym(library, "aoti_torch_empty_strided"));  // NOLINT
      reinterpret = reinterpret_cast<Reinterpret*>(                                     // NOLINT
          dlsym(library, "aoti_torch__reinterpret_tensor")
      );
      get_data = reinterpret_cast<GetData*>(dlsym(library, "aoti_torch_get_data_ptr"));  // NOLINT
      free =
          reinterpret_cast<Delete*>(dlsym(library, "aoti_torch_delete_tensor_object"));  // NOLINT
    }
  }

  [[nodiscard]] bool can_make() const {
    return empty_strided != nullptr && get_data != nullptr && free != nullptr;
  }
};

std::optional<ScalarType> scalar_type(nb::dlpack::dtype type) {
  if (type.lanes != 1) {
    return std::nullopt;
  }
  static constexpr std::tuple<DlCode, int, int> kTypes[] = {
      {DlCode::UInt, 8, 0},
      {DlCode::Int, 8, 1},
      {DlCode::Int, 32, 3},
      {DlCode::Int, 64, 4},
      {DlCode::Float, 16, 5},
      {DlCode::Float, 32, 6},
      {DlCode::Bool, 8, 11},
      {DlCode::Bfloat, 16, 15},
      {DlCode::Float8_E5M2, 8, 23},
      {DlCode::Float8_E4M3FN, 8, 24},
      {DlCode::Float8_E8M0FNU, 8, 44}};
  for (const auto& [code, bits, number] : kTypes) {
    if (type.code == static_cast<uint8_t>(code) && type.bits == bits) {
      return static_cast<ScalarType>(number);
    }
  }
  return std::nullopt;
}

bool has_gaps(const DlTensor& found) {
  int64_t wanted = 1;
  bool is_empty = false;
  bool is_dense = true;
  for (int i = found.ndim - 1; i >= 0; --i) {
    is_empty |= found.shape[i] == 0;
    is_dense &= found.shape[i] == 1 || found.strides == nullptr || found.strides[i] == wanted;
    wanted *= found.shape[i];
  }
  return !is_dense && !is_empty;
}

// Returns a view, nothing if Python had better look at the tensor. Valid while the tensor is
// unchanged.
std::optional<DlTensor> look(nb::handle tensor) {
  const Torch& torch = looked_up<Torch>();
  if (torch.exchange == nullptr || tensor.type().ptr() != torch.tensor.ptr()) {
    return std::nullopt;
  }
  DlTensor found;
  if (torch.exchange->read(tensor.ptr(), &found) != 0) {
    PyErr_Clear();
    return std::nullopt;
  }
  const int32_t where = found.device.device_type;
  return where == kDlCpu || where == kDlCuda ? std::optional(found) : std::nullopt;
}

// Reads a matrix or a vector, or blocks of rows that make one matrix; nothing where look() says so.
std::optional<Given> read_quickly(nb::handle tensor, bool is_blocks = false) {
  const std::optional<DlTensor> seen = look(tensor);
  if (!seen) {
    return std::nullopt;
  }
  const DlTensor& found = *seen;
  const std::optional<ScalarType> type = scalar_type(found.dtype);
  const bool is_cuda = found.device.device_type == kDlCuda;
  const bool is_matrix = is_blocks ? found.ndim == 3 : found.ndim == 1 || found.ndim == 2;
  if (!type || !is_matrix || has_gaps(found)) {
    return std::nullopt;
  }
  auto* data = static_cast<std::byte*>(found.data) + found.byte_offset;
  return Given{
      nb::borrow(tensor),
      {found.data == nullptr ? nullptr : data,
       core_type(*type),
       is_blocks ? found.shape[0] * found.shape[1] : found.shape[0],
       found.ndim > 1 ? found.shape[found.ndim - 1] : 1,
       -1,
       is_cuda ? Device{Device::Kind::kCuda, found.device.device_id} : Device{}},
      type};
}

// Reads a tensor by Python, which says what is wrong.
Given read_slowly(const char* name, nb::handle tensor) {
  const nb::object seen = looked_up<Torch>().outputs.attr("view")(name, tensor);
  if (seen.is_none()) {
    return {};
  }
  using View = std::tuple<nb::object, uintptr_t, int, int64_t, int64_t, int, std::optional<int>>;
  auto [owner, address, dtype, rows, cols, gpu, type] = nb::cast<View>(seen);
  auto* data = reinterpret_cast<std::byte*>(address);  // NOLINT: torch gives it as a number
  const Device device = gpu < 0 ? Device{} : Device{Device::Kind::kCuda, gpu};
  Given given = {std::move(owner), {data, static_cast<DType>(dtype), rows, cols, -1, device}, {}};
  if (type) {
    given.type = static_cast<ScalarType>(*type);
  }
  return given;
}

// Bytes in memory of the core's, on their way to torch.
struct Bytes {
  DlOwned owned;
  std::shared_ptr<const void> owner;
  int64_t count;
  int64_t stride = 1;

  Bytes(const Tensor& tensor, std::shared_ptr<const void> kept)
      : owner(std::move(kept)), count(tensor.num_bytes()) {
    const bool is_cuda = tensor.device.kind == Device::Kind::kCuda;
    owned.owner = this;
    owned.free = [](DlOwned* self) {
      delete static_cast<Bytes*>(self->owner);  // NOLINT(cppcoreguidelines-owning-memory)
    };
    owned.tensor.data = tensor.data;
    owned.tensor.device = {is_cuda ? kDlCuda : kDlCpu, is_cuda ? tensor.device.index : 0};
    owned.tensor.ndim = 1;
    owned.tensor.dtype = nb::dtype<uint8_t>();
    owned.tensor.shape = &count;
    owned.tensor.strides = &stride;
  }
  Bytes(const Bytes&) = delete;
};

// Makes a tensor of bytes by Python, which costs some microseconds.
nb::object array_by_python(const Tensor& tensor, std::shared_ptr<const void> owner) {
  using Owner = std::shared_ptr<const void>;
  auto kept = std::make_unique<Owner>(std::move(owner));
  const nb::capsule capsule(kept.get(), [](void* data) noexcept {
    delete static_cast<Owner*>(data);  // NOLINT(cppcoreguidelines-owning-memory): a capsule's way
  });
  static_cast<void>(kept.release());
  const bool is_cuda = tensor.device.kind == Device::Kind::kCuda;
  const int type = is_cuda ? nb::device::cuda::value : nb::device::cpu::value;
  const auto count = static_cast<size_t>(tensor.num_bytes());
  const nb::ndarray<nb::pytorch, uint8_t> bytes(
      tensor.data, {count}, capsule, {}, nb::dtype<uint8_t>(), type, tensor.device.index
  );
  return nb::cast(bytes);
}

}  // namespace

nb::object array_of(const Tensor& tensor, std::shared_ptr<const void> owner) {
  const DlExchange* exchange = looked_up<Torch>().exchange;
  if (exchange != nullptr && exchange->to_object != nullptr) {
    auto bytes = std::make_unique<Bytes>(tensor, owner);
    void* made = nullptr;
    if (exchange->to_object(&bytes->owned, &made) == 0) {
      static_cast<void>(bytes.release());
      return nb::steal(static_cast<PyObject*>(made));
    }
    PyErr_Clear();
  }
  return array_by_python(tensor, std::move(owner));
}

DType core_type(ScalarType type) {
  switch (static_cast<int32_t>(type)) {
    case 3:
      return DType::kInt32;
    case 4:
      return DType::kInt64;
    case 5:
      return DType::kFloat16;
    case 6:
      return DType::kFloat32;
    case 11:
      return DType::kBool;
    case 15:
      return DType::kBFloat16;
    default:
      return DType::kByte;
  }
}

Given read_needed(const char* name, nb::handle tensor) {
  if (std::optional<Given> given = read_quickly(tensor)) {
    return *std::move(given);
  }
  return read_slowly(name, tensor);
}

Given read_blocks(const char* name, nb::handle tensor) {
  if (std::optional<Given> given = read_quickly(tensor, true)) {
    return *std::move(given);
  }
  return read_needed(name, tensor.attr("flatten")(0, 1));
}

Given read(const char* name, nb::handle tensor) {
  return tensor.is_none() ? Given{} : read_needed(name, tensor);
}

Given read_bytes(const char* name, nb::handle tensor) {
  if (tensor.is_none()) {
    return {};
  }
  std::optional<Given> given = read_quickly(tensor);
  if (!given || nb::cast<int>(tensor.attr("dim")()) != 2) {
    const nb::object bytes = looked_up<Torch>().outputs.attr("as_bytes")(tensor);
    given = read_slowly(name, bytes);
    given->type.reset();
    return *std::move(given);
  }
  given->tensor.cols *= dtype_bytes(given->tensor.dtype);
  given->tensor.dtype = DType::kByte;
  return *std::move(given);
}

Given read_vector(const char* name, nb::handle tensor) {
  Given given = read(name, tensor);
  std::swap(given.tensor.rows, given.tensor.cols);
  return given;
}

Given at_place(const char* name, nb::handle tensor, Given given, bool writes) {
  if (!tensor.is_none()) {
    looked_up<Torch>().outputs.attr("at_place")(name, tensor, given.owner.is(tensor), writes);
  }
  return given;
}

int64_t scalar_bytes(ScalarType type) {
  return dtype_bytes(core_type(type));
}

bool suits(nb::handle tensor, uint64_t types, std::span<const int64_t> shape) {
  const std::optional<DlTensor> found = look(tensor);
  const std::optional<ScalarType> type = found ? scalar_type(found->dtype) : std::nullopt;
  if (!type || (types >> static_cast<int>(*type) & 1) == 0 ||
      static_cast<size_t>(found->ndim) != shape.size()) {
    return false;
  }
  const std::span<const int64_t> sizes(found->shape, shape.size());
  return std::ranges::equal(sizes, shape, [](int64_t size, int64_t wanted) {
    return wanted == -1 || size == wanted;
  });
}

bool suits(nb::handle tensor, uint64_t types, nb::handle shape) {
  std::vector<int64_t> sizes;
  for (const nb::handle size : shape) {
    int64_t wanted = -1;
    if (nb::isinstance<nb::int_>(size) && (!nb::try_cast(size, wanted) || wanted < 0)) {
      return false;  // no tensor has it
    }
    sizes.push_back(wanted);
  }
  return suits(tensor, types, sizes);
}

int64_t size_of(nb::handle tensor, int dim) {
  const std::optional<DlTensor> found = look(tensor);
  return found ? found->shape[dim] : nb::cast<int64_t>(tensor.attr("shape")[dim]);
}

nb::object tensor_of_bytes(nb::handle array, int64_t rows, int64_t cols, ScalarType type) {
  return looked_up<Torch>().outputs.attr("of_bytes")(array, rows, cols, static_cast<int>(type));
}

NewTensors::NewTensors(NewTensors&& other) noexcept
    : device_(other.device_),
      handles_(std::exchange(other.handles_, {})),
      objects_(std::exchange(other.objects_, {})) {}

NewTensors::~NewTensors() {
  for (void* handle : handles_) {
    if (handle != nullptr) {
      looked_up<Torch>().free(handle);
    }
  }
}

Tensor NewTensors::add(int64_t rows, int64_t cols, ScalarType type) {
  return add(rows, cols, type, {2, {rows, cols}, {cols, 1}});
}

Tensor NewTensors::add(int64_t rows, int64_t cols, ScalarType type, const Shape& shape) {
  const auto& [num_dims, sizes, strides] = shape;
  if (void* handle = make(shape, type); handle != nullptr) {
    return add_made(handle, rows, cols, type);
  }
  const std::vector<int64_t> of_dims(sizes.begin(), sizes.begin() + num_dims);
  const std::vector<int64_t> steps(strides.begin(), strides.begin() + num_dims);
  const int gpu = device_.kind == Device::Kind::kCuda ? device_.index : -1;
  add(looked_up<Torch>().outputs.attr("empty")(of_dims, steps, static_cast<int>(type), gpu));
  auto* data = reinterpret_cast<std::byte*>(  // NOLINT: torch gives it as a number
      nb::cast<uintptr_t>(objects_.back().attr("data_ptr")())
  );
  return {data, core_type(type), rows, cols, -1, device_};
}

std::array<Tensor, 2> NewTensors::add_both(ScalarType type, const Part& first, const Part& second) {
  const Torch& torch = looked_up<Torch>();
  constexpr int64_t kStep = 128;  // elements: each part begins where torch would have it begin
  const int64_t begin = (first.rows * first.cols + kStep - 1) / kStep * kStep;
  const int64_t size = begin + second.rows * second.cols;
  if (void* whole = torch.reinterpret == nullptr ? nullptr : make({1, {size}, {1}}, type);
      whole != nullptr) {
    void* const one = make_part(whole, first.shape, 0);
    void* const other = make_part(whole, second.shape, begin);
    torch.free(whole);
    if (one != nullptr && other != nullptr) {
      return {
          add_made(one, first.rows, first.cols, type),
          add_made(other, second.rows, second.cols, type)};
    }
    for (void* made : {one, other}) {
      if (made != nullptr) {
        torch.free(made);
      }
    }
  }
  return {
      add(first.rows, first.cols, type, first.shape),
      add(second.rows, second.cols, type, second.shape)};
}

void* NewTensors::make(const Shape& shape, ScalarType type) const {
  const Torch& torch = looked_up<Torch>();
  if (!torch.can_make()) {
    return nullptr;
  }
  const bool is_cuda = device_.kind == Device::Kind::kCuda;
  const int32_t where = is_cuda ? kTorchCuda : kTorchCpu;
  const int gpu = is_cuda ? device_.index : -1;
  const auto& [num_dims, sizes, strides] = shape;
  void* made = nullptr;
  const nb::gil_scoped_release no_gil;  // a segment of a pool may take the time of all ranks
  const int32_t problem = torch.empty_strided(
      num_dims, sizes.data(), strides.data(), static_cast<int32_t>(type), where, gpu, &made
  );
  return problem == 0 ? made : nullptr;
}

void* NewTensors::make_part(void* whole, const Shape& shape, int64_t begin) {
  const Torch& torch = looked_up<Torch>();
  if (torch.reinterpret == nullptr) {
    return nullptr;
  }
  const auto& [num_dims, sizes, strides] = shape;
  void* made = nullptr;
  const int32_t problem =
      torch.reinterpret(whole, num_dims, sizes.data(), strides.data(), begin, &made);
  return problem == 0 ? made : nullptr;
}

Tensor NewTensors::add_made(void* handle, int64_t rows, int64_t cols, ScalarType type) {
  handles_.push_back(handle);
  objects_.emplace_back();
  void* data = nullptr;
  looked_up<Torch>().get_data(handle, &data);
  return {static_cast<std::byte*>(data), core_type(type), rows, cols, -1, device_};
}

void NewTensors::add(nb::object tensor) {
  handles_.push_back(nullptr);
  objects_.push_back(std::move(tensor));
}

void NewTensors::shorten(size_t place, int64_t rows, int64_t cols) {
  void*& handle = handles_[place];
  if (handle != nullptr) {
    const Torch& torch = looked_up<Torch>();
    if (void* part = make_part(handle, {2, {rows, cols}, {cols, 1}}, 0); part != nullptr) {
      torch.free(std::exchange(handle, part));
      return;
    }
    nb::list capsules;
    capsules.append(nb::capsule(std::exchange(handle, nullptr)));
    objects_[place] = torch.to_tensors(capsules)[0];
  }
  objects_[place].attr("resize_")(rows, cols);
}

std::vector<nb::object> NewTensors::take() {
  nb::list capsules;
  for (void*& handle : handles_) {
    if (handle != nullptr) {
      capsules.append(nb::capsule(std::exchange(handle, nullptr)));
    }
  }
  if (nb::len(capsules) > 0) {
    const nb::object made = looked_up<Torch>().to_tensors(capsules);
    size_t next = 0;
    for (nb::object& object : objects_) {
      if (!object.is_valid()) {
        object = made[next++];
      }
    }
  }
  handles_.clear();
  return std::exchange(objects_, {});
}

}  // namespace weft::py
