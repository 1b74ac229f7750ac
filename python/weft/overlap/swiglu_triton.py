# SPDX-License-Identifier: Apache-2.0
"""The kernels of experts.py: a program takes some rows, or nothing behind the last end."""

import torch
import triton
import triton.language as tl
from torch import Tensor

_ROWS = 8  # of a program


def forward(inner: Tensor, probs: Tensor, ends: Tensor) -> Tensor:
    """[P, 2 W] bf16, [P], [El] -> [P, W]."""
    rows, width = inner.shape[0], inner.shape[1] // 2
    out = inner.new_empty(rows, width)
    if rows:
        _forward[_grid(rows)](
            inner, probs, ends, out, ends.numel(), rows, width, _ROWS, triton.next_power_of_2(width)
        )
    return out


def backward(grad: Tensor, inner: Tensor, probs: Tensor, ends: Tensor) -> tuple[Tensor, Tensor]:
    """[P, W], then what `forward` took -> gradients of inner and probs, the latter zero behind."""
    rows, width = grad.shape
    grad_inner, grad_probs = torch.empty_like(inner), torch.zeros_like(probs)
    if rows:
        block = triton.next_power_of_2(width)
        given = (grad, inner, probs, ends, grad_inner, grad_probs)
        _backward[_grid(rows)](*given, ends.numel(), rows, width, _ROWS, block)
    return grad_inner, grad_probs


def _grid(rows: int) -> tuple[int]:
    return (triton.cdiv(rows, _ROWS),)


@triton.jit
def _span(ends, num_ends, num_rows, ROWS: tl.constexpr):
    """First row of this program, and the end of those that are in use."""
    first = tl.program_id(0) * ROWS
    last = tl.minimum(tl.minimum(first + ROWS, num_rows), tl.load(ends + num_ends - 1))
    return first.to(tl.int64), last


@triton.jit
def _load(inner, probs, row, width, cols, inside, is_row):
    """gate, value and prob of a row, in fp32."""
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
