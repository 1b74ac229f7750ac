# SPDX-License-Identifier: Apache-2.0
"""Grouped SwiGLU experts whose weight gradients may be delayed."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

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
        inner = _GroupedProduct.apply(rows, self.up, counts, self._queue())
        if self.recompute_activation:
            act = checkpoint(self._activate, inner, probs, use_reentrant=False)
        else:
            act = self._activate(inner, probs)
        return _GroupedProduct.apply(act, self.down, counts, self._queue())

    def _activate(self, inner: Tensor, probs: Tensor) -> Tensor:
        gate, value = inner.chunk(2, dim=-1)
        return functional.silu(gate) * value * probs.unsqueeze(-1).to(inner.dtype)


class _GroupedProduct(torch.autograd.Function):
    """Each expert's rows times its matrix: [P, A], [El, A, B], counts -> [P, B]."""

    @staticmethod
    def forward(ctx, rows, weights, counts, queue):  # noqa: ANN001, ANN205
        ctx.save_for_backward(rows, weights, counts)
        ctx.queue, ctx.weights = queue, weights
        return _product(rows, weights, counts)

    @staticmethod
    def backward(ctx, grad):  # noqa: ANN001, ANN205
        rows, weights, counts = ctx.saved_tensors
        grad_rows = None
        if ctx.needs_input_grad[0]:
            grad_rows = _product(grad, weights.transpose(1, 2), counts)
        if not ctx.needs_input_grad[1]:
            return grad_rows, None, None, None

        def gradient() -> Tensor:
            return _weight_gradient(rows, grad, counts)

        if ctx.queue is None:
            return grad_rows, gradient(), None, None
        ctx.queue.put(ctx.weights, gradient)
        return grad_rows, None, None, None


def _is_grouped(rows: Tensor) -> bool:
    return rows.is_cuda and rows.dtype == torch.bfloat16


def _ends(rows: Tensor, counts: Tensor) -> Tensor:
    return counts.to(rows.device, non_blocking=True).cumsum(0).to(torch.int32)


def _product(rows: Tensor, weights: Tensor, counts: Tensor) -> Tensor:
    if _is_grouped(rows):
        return torch._grouped_mm(rows.contiguous(), weights, offs=_ends(rows, counts))
    parts = zip(rows.split(counts.tolist()), weights, strict=True)
    return torch.cat([part @ weight for part, weight in parts])


def _weight_gradient(rows: Tensor, grad: Tensor, counts: Tensor) -> Tensor:
    """[P, A], [P, B] -> [El, A, B]."""
    if _is_grouped(rows):
        return torch._grouped_mm(rows.T, grad.contiguous(), offs=_ends(rows, counts))
    sizes = counts.tolist()
    parts = zip(rows.split(sizes), grad.split(sizes), strict=True)
    return torch.stack([part.T @ part_grad for part, part_grad in parts])
