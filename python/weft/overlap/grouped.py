# SPDX-License-Identifier: Apache-2.0
"""Products of each expert's rows with its matrix.

The last end may be less than the number of rows: further rows are not read. In the result they are
undefined on a GPU in bf16, elsewhere zero.
"""

import functools
import itertools

import torch
from torch import Tensor

from .wgrad import WeightGradientQueue, now_or_later


def row_ends(counts: Tensor, rows: Tensor) -> Tensor:
    """int64 [El] rows of each expert -> int32 [El], where each one's end, beside `rows`.

    Counts on the host are added up there: one copy reaches a GPU, and no kernel is launched.
    """
    if counts.is_cuda or not rows.is_cuda:
        return counts.to(rows.device).cumsum(0).to(torch.int32)
    ends = torch.empty(counts.shape, dtype=torch.int32, device="cpu", pin_memory=True)
    ends.copy_(counts.cumsum(0))
    return ends.to(rows.device, non_blocking=True)


def grouped_product(
    rows: Tensor, weights: Tensor, ends: Tensor, queue: WeightGradientQueue | None = None
) -> Tensor:
    """rows [P, A] by expert, weights [El, A, B], ends of `row_ends` -> [P, B]. Differentiable.

    queue: what computes the gradient of `weights` later; None: the backward does.
    """
    return _GroupedProduct.apply(rows, weights, ends, queue)


class _GroupedProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows, weights, ends, queue):  # noqa: ANN001, ANN205
        ctx.save_for_backward(rows, weights, ends)
        ctx.queue, ctx.weights = queue, weights
        return product(rows, weights, ends)

    @staticmethod
    def backward(ctx, grad):  # noqa: ANN001, ANN205
        rows, weights, ends = ctx.saved_tensors
        grad_weights = grad_rows = None
        if ctx.needs_input_grad[1]:
            gradient = functools.partial(weight_gradient, rows, grad, ends)
            grad_weights = now_or_later(ctx.queue, ctx.weights, gradient)
            del gradient
        # The rows have served, unless the graph is kept or the queue has them: their gradient,
        # which is as large, may have their memory. Here the backward of a layer needs the most.
        ctx.maybe_clear_saved_tensors()
        del rows
        if ctx.needs_input_grad[0]:
            grad_rows = product(grad, weights.transpose(1, 2), ends)
        return grad_rows, grad_weights, None, None


def product(rows: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    """`grouped_product` without gradients."""
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
