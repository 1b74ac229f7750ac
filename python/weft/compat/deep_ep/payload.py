# SPDX-License-Identifier: Apache-2.0
"""What travels: rows as callers give them, and what a receiver wants to know of each row. The calls
of all buffers send by it.

Rows that nobody computes with travel as bytes. The factors of a row travel beside it, together
with whatever else the receiver wants to know of the row.

A plan keeps its routes on the device and hands none out. So a source packs a few columns (its
top-k choices, the number of the token) with the scaling factors into the one tensor that
`weft.dispatch` moves beside the rows, and the receiver takes them apart again. Numbers travel one
higher than they are: padding rows arrive as zero bytes and so read as -1."""

from typing import Any

import torch
from torch import Tensor

from weft import Dispatched, Exchange, Plan

from .checks import FLOATS, check

_ROW_ALIGNMENT = 16  # bytes


class Payload:
    """`x` taken apart. hidden: elements of a token, whatever they are packed in."""

    def __init__(self, verb: str, x: Tensor | tuple[Tensor, ...]) -> None:
        self._is_tuple = not isinstance(x, torch.Tensor)
        parts = tuple(x) if self._is_tuple else (x,)
        check(
            1 <= len(parts) <= 3,
            f"{verb}: x has {len(parts)} parts (expected a tensor, two of FP8 or three of NVFP4)",
        )
        rows, self.scales = parts[0], parts[1:]
        _check_rows(verb, rows)
        if len(parts) == 2:
            _check_fp8(verb, rows, self.scales[0])
        elif len(parts) == 3:
            _check_nvfp4(verb, rows, self.scales)
        for scales in self.scales:
            check(
                scales.dim() == 2 and scales.size(0) == rows.size(0),
                f"{verb}: scales have shape {list(scales.shape)} (expected [{rows.size(0)}, any])",
            )
        self.num_tokens = rows.size(0)
        self.device = rows.device
        self.is_gpu = rows.is_cuda
        self.hidden = rows.size(1) * (8 if len(parts) == 3 else 1)
        self._dtype = rows.dtype
        self._rows = rows

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return (self._rows, *self.scales)

    def send(
        self,
        exchange: Exchange,
        by: Plan | Tensor,
        weights: Tensor | None = None,
        beside: tuple[Tensor, ...] = (),
        **options: Any,
    ) -> tuple[Plan, Tensor | tuple[Tensor, ...], Tensor | None, tuple[Tensor, ...]]:
        """Collective. Sends the rows as `send_beside` does, with the columns of `beside`.

        Returns the plan, `x` as received (a tuple if a tuple was given), row weights, and `beside`
        as received.
        """
        is_known = self._rows.element_size() == 1 or self._dtype in FLOATS
        rows = self._rows if is_known else row_major(self._rows).view(torch.uint8)
        columns = (*self.scales, *beside)
        plan, out, columns = send_beside(exchange, by, rows, weights, columns, **options)
        scales, others = columns[: len(self.scales)], columns[len(self.scales) :]
        x = out.rows.view(self._dtype)
        return plan, (x, *scales) if self._is_tuple else x, out.weights, others


def _check_rows(verb: str, rows: Tensor) -> None:
    check(rows.dim() == 2, f"{verb}: x has shape {list(rows.shape)} (expected [T, H])")
    row_bytes = rows.size(1) * rows.element_size()
    check(
        row_bytes > 0 and row_bytes % _ROW_ALIGNMENT == 0,
        f"{verb}: x has rows of {row_bytes} bytes (expected multiples of {_ROW_ALIGNMENT})",
    )


def _check_fp8(verb: str, rows: Tensor, scales: Tensor) -> None:
    check(
        rows.element_size() == 1,
        f"{verb}: x with scales has dtype {rows.dtype} (expected one of one byte)",
    )
    check(
        scales.dtype in (torch.float32, torch.int32),
        f"{verb}: scales have dtype {scales.dtype} (expected torch.float32 or torch.int32)",
    )


