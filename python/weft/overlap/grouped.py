# SPDX-License-Identifier: Apache-2.0
"""Products of each expert's rows with its matrix, without gradients.

The last end may be less than the number of rows: further rows are not read. In the result they are
undefined on a GPU in bf16, elsewhere zero.
"""

from __future__ import annotations

import itertools

import torch

Tensor = torch.Tensor


def row_ends(counts: Tensor, rows: Tensor) -> Tensor:
    """int64 [El] rows of each expert -> int32 [El], where each one's end, beside `rows`.

    Counts on the host are added up there: one copy reaches a GPU, and no kernel is launched.
    """
    if counts.is_cuda or not rows.is_cuda:
        return counts.to(rows.device).cumsum(0).to(torch.int32)
    ends = torch.empty(counts.shape, dtype=torch.int32, device="cpu", pin_memory=True)
    ends.copy_(counts.cumsum(0))
    return ends.to(rows.device, non_blocking=True)


def product(rows: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    """rows [P, A] by expert, weights [El, A, B], ends of `row_ends` -> [P, B]."""
    if _is_grouped(rows):
        return torch._grouped_mm(rows.contiguous(), weights, offs=ends)
    parts = [part @ weight for part, weight in zip(_parts(rows, ends), weights)]
    rest = rows.shape[0] - sum(part.shape[0] for part in parts)
    return torch.cat([*parts, rows.new_zeros(rest, weights.shape[2])])


def weight_gradient(rows: Tensor, grad: Tensor, ends: Tensor) -> Tensor:
    """[P, A], [P, B] -> [El, A, B]."""
    grad = grad.contiguous()
    if _is_grouped(rows):
        return torch._grouped_mm(rows.T, grad, offs=ends)
    parts = zip(_parts(rows, ends), _parts(grad, ends))
    return torch.stack([part.T @ part_grad for part, part_grad in parts])


def _is_grouped(rows: Tensor) -> bool:
    return rows.is_cuda and rows.dtype == torch.bfloat16


def _parts(rows: Tensor, ends: Tensor) -> list[Tensor]:
    return [rows[first:last] for first, last in itertools.pairwise([0, *ends.tolist()])]
