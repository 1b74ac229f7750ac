# SPDX-License-Identifier: Apache-2.0
"""A matrix product for the rows of each expert, whose backward lets go of the rows early."""

from __future__ import annotations

import itertools

import torch
from torch.autograd.function import once_differentiable

Tensor = torch.Tensor


def row_ends(counts: Tensor, rows: Tensor) -> Tensor:
    """int64 [El] rows of each expert -> int32 [El], where each one's end, beside `rows`."""
    return counts.to(rows.device, non_blocking=True).cumsum(0).to(torch.int32)


def grouped_product(rows: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    """rows [P, A] by expert, weights [El, A, B], ends of `row_ends` -> [P, B]. Differentiable.

    The last end is P. On a GPU in bf16 it may be less: further rows are not read, and undefined in
    the result.
    """
    return _GroupedProduct.apply(rows, weights, ends)


class _GroupedProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows, weights, ends):  # noqa: ANN001, ANN205
        ctx.save_for_backward(rows, weights, ends)
        return _product(rows, weights, ends)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):  # noqa: ANN001, ANN205
        rows, weights, ends = ctx.saved_tensors
        grad = grad.contiguous()
        grad_weights = _weight_gradient(rows, grad, ends) if ctx.needs_input_grad[1] else None
        # The rows have served, unless the graph is kept: their gradient, which is as large, may
        # have their memory. Here the backward of a layer needs the most.
        ctx.maybe_clear_saved_tensors()
        del rows
        grad_rows = None
        if ctx.needs_input_grad[0]:
            grad_rows = _product(grad, weights.transpose(1, 2), ends)
        return grad_rows, grad_weights, None


def _product(rows: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    if _is_grouped(rows):
        return torch._grouped_mm(rows, weights, offs=ends)
    return torch.cat([part @ weight for part, weight in zip(_parts(rows, ends), weights)])


def _weight_gradient(rows: Tensor, grad: Tensor, ends: Tensor) -> Tensor:
    """[P, A], [P, B] -> [El, A, B]."""
    if _is_grouped(rows):
        return torch._grouped_mm(rows.T, grad, offs=ends)
    parts = zip(_parts(rows, ends), _parts(grad, ends))
    return torch.stack([part.T @ part_grad for part, part_grad in parts])


def _is_grouped(rows: Tensor) -> bool:
    return rows.is_cuda and rows.dtype == torch.bfloat16


def _parts(rows: Tensor, ends: Tensor) -> list[Tensor]:
    return [rows[first:last] for first, last in itertools.pairwise([0, *ends.tolist()])]
