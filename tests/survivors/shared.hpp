// SPDX-License-Identifier: Apache-2.0
// Shared memory by which processes of a test talk: a value that all children of a fork share.
#pragma once

#include <new>
#include <sys/mman.h>

namespace weft::test {

template <class T>
class Shared {
 public:
  Shared()
      : memory_(
            ::mmap(nullptr, sizeof(T), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0)
        ),
        value_(memory_ == MAP_FAILED ? throw std::bad_alloc() : new (memory_) T()) {}
  ~Shared() { ::munmap(memory_, sizeof(T)); }
  Shared(const Shared&) = delete;
  Shared& operator=(const Shared&) = delete;
  T& operator*() const { return *value_; }
  T* operator->() const { return value_; }

 private:
  void* memory_;
  T* value_;
};

}  // namespace weft::test
