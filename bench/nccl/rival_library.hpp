// SPDX-License-Identifier: Apache-2.0
// NCCL, loaded at run time: machines keep it in different places and a build needs none. The few
// functions used here have had these signatures since NCCL 2.7.
#pragma once

#include <cstddef>
#include <string>

namespace weft::bench {

using NcclComm = void*;
using NcclStream = void*;  // a cudaStream_t

inline constexpr int kNcclSuccess = 0;
inline constexpr int kNcclByte = 0;  // NCCL's number for its 8-bit integers

struct NcclApi {
  int (*get_version)(int* version) = nullptr;
  const char* (*get_error_string)(int result) = nullptr;
  int (*comm_init_all)(NcclComm* comms, int num_gpus, const int* gpus) = nullptr;
  int (*comm_destroy)(NcclComm comm) = nullptr;
  int (*group_start)() = nullptr;
  int (*group_end)() = nullptr;
  int (*send
  )(const void* data, size_t count, int dtype, int peer, NcclComm comm, NcclStream stream
  ) = nullptr;
  int (*recv
  )(void* data, size_t count, int dtype, int peer, NcclComm comm, NcclStream stream) = nullptr;
};

class NcclLibrary {
 public:
  // Tries the file that WEFT_NCCL names, else libnccl.so.2 of the loader, else that of the Python
  // packages. Turns multicast (NVLS) off unless the environment says otherwise. Throws Error
  // (kNotAvailable) that lists what was tried.
  NcclLibrary();

  [[nodiscard]] const NcclApi& api() const { return api_; }
  [[nodiscard]] const std::string& path() const { return path_; }
  [[nodiscard]] std::string version() const;  // "2.28.9"

  // Throws Error (kNotAvailable): "<what>: <NCCL's text>".
  void check(int result, const char* what) const;

 private:
  NcclApi api_;
  std::string path_;
};

}  // namespace weft::bench
