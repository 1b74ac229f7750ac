# SPDX-License-Identifier: Apache-2.0
"""The kernels of experts.py: a program takes some rows, or nothing behind the last end."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

_ROWS = 8  # of a program


class Swiglu(torch.autograd.Function):
    """inner [P, 2 W] bf16, probs [P], ends [El] -> [P, W]. In fp32, rounded once; the gradient of
    probs is zero behind the last end."""

    @staticmethod
    def forward(ctx, inner, probs, ends):  # noqa: ANN001, ANN205
        inner, probs = inner.contiguous(), probs.contiguous()
        ctx.save_for_backward(inner, probs, ends)
        rows, width = inner.shape[0], inner.shape[1] // 2
        out = inner.new_empty(rows, width)
        _launch(_forward, rows, width, ends, inner, probs, ends, out)
        return out

    @staticmethod
    def backward(ctx, grad):  # noqa: ANN001, ANN205
        inner, probs, ends = ctx.saved_tensors
        rows, width = grad.shape
        grad_inner, grad_probs = torch.empty_like(inner), torch.zeros_like(probs)
        given = (grad.contiguous(), inner, probs, ends, grad_inner, grad_probs)
        _launch(_backward, rows, width, ends, *given)
        return grad_inner, grad_probs, None


def _launch(kernel: Any, rows: int, width: int, ends: Tensor, *given: Tensor) -> None:
    if rows:
        block = triton.next_power_of_2(width)
        kernel[(triton.cdiv(rows, _ROWS),)](*given, ends.numel(), rows, width, _ROWS, block)


@triton.jit
def _span(ends, num_ends, num_rows, ROWS: tl.constexpr):
    """Returns this program's first row, and the end of its used rows."""
    first = tl.program_id(0) * ROWS
    last = tl.minimum(tl.minimum(first + ROWS, num_rows), tl.load(ends + num_ends - 1))
    return first.to(tl.int64), last


@triton.jit
def _load(inner, probs, row, width, cols, inside, is_row):
    """Loads gate, value, prob of rows as fp32."""
    at = inner + row * 2 * width + cols
    gate = tl.load(at, inside, 0.0).to(tl.float32)
    value = tl.load(at + width, inside, 0.0).to(tl.float32)
    prob = tl.load(probs + row, is_row, 0.0).to(tl.float32)
    return gate, value, prob


@triton.jit
def _forward(
    inner,
    probs,
    ends,
    out,
    num_ends,
    num_rows,
    width,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    first, last = _span(ends, num_ends, num_rows, ROWS)
    cols = tl.arange(0, BLOCK)
    for i in tl.static_range(ROWS):
        row = first + i
        inside = (cols < width) & (row < last)
        gate, value, prob = _load(inner, probs, row, width, cols, inside, row < last)
        tl.store(out + row * width + cols, gate * tl.sigmoid(gate) * value * prob, inside)


@triton.jit
def _backward(
    grad,
    inner,
    probs,
    ends,
    grad_inner,
    grad_probs,
    num_ends,
    num_rows,
    width,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    first, last = _span(ends, num_ends, num_rows, ROWS)
    cols = tl.arange(0, BLOCK)
    for i in tl.static_range(ROWS):
        row = first + i
        inside = (cols < width) & (row < last)
        over = tl.load(grad + row * width + cols, inside, 0.0).to(tl.float32)
        gate, value, prob = _load(inner, probs, row, width, cols, inside, row < last)
        sigmoid = tl.sigmoid(gate)
        silu = gate * sigmoid
        slope = sigmoid * (1 + gate * (1 - sigmoid))
        to = grad_inner + row * 2 * width + cols
        tl.store(to, over * prob * value * slope, inside)
        tl.store(to + width, over * prob * silu, inside)
        tl.store(grad_probs + row, tl.sum(over * silu * value, axis=0), row < last)
