# SPDX-License-Identifier: Apache-2.0
"""Gathering rows by index and its adjoint, summing rows by index, in a fixed order.

The only row movement of this package: permute is the first, unpermute the second, and each is the
other's backward. Neither keeps the rows. An index equal to the number of rows names no row.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

Tensor = torch.Tensor


def gather_rows(rows: Tensor, index: Tensor, has_absent: bool = False) -> Tensor:
    """`rows[index]`: [T, H], int64 [P] -> [P, H]; differentiable.

    has_absent: `index` may hold T, which gives a zero row. Without it no index is looked at, so
    that nothing waits for a GPU.
    """
    return _GatherRows.apply(rows, index, has_absent)


def sum_rows(rows: Tensor, index: Tensor, num_rows: int, has_absent: bool = False) -> Tensor:
    """[P, H], int64 [P] -> [num_rows, H]: output row t is the sum of the rows with index t.

    Rows are added in ascending order in fp32 (fp64 for fp64) and rounded once, so that the result
    is the same bit for bit on every run; a row that nothing names is zero. Rows whose index is
    `num_rows` go nowhere. Differentiable.
    """
    return _SumRows.apply(rows, index, num_rows, has_absent)


class _GatherRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows, index, has_absent):  # noqa: ANN001, ANN205
        ctx.save_for_backward(index)
        ctx.num_rows, ctx.has_absent = rows.shape[0], has_absent
        return _gather(rows, index, has_absent)

    @staticmethod
    def backward(ctx, grad):  # noqa: ANN001, ANN205
        (index,) = ctx.saved_tensors
        return sum_rows(grad, index, ctx.num_rows, ctx.has_absent), None, None


class _SumRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows, index, num_rows, has_absent):  # noqa: ANN001, ANN205
        ctx.save_for_backward(index)
        ctx.has_absent = has_absent
        return _sum(rows, index, num_rows)

    @staticmethod
    def backward(ctx, grad):  # noqa: ANN001, ANN205
        (index,) = ctx.saved_tensors
        return gather_rows(grad, index, ctx.has_absent), None, None, None


def _gather(rows: Tensor, index: Tensor, has_absent: bool) -> Tensor:
    if not has_absent:
        return rows.index_select(0, index)
    num_rows = rows.shape[0]
    if num_rows == 0:
        return rows.new_zeros((index.shape[0], *rows.shape[1:]))
    gathered = rows.index_select(0, index.clamp(max=num_rows - 1))
    return gathered.masked_fill_((index >= num_rows).unsqueeze(1), 0)


def _sum(rows: Tensor, index: Tensor, num_rows: int) -> Tensor:
    if num_rows == 0 or rows.shape[0] == 0:
        return rows.new_zeros((num_rows, *rows.shape[1:]))
    order = index.argsort(stable=True)
    # One bag for each output row and a last one, thrown away, for the rows that go nowhere.
    # embedding_bag adds a bag's rows one after the other in fp32, without atomics.
    bags = torch.arange(num_rows + 1, device=index.device)
    begin = torch.searchsorted(index[order], bags)
    # On a CPU it rounds bf16 sums that lie halfway away from zero, not to even as everything else.
    addends = rows.float() if rows.dtype == torch.bfloat16 and not rows.is_cuda else rows
    return F.embedding_bag(order, addends, begin, mode="sum")[:num_rows].to(rows.dtype)
