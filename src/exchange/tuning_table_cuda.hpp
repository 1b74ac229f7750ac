// SPDX-License-Identifier: Apache-2.0
// Made by tools/tuning_table.py from bench/tuning/h200.json; not to be edited.
#pragma once

#include <array>

#include "exchange/sms_cuda.hpp"

namespace weft {

inline constexpr std::array<TunedSplit, 42> kBuiltInTuning = {{
    {TunedOp::kDispatch, 4096, {6, 6}, 610.5},    {TunedOp::kDispatch, 4096, {8, 8}, 470.1},
    {TunedOp::kDispatch, 4096, {12, 12}, 337.2},  {TunedOp::kDispatch, 4096, {13, 19}, 315.1},
    {TunedOp::kDispatch, 4096, {38, 58}, 301.6},  {TunedOp::kDispatch, 4096, {40, 92}, 291.9},
    {TunedOp::kDispatch, 8192, {8, 4}, 402.8},    {TunedOp::kDispatch, 8192, {11, 5}, 302.0},
    {TunedOp::kDispatch, 8192, {17, 7}, 209.0},   {TunedOp::kDispatch, 8192, {22, 10}, 175.8},
    {TunedOp::kDispatch, 8192, {48, 48}, 165.3},  {TunedOp::kDispatch, 8192, {66, 66}, 163.4},
    {TunedOp::kDispatch, 14336, {7, 5}, 1004.0},  {TunedOp::kDispatch, 14336, {10, 6}, 841.1},
    {TunedOp::kDispatch, 14336, {14, 10}, 522.8}, {TunedOp::kDispatch, 14336, {14, 34}, 512.8},
    {TunedOp::kDispatch, 14336, {38, 58}, 486.1}, {TunedOp::kDispatch, 14336, {66, 66}, 485.8},
    {TunedOp::kCombine, 4096, {8, 4}, 3083.8},    {TunedOp::kCombine, 4096, {11, 5}, 2251.1},
    {TunedOp::kCombine, 4096, {17, 7}, 1480.3},   {TunedOp::kCombine, 4096, {22, 10}, 1149.4},
    {TunedOp::kCombine, 4096, {28, 12}, 912.4},   {TunedOp::kCombine, 4096, {34, 14}, 757.8},
    {TunedOp::kCombine, 4096, {45, 19}, 579.4},   {TunedOp::kCombine, 4096, {67, 29}, 402.4},
    {TunedOp::kCombine, 4096, {92, 40}, 306.5},   {TunedOp::kCombine, 8192, {7, 5}, 937.3},
    {TunedOp::kCombine, 8192, {10, 6}, 675.7},    {TunedOp::kCombine, 8192, {14, 10}, 483.7},
    {TunedOp::kCombine, 8192, {19, 13}, 367.4},   {TunedOp::kCombine, 8192, {24, 16}, 298.3},
    {TunedOp::kCombine, 8192, {29, 19}, 250.9},   {TunedOp::kCombine, 8192, {38, 26}, 201.3},
    {TunedOp::kCombine, 8192, {48, 48}, 166.3},   {TunedOp::kCombine, 14336, {8, 4}, 1625.0},
    {TunedOp::kCombine, 14336, {11, 5}, 1187.8},  {TunedOp::kCombine, 14336, {17, 7}, 790.1},
    {TunedOp::kCombine, 14336, {22, 10}, 614.9},  {TunedOp::kCombine, 14336, {28, 12}, 509.7},
    {TunedOp::kCombine, 14336, {48, 48}, 509.2},  {TunedOp::kCombine, 14336, {92, 40}, 491.8},
}};

}  // namespace weft
