// SPDX-License-Identifier: Apache-2.0
#include "exchange/agree_cuda.hpp"

#include <algorithm>
#include <cstring>
#include <random>
#include <span>

#include "core/check_cuda.hpp"

namespace weft {

DomainFacts agree_on_facts(const Group& group, uint64_t id, int gpu, const Context& context) {
  static const uint64_t process_bits = uint64_t{std::random_device()()} << 32;
  int shared_bytes = 0;
  WEFT_CUDA(
      context, cudaDeviceGetAttribute(&shared_bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, gpu)
  );
  // Rank 0's stamp: some bits of its own, then the number of the exchange in its process.
  const DomainFacts own = {process_bits | (id & 0xffffffffU), static_cast<uint64_t>(shared_bytes)};
  DomainFacts all = own;
  bool is_first = true;
  for (const auto& bytes : group.all_gather(std::as_bytes(std::span(&own, 1)))) {
    DomainFacts one;
    std::memcpy(&one, bytes.data(), sizeof one);
    all.stamp = is_first ? one.stamp : all.stamp;
    all.shared_bytes = std::min(all.shared_bytes, one.shared_bytes);
    is_first = false;
  }
  return all;
}

}  // namespace weft
