# SPDX-License-Identifier: Apache-2.0
"""Gradients of what a `Balance` lends: weights come back before a layer's backward, and what
replicas add to a gradient comes to their masters after it."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from weft.block_products import PlacedWeight

if TYPE_CHECKING:
    from weft.balance import Balance

IN_BACKWARD = "the backward of apply"  # as errors name it


class Enter(torch.autograd.Function):
    """Maps rows and masters to rows and all places. Rows pass through, so that on all ranks weight
    gradients are exchanged before whatever the rows' backward exchanges."""

    @staticmethod
    def forward(ctx, balance, held, later, rows, *weights):  # noqa: ANN001, ANN205
        ctx.set_materialize_grads(False)
        ctx.balance, ctx.placement, ctx.later = balance, held.placement, later
        balance._fill(held, "apply")
        lent = balance._views()
        ctx.wanted = ctx.needs_input_grad[4:]
        ctx.kinds = [(one.shape, one.dtype, one.device) for one in lent]
        ctx.mark_non_differentiable(*(one for one, is_in in zip(lent, ctx.wanted) if not is_in))
        return rows.view_as(rows), *lent

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_rows, *grads):  # noqa: ANN001, ANN205
        sums: list[Tensor | None] = [None] * len(grads)
        wanted = [at for at, is_in in enumerate(ctx.wanted) if is_in]
        if ctx.later is not None:
            found = ctx.later.gradients(ctx.balance, ctx.placement, wanted)
        else:
            used = [_or_zeros(grads[at], *ctx.kinds[at]) for at in wanted]
            found = ctx.balance._reduced(ctx.placement, used)
        for at, total in zip(wanted, found):
            sums[at] = total
        return None, None, None, grad_rows, *sums


class Later:
    """Weights of one `apply` whose gradients bypass autograd: without a queue `PlacedWeight` keeps
    what makes the gradients of blocks, else the queue does."""

    def __init__(self, queue: Any) -> None:
        self._queue = queue
        self._given: list[Any] = []
        self._masters: Sequence[Tensor] = ()

    def given(self, lent: Sequence[Tensor], masters: Sequence[Tensor]) -> list[Any]:
        """Returns the experts' weights: `PlacedWeight`, or with a queue leaf tensors."""
        if self._queue is None:
            self._given = [PlacedWeight(one) for one in lent]
        else:
            self._given = [one.detach().requires_grad_(one.requires_grad) for one in lent]
        self._masters = masters
        return self._given

    def gradients(
        self, balance: Balance, placement: Tensor, wanted: list[int]
    ) -> Sequence[Tensor | None]:
        """Returns gradients, or Nones with a queue. Collective, with a queue at its run."""
        if self._queue is None:
            placed = [self._given[at] for at in wanted]
            sums = balance._sums_of_blocks(placement, placed)
            for one in placed:
                one.clear()
            return [total.to(one.tensor.dtype) for total, one in zip(sums, placed)]
        for at in wanted:
            gradient = functools.partial(_taken, balance, placement, self._given[at])
            self._queue.put(self._masters[at], gradient)
        return [None] * len(wanted)


def _taken(balance: Balance, placement: Tensor, lent: Tensor) -> Tensor:
    """Collective. Returns the masters' gradient and drops `lent.grad` of all places."""
    grad = _or_zeros(lent.grad, lent.shape, lent.dtype, lent.device)
    lent.grad = None
    return balance._reduced(placement, [grad])[0]


def _or_zeros(
    grad: Tensor | None, shape: torch.Size, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """Returns grad, or zeros for None: another rank may have one."""
    return torch.zeros(shape, dtype=dtype, device=device) if grad is None else grad


class Leave(torch.autograd.Function):
    """Passes on the experts' results unchanged; the backward first refills the weights."""

    @staticmethod
    def forward(ctx, balance, held, *made):  # noqa: ANN001, ANN205
        ctx.set_materialize_grads(False)
        ctx.balance, ctx.held = balance, held
        return tuple(one.view_as(one) for one in made)

    @staticmethod
    def backward(ctx, *grads):  # noqa: ANN001, ANN205
        ctx.balance._fill(ctx.held, IN_BACKWARD)
        return None, None, *grads
