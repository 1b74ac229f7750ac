// SPDX-License-Identifier: Apache-2.0
// OpenBLAS, loaded by hand before main. Only so can it be told, through its environment variables,
// to start no threads of its own, because the ranks already share the cores, and which kernels to
// use: it knows processors by model number and takes its slowest kernels for one newer than itself.
#pragma once

#include <cblas.h>

namespace weft::moe {

struct Blas {
  decltype(&cblas_sgemm) sgemm = nullptr;
};

// Throws Error (kNotAvailable) if the library could not be loaded.
[[nodiscard]] const Blas& blas();

}  // namespace weft::moe
