// SPDX-License-Identifier: Apache-2.0
// weft._core: the C++ API with as little in between as possible. What torch needs is in Python.
#include "bind.hpp"

NB_MODULE(_core, m) {
  m.doc() = "The C++ API of Weft.";
  weft::py::bind_errors(m);
  weft::py::bind_group(m);
  weft::py::bind_plan(m);
  weft::py::bind_exchange(m);
  weft::py::bind_pool(m);
}
