// SPDX-License-Identifier: Apache-2.0
// Memory that peers can write: as arrays, and as segments for a torch.cuda.MemPool.
#include "memory_py.hpp"

#include <mutex>
#include <sys/types.h>
#include <unordered_map>

namespace weft::py {
namespace {

// torch asks for segments by two C functions that carry nothing of ours, so the thread says
// beforehand which exchange shall give.
thread_local Calls* giver = nullptr;

struct Segments {
  std::mutex mutex;
  std::unordered_map<void*, Buffer> held;  // by address

  // For as long as the process lives: torch frees its last segments when it ends.
  static Segments& all() {
    static auto* const segments = new Segments;  // NOLINT(cppcoreguidelines-owning-memory)
    return *segments;
  }
};

// Functions that torch.cuda.use_mem_pool calls; its context manager costs as much as an allocation.
struct PoolCalls {
  nb::object torch = nb::module_::import_("torch").attr("_C");
  nb::object begin = torch.attr("_cuda_beginAllocateCurrentThreadToPool");
  nb::object end = torch.attr("_cuda_endAllocateToPool");
  nb::object release = torch.attr("_cuda_releasePool");
};

}  // namespace

PeerMemory allocate(Calls& calls, int64_t rows, int64_t row_bytes) {
  auto buffer = std::make_shared<Buffer>(calls.locked([&](Exchange& exchange) {
    return exchange.allocate(rows, row_bytes, DType::kByte);
  }));
  const Tensor tensor = buffer->tensor();
  return {array_of(tensor, std::move(buffer)), tensor};
}

void give_segments(Calls* calls) {
  giver = calls;
}

PoolScope::PoolScope(Calls& calls, int gpu, nb::handle pool) : gpu_(gpu), pool_(pool) {
  looked_up<PoolCalls>().begin(gpu, pool);
  give_segments(&calls);
}

PoolScope::~PoolScope() {
  give_segments(nullptr);
  try {
    looked_up<PoolCalls>().end(gpu_, pool_);
    looked_up<PoolCalls>().release(gpu_, pool_);
  } catch (nb::python_error& error) {
    error.discard_as_unraisable("weft: leaving a pool of memory");
  }
}

extern "C" {

// Null, which torch reports as out of memory, if there is no exchange or it has none to give.
__attribute__((visibility("default"))) void* weft_pool_malloc(
    ssize_t bytes, int /*device*/, void* /*stream*/
) {
  constexpr int64_t kRow = 16;
  if (giver == nullptr || bytes <= 0) {
    return nullptr;
  }
  try {
    Buffer buffer = giver->segment((bytes + kRow - 1) / kRow, kRow);
    void* data = buffer.tensor().data;
    Segments& segments = Segments::all();
    const std::scoped_lock lock(segments.mutex);
    segments.held.insert_or_assign(data, std::move(buffer));
    return data;
  } catch (const std::exception&) {
    return nullptr;
  }
}

__attribute__((visibility("default"))) void weft_pool_free(
    void* data, ssize_t /*bytes*/, int /*device*/, void* /*stream*/
) {
  Segments& segments = Segments::all();
  std::unordered_map<void*, Buffer>::node_type freed;  // outside of the lock
  const std::scoped_lock lock(segments.mutex);
  freed = segments.held.extract(data);
}
}

}  // namespace weft::py
