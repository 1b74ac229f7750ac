# SPDX-License-Identifier: Apache-2.0
"""Grouped SwiGLU experts whose weight gradients may be delayed.

Their activation is one kernel on GPUs, which does not touch rows behind the last expert's end, so
that a row budget costs no time. What those rows hold then is undefined, as are the rows that
`grouped.product` makes of them. The kernels are in swiglu_triton.py.
"""

import importlib.util

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from .grouped import grouped_product, row_ends
from .wgrad import DelayedWgradModule

_HAS_TRITON = importlib.util.find_spec("triton") is not None


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
        inner = grouped_product(rows, self.up, ends, self._queue())
        if self.recompute_activation:
            act = checkpoint(self._activate, inner, probs, ends, use_reentrant=False)
        else:
            act = self._activate(inner, probs, ends)
        return grouped_product(act, self.down, ends, self._queue())

    def _activate(self, inner: Tensor, probs: Tensor, ends: Tensor) -> Tensor:
        """silu(gate) * value * prob. inner [P, 2 W]: gate and value; probs [P] -> [P, W]."""
        if inner.is_cuda and inner.dtype == torch.bfloat16 and _HAS_TRITON:
            return _Swiglu.apply(inner, probs, ends)
        gate, value = inner.chunk(2, dim=-1)
        return functional.silu(gate) * value * probs.unsqueeze(-1).to(inner.dtype)


class _Swiglu(torch.autograd.Function):
    """In fp32, rounded once."""

    @staticmethod
    def forward(ctx, inner, probs, ends):  # noqa: ANN001, ANN205
        from .swiglu_triton import forward

        inner, probs = inner.contiguous(), probs.contiguous()
        ctx.save_for_backward(inner, probs, ends)
        return forward(inner, probs, ends)

    @staticmethod
    def backward(ctx, grad):  # noqa: ANN001, ANN205
        from .swiglu_triton import backward

        grad_inner, grad_probs = backward(grad.contiguous(), *ctx.saved_tensors)
        return grad_inner, grad_probs, None
