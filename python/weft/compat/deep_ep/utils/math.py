# SPDX-License-Identifier: Apache-2.0
"""Arithmetic that programs import from `deep_ep`, mostly to check results."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from weft import fp8

from ..checks import check_tensor
from ..payload import round_up as align

__all__ = [
    "align",
    "calc_diff",
    "ceil_div",
    "count_bytes",
    "create_grouped_scores",
    "hash_tensor",
    "hash_tensors",
    "inplace_unique",
    "per_token_cast_back",
    "per_token_cast_to_fp8",
    "safe_div",
]


def ceil_div(x: int, y: int) -> int:
    return -(-x // y)


def safe_div(a: float, b: float) -> float:
    """Is a / b; 0 for 0 / 0."""
    return 0 if a == 0 and b == 0 else a / b


def calc_diff(x: Tensor, y: Tensor) -> float:
    """Returns the distance of two tensors: 0 if equal, at most 2. Adds one to every element, so
    that zeros may be compared."""
    x, y = x.double() + 1, y.double() + 1
    return 1 - 2 * float((x * y).sum() / (x * x + y * y).sum())


def per_token_cast_to_fp8(x: Tensor) -> tuple[Tensor, Tensor]:
    """Turns x [T, H] into float8_e4m3fn [T, H] and float32 [T, H / 128 rounded up], whose product
    is about x. A group of 128 elements shares the factor max(largest magnitude, 1e-4) / 448. Bits
    are as in low-latency dispatch."""
    check_tensor("x", x, None, ["T", "H"])
    hidden = x.size(1)
    rows, scales = fp8.to_fp8(functional.pad(x, (0, -hidden % fp8.GROUP)))
    return rows[:, :hidden].contiguous(), scales


def per_token_cast_back(x_fp8: Tensor, x_scales: Tensor) -> Tensor:
    """Returns rows times factors, bf16 [T, H]. Factors: float32 [T, H / 128], or int32 with the
    exponents of four powers of two in each."""
    check_tensor("x_fp8", x_fp8, None, ["T", "H"])
    scales = x_scales
    if x_scales.dtype == torch.int32:
        scales = fp8.from_ue8m0(x_scales)
    hidden = x_fp8.size(1)
    factors = scales.repeat_interleave(fp8.GROUP, dim=1)[:, :hidden]
    return (x_fp8.float() * factors).to(torch.bfloat16)


def inplace_unique(x: Tensor, num_slots: int) -> None:
    """Leaves each number of x [T, K], 0 to num_slots - 1, once in its row, descending, then -1.
    Drops negative numbers."""
    is_there = torch.zeros((x.size(0), num_slots + 1), dtype=torch.bool, device=x.device)
    is_there.scatter_(1, x.masked_fill(x < 0, num_slots).long(), True)
    slots = torch.arange(num_slots, dtype=x.dtype, device=x.device)
    found = torch.where(is_there[:, :num_slots], slots, -1).sort(dim=1, descending=True).values
    num_kept = min(num_slots, x.size(1))
    x.fill_(-1)
    x[:, :num_kept] = found[:, :num_kept]


def create_grouped_scores(scores: Tensor, group_idx: Tensor, num_groups: int) -> Tensor:
    """Zeroes scores [T, E] of experts outside the groups in group_idx [T, any]."""
    is_in_group = torch.zeros(
        (scores.size(0), num_groups), dtype=torch.bool, device=scores.device
    ).scatter_(1, group_idx, True)
    return scores * is_in_group.repeat_interleave(scores.size(1) // num_groups, dim=1)


def hash_tensor(t: Tensor) -> int:
    """Sums the bits as 32-bit words if elements have 32 bits, else as bytes."""
    t = t.contiguous()
    return int(t.view(torch.int32 if t.element_size() == 4 else torch.uint8).sum())


def hash_tensors(*tensors: Any) -> int:
    """Returns all tensors' `hash_tensor`, XORed; unpacks tuples and lists, skips None."""
    value = 0
    for one in _flat(tensors):
        value ^= hash_tensor(one)
    return value


def count_bytes(*tensors: Any) -> int:
    """Counts all bytes; unpacks tuples and lists, skips None."""
    return sum(one.numel() * one.element_size() for one in _flat(tensors))


def _flat(tensors: Any) -> list[Tensor]:
    found = []
    for one in tensors:
        if isinstance(one, tuple | list):
            found += _flat(one)
        elif one is not None:
            found.append(one)
    return found
