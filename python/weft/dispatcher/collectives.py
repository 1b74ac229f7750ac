# SPDX-License-Identifier: Apache-2.0
"""Exchanges of rows over torch.distributed, with gradients.

All of them are one all-to-all with uneven splits, which gloo, NCCL and MPI have: its backward is
itself with the splits swapped. How long a call waits is set with the process group.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .base import rank_in, size_of


def all_to_all(
    rows: Tensor, group: Any, output_splits: Sequence[int], input_splits: Sequence[int]
) -> Tensor:
    """Collective. Rows [sum(input_splits), ...]: input_splits[r] of them go to rank r, in order.

    Returns [sum(output_splits), ...], by source rank. Differentiable.
    """
    if size_of(group) == 1:
        return rows
    return _AllToAll.apply(rows, group, list(output_splits), list(input_splits))


def gather_rows_of(rows: Tensor, group: Any, sizes: Sequence[int]) -> Tensor:
    """Collective. The rows of all ranks, by rank; rank r brings sizes[r]. Differentiable."""
    num_ranks = size_of(group)
    if num_ranks == 1:
        return rows
    copies = rows.repeat(num_ranks, *[1] * (rows.dim() - 1))
    return all_to_all(copies, group, sizes, [rows.shape[0]] * num_ranks)


def reduce_scatter_rows(
    rows: Tensor, group: Any, sizes: Sequence[int], sum_dtype: torch.dtype
) -> Tensor:
    """Collective. The adjoint of `gather_rows_of`: sums over ranks, ascending, in `sum_dtype`.

    rows [sum(sizes), H] -> [sizes[own rank], H] in the dtype of `rows`. Differentiable.
    """
    num_ranks = size_of(group)
    if num_ranks == 1:
        return rows
    own = sizes[rank_in(group)]
    parts = all_to_all(rows, group, [own] * num_ranks, sizes)
    parts = parts.reshape(num_ranks, own, *rows.shape[1:])
    total = parts[0].to(sum_dtype)
    for part in parts[1:]:
        total = total + part.to(sum_dtype)
    return total.to(rows.dtype)


def gather_counts(counts: Tensor, group: Any) -> Tensor:
    """Collective. int64 [E] of each rank -> [R, E], by rank."""
    num_ranks = size_of(group)
    gathered = counts.new_empty((num_ranks * counts.shape[0],))
    if num_ranks == 1:
        gathered.copy_(counts)
    else:
        dist.all_gather_into_tensor(gathered, counts.contiguous(), group=group)
    return gathered.reshape(num_ranks, counts.shape[0])


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows, group, output_splits, input_splits):  # noqa: ANN001, ANN205
        ctx.group, ctx.splits = group, (output_splits, input_splits)
        out = rows.new_empty((sum(output_splits), *rows.shape[1:]))
        dist.all_to_all_single(out, rows.contiguous(), output_splits, input_splits, group=group)
        return out

    @staticmethod
    def backward(ctx, grad):  # noqa: ANN001, ANN205
        output_splits, input_splits = ctx.splits
        return all_to_all(grad, ctx.group, input_splits, output_splits), None, None, None
