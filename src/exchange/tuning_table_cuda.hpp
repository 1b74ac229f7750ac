// SPDX-License-Identifier: Apache-2.0
// Made by tools/tuning_table.py from bench/tuning/h200.json; not to be edited.
#pragma once

#include <array>

#include "exchange/sms_cuda.hpp"

namespace weft {

inline constexpr std::array<TunedSplit, 41> kBuiltInTuning = {{
    {TunedOp::kDispatch, 4096, {6, 6}, 611.0},    {TunedOp::kDispatch, 4096, {8, 8}, 473.1},
    {TunedOp::kDispatch, 4096, {12, 12}, 335.9},  {TunedOp::kDispatch, 4096, {13, 19}, 310.4},
    {TunedOp::kDispatch, 4096, {38, 58}, 293.6},  {TunedOp::kDispatch, 4096, {53, 79}, 292.6},
    {TunedOp::kDispatch, 8192, {8, 4}, 402.2},    {TunedOp::kDispatch, 8192, {11, 5}, 301.5},
    {TunedOp::kDispatch, 8192, {17, 7}, 207.7},   {TunedOp::kDispatch, 8192, {22, 10}, 174.7},
    {TunedOp::kDispatch, 8192, {48, 48}, 163.9},  {TunedOp::kDispatch, 8192, {53, 79}, 160.7},
    {TunedOp::kDispatch, 14336, {7, 5}, 1003.6},  {TunedOp::kDispatch, 14336, {10, 6}, 845.6},
    {TunedOp::kDispatch, 14336, {14, 10}, 522.0}, {TunedOp::kDispatch, 14336, {14, 34}, 511.9},
    {TunedOp::kDispatch, 14336, {38, 58}, 483.7}, {TunedOp::kDispatch, 14336, {66, 66}, 481.4},
    {TunedOp::kCombine, 4096, {8, 4}, 2999.2},    {TunedOp::kCombine, 4096, {11, 5}, 2188.3},
    {TunedOp::kCombine, 4096, {17, 7}, 1525.3},   {TunedOp::kCombine, 4096, {22, 10}, 1122.4},
    {TunedOp::kCombine, 4096, {28, 12}, 909.4},   {TunedOp::kCombine, 4096, {34, 14}, 779.0},
    {TunedOp::kCombine, 4096, {45, 19}, 583.7},   {TunedOp::kCombine, 4096, {67, 29}, 395.9},
    {TunedOp::kCombine, 4096, {92, 40}, 303.4},   {TunedOp::kCombine, 8192, {7, 5}, 953.0},
    {TunedOp::kCombine, 8192, {10, 6}, 691.3},    {TunedOp::kCombine, 8192, {14, 10}, 494.4},
    {TunedOp::kCombine, 8192, {19, 13}, 371.5},   {TunedOp::kCombine, 8192, {24, 16}, 300.9},
    {TunedOp::kCombine, 8192, {29, 19}, 254.9},   {TunedOp::kCombine, 8192, {38, 26}, 202.7},
    {TunedOp::kCombine, 8192, {48, 48}, 166.5},   {TunedOp::kCombine, 14336, {8, 4}, 1589.5},
    {TunedOp::kCombine, 14336, {11, 5}, 1164.2},  {TunedOp::kCombine, 14336, {17, 7}, 799.4},
    {TunedOp::kCombine, 14336, {22, 10}, 607.2},  {TunedOp::kCombine, 14336, {28, 12}, 507.1},
    {TunedOp::kCombine, 14336, {92, 40}, 493.6},
}};

}  // namespace weft
