# SPDX-License-Identifier: Apache-2.0
"""Rotary embedding, whose pairs are the halves of a head; on GPUs one kernel each way."""

from __future__ import annotations

import importlib.util

import torch

Tensor = torch.Tensor

_HAS_TRITON = importlib.util.find_spec("triton") is not None


def rotate(t: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """t [B, S, heads, D] by the angles of its positions, cos and sin [S, D / 2]."""
    if t.is_cuda and _HAS_TRITON:
        return _Rotate.apply(t, cos, sin)
    cos, sin = (table.to(t.dtype)[:, None] for table in (cos, sin))
    left, right = t.chunk(2, dim=-1)
    return torch.cat((left * cos - right * sin, right * cos + left * sin), dim=-1)


class _Rotate(torch.autograd.Function):
    """In fp32, rounded once. The gradient is turned back."""

    @staticmethod
    def forward(ctx, t, cos, sin):  # noqa: ANN001, ANN205
        from .qwen3_rotary_triton import turn

        ctx.save_for_backward(cos, sin)
        return turn(t.contiguous(), cos, sin, 1)

    @staticmethod
    def backward(ctx, grad):  # noqa: ANN001, ANN205
        from .qwen3_rotary_triton import turn

        return turn(grad.contiguous(), *ctx.saved_tensors, -1), None, None
