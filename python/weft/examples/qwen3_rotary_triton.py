# SPDX-License-Identifier: Apache-2.0
"""The kernel of `rotate` in qwen3_model.py: a program turns some heads of some tokens."""

import torch
import triton
import triton.language as tl
from torch import Tensor

_ROWS = 16  # of a program


class Rotate(torch.autograd.Function):
    """t [B, S, heads, D], cos and sin fp32 [S, D / 2] -> [B, S, heads, D]. In fp32, rounded once.
    The gradient is turned back."""

    @staticmethod
    def forward(ctx, t, cos, sin):  # noqa: ANN001, ANN205
        ctx.save_for_backward(cos, sin)
        return _turned(t.contiguous(), cos, sin, 1)

    @staticmethod
    def backward(ctx, grad):  # noqa: ANN001, ANN205
        return _turned(grad.contiguous(), *ctx.saved_tensors, -1), None, None


def _turned(t: Tensor, cos: Tensor, sin: Tensor, sign: int) -> Tensor:
    length, heads, dim = t.shape[1:]
    out = torch.empty_like(t)
    rows = t.numel() // dim
    grid = (triton.cdiv(rows, _ROWS),)
    block = triton.next_power_of_2(dim // 2)
    _turn[grid](t, cos, sin, out, rows, length, heads, dim // 2, sign, _ROWS, block)
    return out


@triton.jit
def _turn(
    t,
    cos,
    sin,
    out,
    num_rows,
    length,
    heads,
    half,
    sign,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    col = tl.arange(0, BLOCK)[None, :]
    inside = (row < num_rows) & (col < half)
    at = row.to(tl.int64) * 2 * half + col
    angle = row // heads % length * half + col
    turned = tl.load(cos + angle, inside, 0.0)
    across = tl.load(sin + angle, inside, 0.0) * sign
    left = tl.load(t + at, inside, 0.0).to(tl.float32)
    right = tl.load(t + at + half, inside, 0.0).to(tl.float32)
    tl.store(out + at, left * turned - right * across, inside)
    tl.store(out + at + half, right * turned + left * across, inside)
