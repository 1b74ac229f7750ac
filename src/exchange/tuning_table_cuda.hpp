// SPDX-License-Identifier: Apache-2.0
// Made by tools/tuning_table.py from bench/tuning/h200.json; not to be edited.
#pragma once

#include <array>

#include "exchange/sms_cuda.hpp"

namespace weft {

inline constexpr std::array<TunedSplit, 40> kBuiltInTuning = {{
    {TunedOp::kDispatch, 4096, {6, 6}, 607.1},    {TunedOp::kDispatch, 4096, {8, 8}, 469.3},
    {TunedOp::kDispatch, 4096, {12, 12}, 333.4},  {TunedOp::kDispatch, 4096, {13, 19}, 314.2},
    {TunedOp::kDispatch, 4096, {38, 58}, 298.9},  {TunedOp::kDispatch, 4096, {40, 92}, 290.2},
    {TunedOp::kDispatch, 8192, {8, 4}, 400.8},    {TunedOp::kDispatch, 8192, {11, 5}, 300.5},
    {TunedOp::kDispatch, 8192, {19, 5}, 203.2},   {TunedOp::kDispatch, 8192, {22, 10}, 175.3},
    {TunedOp::kDispatch, 8192, {48, 48}, 166.4},  {TunedOp::kDispatch, 8192, {66, 66}, 162.3},
    {TunedOp::kDispatch, 14336, {7, 5}, 1002.7},  {TunedOp::kDispatch, 14336, {10, 6}, 833.3},
    {TunedOp::kDispatch, 14336, {14, 10}, 518.7}, {TunedOp::kDispatch, 14336, {14, 34}, 508.8},
    {TunedOp::kDispatch, 14336, {48, 48}, 496.3}, {TunedOp::kDispatch, 14336, {53, 79}, 481.5},
    {TunedOp::kCombine, 4096, {8, 4}, 1834.7},    {TunedOp::kCombine, 4096, {11, 5}, 1342.2},
    {TunedOp::kCombine, 4096, {17, 7}, 891.0},    {TunedOp::kCombine, 4096, {22, 10}, 691.9},
    {TunedOp::kCombine, 4096, {28, 12}, 553.3},   {TunedOp::kCombine, 4096, {34, 14}, 463.1},
    {TunedOp::kCombine, 4096, {45, 19}, 358.5},   {TunedOp::kCombine, 4096, {48, 48}, 334.6},
    {TunedOp::kCombine, 4096, {53, 79}, 306.3},   {TunedOp::kCombine, 8192, {7, 5}, 461.8},
    {TunedOp::kCombine, 8192, {10, 6}, 369.3},    {TunedOp::kCombine, 8192, {14, 10}, 246.4},
    {TunedOp::kCombine, 8192, {19, 13}, 193.3},   {TunedOp::kCombine, 8192, {20, 20}, 180.5},
    {TunedOp::kCombine, 8192, {48, 48}, 168.7},   {TunedOp::kCombine, 8192, {53, 79}, 164.8},
    {TunedOp::kCombine, 14336, {8, 4}, 1134.2},   {TunedOp::kCombine, 14336, {11, 5}, 840.0},
    {TunedOp::kCombine, 14336, {17, 7}, 587.6},   {TunedOp::kCombine, 14336, {19, 13}, 535.7},
    {TunedOp::kCombine, 14336, {20, 20}, 507.6},  {TunedOp::kCombine, 14336, {92, 40}, 495.0},
}};

}  // namespace weft
