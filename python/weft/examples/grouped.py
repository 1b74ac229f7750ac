# SPDX-License-Identifier: Apache-2.0
"""A matrix product for the rows of each expert, whose backward lets go of the rows early."""

from __future__ import annotations

import torch
from torch.autograd.function import once_differentiable

from weft.overlap.grouped import product, weight_gradient

Tensor = torch.Tensor


def grouped_product(rows: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    """rows [P, A] by expert, weights [El, A, B], ends of `row_ends` -> [P, B]. Differentiable.

    The last end may be less than P: see `weft.overlap.grouped`.
    """
    return _GroupedProduct.apply(rows, weights, ends)


class _GroupedProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows, weights, ends):  # noqa: ANN001, ANN205
        ctx.save_for_backward(rows, weights, ends)
        return product(rows, weights, ends)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):  # noqa: ANN001, ANN205
        rows, weights, ends = ctx.saved_tensors
        grad_weights = weight_gradient(rows, grad, ends) if ctx.needs_input_grad[1] else None
        # The rows have served, unless the graph is kept: their gradient, which is as large, may
        # have their memory. Here the backward of a layer needs the most.
        ctx.maybe_clear_saved_tensors()
        del rows
        grad_rows = None
        if ctx.needs_input_grad[0]:
            grad_rows = product(grad, weights.transpose(1, 2), ends)
        return grad_rows, grad_weights, None
