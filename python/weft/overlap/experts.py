# SPDX-License-Identifier: Apache-2.0
"""Grouped SwiGLU experts whose weight gradients may be delayed.

Rows behind the last expert's end are not read. A product makes them zero, but undefined on a GPU in
bf16. The activation is one kernel on GPUs, which skips such rows, so that a row budget costs no
time. The kernels are in swiglu_triton.py.
"""

import functools
import importlib.util
import itertools

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from .wgrad import DelayedWgradModule, WeightGradientQueue, now_or_later

_HAS_TRITON = importlib.util.find_spec("triton") is not None


class DelayedExperts(DelayedWgradModule):
    """El experts. rows [P, H] by expert, counts int64 [El], probs [P] -> [P, H].

    The weights are up [El, H, 2 W] and down [El, W, H].
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
        inner = grouped_product(rows, self.up, ends, self._queue())
        if self.recompute_activation:
            act = checkpoint(self._activate, inner, probs, ends, use_reentrant=False)
        else:
            act = self._activate(inner, probs, ends)
        return grouped_product(act, self.down, ends, self._queue())

    def _activate(self, inner: Tensor, probs: Tensor, ends: Tensor) -> Tensor:
        """Returns silu(gate) * value * prob, [P, W], of inner [P, 2 W] and probs [P]."""
        if inner.is_cuda and inner.dtype == torch.bfloat16 and _HAS_TRITON:
            from .swiglu_triton import Swiglu

            return Swiglu.apply(inner, probs, ends)
        gate, value = inner.chunk(2, dim=-1)
        return functional.silu(gate) * value * probs.unsqueeze(-1).to(inner.dtype)


# Products of each expert's rows with its matrix.


def row_ends(counts: Tensor, rows: Tensor) -> Tensor:
    """Turns counts int64 [El] into ends of experts' rows, int32 [El], on rows' device.

    Sums host counts there: one copy reaches a GPU, and no kernel is launched.
    """
    if counts.is_cuda or not rows.is_cuda:
        return counts.to(rows.device).cumsum(0).to(torch.int32)
    ends = torch.empty(counts.shape, dtype=torch.int32, device="cpu", pin_memory=True)
    ends.copy_(counts.cumsum(0))
    return ends.to(rows.device, non_blocking=True)


def grouped_product(
    rows: Tensor, weights: Tensor, ends: Tensor, queue: WeightGradientQueue | None = None
) -> Tensor:
    """Multiplies rows [P, A] by experts' weights [El, A, B]: [P, B]. Differentiable.

    ends: of `row_ends`. queue: computes the gradient of `weights` later; None: backward does.
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
        # Frees the rows, unless the graph is kept or the queue has them, for their gradient, which
        # is as large. Here the backward of a layer needs the most memory.
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
