# SPDX-License-Identifier: Apache-2.0
"""Grouped SwiGLU experts whose weight gradients may be delayed."""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from .grouped import product, row_ends, weight_gradient
from .swiglu import swiglu
from .wgrad import DelayedWgradModule

Tensor = torch.Tensor


class DelayedExperts(DelayedWgradModule):
    """El experts. rows [P, H] by expert, counts int64 [El], probs [P] -> [P, H].

    The weights are those of `weft.examples.layer.Experts`: up [El, H, 2 W], down [El, W, H].
    """

    def __init__(
        self,
        num_local: int,
        hidden: int,
        width: int,
        *,
        delay_wgrad_compute: bool = False,
        recompute_activation: bool = False,
    ) -> None:
        """recompute_activation: the "moe_act" of recompute_modules."""
        super().__init__(delay_wgrad_compute)
        self.recompute_activation = recompute_activation
        self.up = nn.Parameter(torch.randn(num_local, hidden, 2 * width) / hidden**0.5)
        self.down = nn.Parameter(torch.randn(num_local, width, hidden) / width**0.5)
        self.delay(self.up, self.down)

    def forward(self, rows: Tensor, counts: Tensor, probs: Tensor) -> Tensor:
        ends = row_ends(counts, rows)
        inner = _GroupedProduct.apply(rows, self.up, ends, self._queue())
        if self.recompute_activation:
            act = checkpoint(self._activate, inner, probs, ends, use_reentrant=False)
        else:
            act = self._activate(inner, probs, ends)
        return _GroupedProduct.apply(act, self.down, ends, self._queue())

    def _activate(self, inner: Tensor, probs: Tensor, ends: Tensor) -> Tensor:
        return swiglu(inner, probs, ends)


class _GroupedProduct(torch.autograd.Function):
    """Each expert's rows times its matrix: [P, A], [El, A, B], ends of `row_ends` -> [P, B]."""

    @staticmethod
    def forward(ctx, rows, weights, ends, queue):  # noqa: ANN001, ANN205
        ctx.save_for_backward(rows, weights, ends)
        ctx.queue, ctx.weights = queue, weights
        return product(rows, weights, ends)

    @staticmethod
    def backward(ctx, grad):  # noqa: ANN001, ANN205
        rows, weights, ends = ctx.saved_tensors
        grad_rows = None
        if ctx.needs_input_grad[0]:
            grad_rows = product(grad, weights.transpose(1, 2), ends)
        if not ctx.needs_input_grad[1]:
            return grad_rows, None, None, None

        def gradient() -> Tensor:
            return weight_gradient(rows, grad, ends)

        if ctx.queue is None:
            return grad_rows, gradient(), None, None
        ctx.queue.put(ctx.weights, gradient)
        return grad_rows, None, None, None
