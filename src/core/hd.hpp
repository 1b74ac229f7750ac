// SPDX-License-Identifier: Apache-2.0
// Arithmetic that host loops and device kernels share is marked WEFT_HD.
#pragma once

#ifdef __CUDACC__
#define WEFT_HD __host__ __device__
#else
#define WEFT_HD
#endif
