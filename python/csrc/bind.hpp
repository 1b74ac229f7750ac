// SPDX-License-Identifier: Apache-2.0
// One function for each public header, in <header>_py.cpp, and one for torch's memory pools.
#pragma once

#include <nanobind/nanobind.h>

namespace weft::py {

void bind_group(nanobind::module_& m);
void bind_plan(nanobind::module_& m);
void bind_exchange(nanobind::module_& m);
void bind_overlap(nanobind::module_& m);
void bind_pool(nanobind::module_& m);

}  // namespace weft::py
