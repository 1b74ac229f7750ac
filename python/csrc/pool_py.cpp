// SPDX-License-Identifier: Apache-2.0
// Segments for a torch.cuda.MemPool, out of memory that peers can write. torch asks for them by two
// C functions that carry nothing of ours, so the thread says beforehand which exchange shall give.
#include <memory>
#include <mutex>
#include <nanobind/stl/shared_ptr.h>
#include <sys/types.h>
#include <unordered_map>

#include "bind.hpp"
#include "calls_py.hpp"

namespace weft::py {
namespace {

thread_local std::shared_ptr<Calls> giver;

class Segments {
 public:
  // For as long as the process lives: torch frees its last segments when it ends.
  static Segments& all() {
    static auto* const segments = new Segments;  // NOLINT(cppcoreguidelines-owning-memory)
    return *segments;
  }

  void* add(Buffer buffer) {
    void* data = buffer.tensor().data;
    const std::scoped_lock lock(mutex_);
    held_.insert_or_assign(data, std::move(buffer));
    return data;
  }

  void remove(void* data) {
    Buffer freed;  // outside of the lock
    const std::scoped_lock lock(mutex_);
    const auto found = held_.find(data);
    if (found != held_.end()) {
      freed = std::move(found->second);
      held_.erase(found);
    }
  }

 private:
  std::mutex mutex_;
  std::unordered_map<void*, Buffer> held_;
};

}  // namespace

void bind_pool(nb::module_& m) {
  m.def(
      "give_segments",
      [](std::shared_ptr<Calls> calls) { giver = std::move(calls); },
      nb::arg("exchange").none(),
      "The exchange that gives this thread's next segments; None: nobody."
  );
}

}  // namespace weft::py

extern "C" {

// Null, which torch reports as out of memory, if there is no exchange or it has none to give.
__attribute__((visibility("default"))) void* weft_pool_malloc(
    ssize_t bytes, int /*device*/, void* /*stream*/
) {
  constexpr int64_t kRow = 16;
  if (weft::py::giver == nullptr || bytes <= 0) {
    return nullptr;
  }
  try {
    return weft::py::Segments::all().add(weft::py::giver->locked_here([&](weft::Exchange& exchange
                                                                      ) {
      return exchange.allocate((bytes + kRow - 1) / kRow, kRow, weft::DType::kByte);
    }));
  } catch (const std::exception&) {
    return nullptr;
  }
}

__attribute__((visibility("default"))) void weft_pool_free(
    void* data, ssize_t /*bytes*/, int /*device*/, void* /*stream*/
) {
  weft::py::Segments::all().remove(data);
}
}
