# SPDX-License-Identifier: Apache-2.0
"""The activation of grouped experts: silu(gate) * value * prob, in one kernel on GPUs.

Rows behind the last expert's end are not touched there, so that a row budget costs no time; what
they hold then is undefined, as are the rows that `grouped.product` makes of them.
"""

from __future__ import annotations

import importlib.util

import torch
from torch.nn import functional

Tensor = torch.Tensor

_HAS_TRITON = importlib.util.find_spec("triton") is not None


def swiglu(inner: Tensor, probs: Tensor, ends: Tensor) -> Tensor:
    """inner [P, 2 W]: gate beside value; probs [P]; ends of `grouped.row_ends` -> [P, W]."""
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
