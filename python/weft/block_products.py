# SPDX-License-Identifier: Apache-2.0
"""Products of rows with their experts' weights whose gradients are sums over blocks of rows: one
fp32 product for each block, added in the order of the blocks. So the bits of a gradient do not tell
whether one place had all rows of an expert, or several places whole blocks of them, one after the
other (`block_rows` of `weft.Balancing`, `Balance.apply` with wgrad="blocks")."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from weft.errors import InvalidArgument

BLOCK_ROWS = 128


class PlacedWeight:
    """A weight [places, in, out] whose gradient is made later, from kept rows and output gradients.
    `Balance.apply` makes it, `block_linear` takes it."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor.detach()
        self.is_wanted = tensor.requires_grad
        self._kept: tuple[Tensor, Tensor, list[int], int] | None = None

    def keep(self, rows: Tensor, grad: Tensor, counts: list[int], block_rows: int) -> None:
        if self._kept is not None:
            raise InvalidArgument('a weight was used twice (once at most with wgrad = "blocks")')
        self._kept = (rows, grad, counts, block_rows)

    def add(self, place: int, total: Tensor) -> None:
        """Adds a place's blocks onto total, fp32 [in, out]."""
        if self._kept is None:
            return  # no rows came by here
        rows, grad, counts, block_rows = self._kept
        for block in _blocks(counts[place], block_rows, sum(counts[:place])):
            total += _product(rows[block], grad[block])

    def clear(self) -> None:
        self._kept = None


def block_linear(
    rows: Tensor,
    weight: Tensor | PlacedWeight,
    counts: Sequence[int],
    block_rows: int = BLOCK_ROWS,
) -> Tensor:
    """Multiplies rows [N, in] by experts' weights [experts, in, out]: [N, out], differentiable.

    counts: the rows of each expert, one after the other, padding included; zeros behind the last.
    Every product is one of at most block_rows rows of one expert. Raises InvalidArgument for counts
    that do not fit.
    """
    tensor = weight.tensor if isinstance(weight, PlacedWeight) else weight
    counts = [int(count) for count in counts]
    if len(counts) != tensor.size(0) or min(counts, default=0) < 0 or sum(counts) > rows.size(0):
        raise InvalidArgument(
            f"counts = {counts} (expected {tensor.size(0)} of at least 0, together at most "
            f"{rows.size(0)} rows)"
        )
    if block_rows < 1:
        raise InvalidArgument(f"block_rows = {block_rows} (expected at least 1)")
    later = weight if isinstance(weight, PlacedWeight) else None
    return _BlockLinear.apply(rows, tensor, counts, block_rows, later)


def _blocks(num_rows: int, block_rows: int, first: int) -> Iterator[slice]:
    for begin in range(0, num_rows, block_rows):
        yield slice(first + begin, first + min(begin + block_rows, num_rows))


def _blocks_of_experts(counts: Sequence[int], block_rows: int) -> Iterator[tuple[int, slice]]:
    first = 0
    for expert, count in enumerate(counts):
        for block in _blocks(count, block_rows, first):
            yield expert, block
        first += count


def _product(rows: Tensor, grad: Tensor) -> Tensor:
    """Returns rows.T @ grad in fp32, of fresh copies, for the bits may depend on how operands are
    aligned."""
    left, right = (one.to(torch.float32, copy=True) for one in (rows, grad))
    return left.T @ right


class _BlockLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows, weight, counts, block_rows, later):  # noqa: ANN001, ANN205
        ctx.save_for_backward(rows, weight)
        ctx.given = (counts, block_rows, later)
        return _products(rows, weight, counts, block_rows)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):  # noqa: ANN001, ANN205
        rows, weight = ctx.saved_tensors
        counts, block_rows, later = ctx.given
        grad_rows = grad_weight = None
        if ctx.needs_input_grad[0]:
            grad_rows = _products(grad, weight.transpose(1, 2), counts, block_rows)
        if later is not None and later.is_wanted:
            later.keep(rows, grad, counts, block_rows)
        if ctx.needs_input_grad[1]:
            sums = torch.zeros(weight.shape, dtype=torch.float32, device=weight.device)
            for expert, block in _blocks_of_experts(counts, block_rows):
                sums[expert] += _product(rows[block], grad[block])
            grad_weight = sums.to(weight.dtype)
        return grad_rows, grad_weight, None, None, None


def _products(rows: Tensor, weight: Tensor, counts: Sequence[int], block_rows: int) -> Tensor:
    out = rows.new_zeros(rows.size(0), weight.size(2))
    for expert, block in _blocks_of_experts(counts, block_rows):
        out[block] = rows[block].clone() @ weight[expert]
    return out
