// SPDX-License-Identifier: Apache-2.0
// The whole public API, in the order of the data flow.
#pragma once

#include "weft/calls.hpp"
#include "weft/error.hpp"
#include "weft/exchange.hpp"
#include "weft/group.hpp"
#include "weft/overlap.hpp"
#include "weft/plan.hpp"
#include "weft/routing.hpp"
#include "weft/tensor.hpp"
#include "weft/version.hpp"
