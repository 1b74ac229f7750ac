// SPDX-License-Identifier: Apache-2.0
// libfabric as a library that may be missing: its few exported functions, looked up at run time.
// All else in its headers is inline and goes through tables that these functions return.
#pragma once

#include <cstdint>
#include <memory>
#include <rdma/fabric.h>
#include <rdma/fi_domain.h>
#include <rdma/fi_endpoint.h>
#include <string>
#include <string_view>

#include "core/check.hpp"

namespace weft::ofi {

// What is asked of libfabric, whatever newer headers would ask. From 1.18 on providers may call
// CUDA unless FI_OPT_CUDA_API_PERMITTED is set to false, and such a call may wait for work that
// waits for its end.
constexpr uint32_t kApiVersion = FI_VERSION(1, 17);

struct Api {
  std::string obstacle;  // empty: the functions are there
  std::string version;   // "1.17"
  decltype(&::fi_getinfo) getinfo = nullptr;
  decltype(&::fi_freeinfo) freeinfo = nullptr;
  decltype(&::fi_dupinfo) dupinfo = nullptr;
  decltype(&::fi_fabric) fabric = nullptr;
  decltype(&::fi_strerror) strerror = nullptr;
};

// Loads the library on first use and keeps it; any thread.
[[nodiscard]] const Api& api();

// "Connection refused (111)"; either sign.
[[nodiscard]] std::string error_text(int64_t error);

// Throws if `result` is negative: "fi_domain: Connection refused (111), provider tcp".
void check_call(
    const Context& context,
    std::string_view provider,
    std::string_view call,
    int64_t result,
    ErrorCode code = ErrorCode::kNotAvailable
);

struct CloseObject {
  template <class Object>
  void operator()(Object* object) const {
    static_cast<void>(fi_close(&object->fid));
  }
};
template <class Object>
using Owned = std::unique_ptr<Object, CloseObject>;  // fid_fabric, fid_domain, ...

struct FreeInfo {
  void operator()(fi_info* info) const { api().freeinfo(info); }
};
using Info = std::unique_ptr<fi_info, FreeInfo>;

}  // namespace weft::ofi