def _check_nvfp4(verb: str, rows: Tensor, scales: tuple[Tensor, ...]) -> None:
    dtypes = [part.dtype for part in (rows, *scales)]
    check(
        dtypes == [torch.int32, torch.int32, torch.float32],
        f"{verb}: the three parts of x have dtypes {dtypes} (expected int32, int32, float32)",
    )


def round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def row_major(tensor: Tensor) -> Tensor:
    """[T, cols] with adjacent elements in a row, as a view in bytes needs.

    To torch a single column is contiguous whatever its stride.
    """
    tensor = tensor.detach().contiguous()
    if tensor.stride(-1) == 1:
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)


def send_beside(
    exchange: Exchange,
    by: Plan | Tensor,
    rows: Tensor,
    weights: Tensor | None,
    columns: tuple[Tensor, ...],
    **options: Any,
) -> tuple[Plan, Dispatched, tuple[Tensor, ...]]:
    """Collective. Dispatches rows with `columns` beside them, by a plan or by routes to plan first.

    Returns the plan, what the dispatch returned, and the columns as received.
    """
    packed = None
    if columns:  # uint8 [T, bytes]: rows of any dtype, side by side
        packed = torch.cat([row_major(part).view(torch.uint8) for part in columns], dim=1)
    if isinstance(by, Plan):
        plan, out = by, exchange.dispatch(by, rows, weights, packed, **options)
    else:
        plan, out = exchange.plan_and_dispatch(by, rows, weights, packed, **options)
    return plan, out, unpack_columns(out.scales, *columns) if columns else ()


def unpack_columns(packed: Tensor, *like: Tensor) -> tuple[Tensor, ...]:
    """The parts of `packed` (uint8 [N, bytes]), each with the columns and dtype of its `like`."""
    parts, begin = [], 0
    for one in like:
        end = begin + one.size(1) * one.element_size()
        parts.append(packed[:, begin:end].contiguous().view(one.dtype))
        begin = end
    return tuple(parts)


def numbers(values: Tensor) -> Tensor:
    """int32 [T, cols] to pack: `values` (-1 = none) plus one."""
    return values.to(torch.int32) + 1


def rows_in_use(plan: Plan) -> Tensor:
    """bool [plan.num_rows]: False in the slack of a budget, whose contents are undefined."""
    rows = torch.arange(plan.num_rows, device=plan.exchange.device)
    return rows < plan.num_rows_used


def received_numbers(plan: Plan, packed: Tensor) -> Tensor:
    """int32 like `packed` ([num_rows, cols], made by `numbers`): -1 in padding and slack rows."""
    return torch.where(rows_in_use(plan).unsqueeze(1), packed - 1, -1)


def received_topk(plan: Plan, ids: Tensor) -> Tensor:
    """Global expert ids of every received row as this rank's experts: 0 .. El - 1, or -1.

    ids int [plan.num_rows, K], rows of the sources' topk_idx as they arrived (`numbers` and
    `received_numbers` on the way). Same shape and dtype out; -1 where the choice is another
    rank's, none, or the row is not in use. The place of a choice in its row does not change.
    """
    local = ids - plan.exchange.rank * plan.num_local_experts
    is_here = (local >= 0) & (local < plan.num_local_experts) & rows_in_use(plan).unsqueeze(1)
    return torch.where(is_here, local, -1)


def topk_of_map(routing_map: Tensor, topk: int) -> Tensor:
    """int32 [T, topk]: the experts set in each row of a bool [T, E] map, ascending, then -1.

    This is the order in which a plan made from the map numbers its routes.
    """
    is_set, experts = routing_map.to(torch.uint8).sort(dim=1, descending=True, stable=True)
    found = torch.where(is_set.bool(), experts, -1).to(torch.int32)[:, :topk]
    return torch.nn.functional.pad(found, (0, topk - found.size(1)), value=-1)
