# SPDX-License-Identifier: Apache-2.0
"""Payload of calls: rows as callers give them, and what a receiver wants to know of each row. All
buffers send and bring back rows by this module.

Rows that combine cannot sum travel as bytes. A row's factors travel beside it, together with
whatever else the receiver wants to know of the row.

A plan keeps its routes on the device and hands none out. So a source packs a few columns (its
top-k choices, the number of the token) with the scaling factors into the one tensor that
`weft.dispatch` moves beside the rows, and the receiver takes them apart again. Numbers travel one
higher than they are: padding rows arrive as zero bytes and so read as -1."""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from weft import Combined, Plan
from weft.errors import BadCall

from .checks import FLOATS, Dtypes, check, check_tensor
from .runtime import Call

Rows = Tensor | tuple[Tensor, ...]

_ROW_ALIGNMENT = 16  # bytes
_MATRIX = ("T", "H")
_SCALES = (torch.float32, torch.int32)


class Received(NamedTuple):
    """Result of `Payload.send`. x: a tuple if a tuple was sent."""

    plan: Plan
    x: Rows
    weights: Tensor | None
    beside: tuple[Tensor, ...]
    experts: Tensor | None = None

    @property
    def rows(self) -> Tensor:
        return parts_of(self.x)[0]

    @property
    def scales(self) -> Tensor | None:
        """FP8 scales."""
        return self.x[1] if isinstance(self.x, tuple) else None


class Payload:
    """`x` taken apart. hidden: elements of a token, whatever they are packed in."""

    def __init__(self, x: Rows, scales: Dtypes = _SCALES, name: str = "x") -> None:
        """scales: dtypes allowed for FP8 scales, None for any. name: the caller's for `x`."""
        self._is_tuple = isinstance(x, tuple | list)
        self.tensors = tuple(x) if self._is_tuple else (x,)
        num_parts = len(self.tensors)
        if not 1 <= num_parts <= 3:
            raise BadCall(
                f"{name} has {num_parts} parts (expected a tensor, two of FP8 or three of NVFP4)"
            )
        rows = self.tensors[0]
        is_nvfp4 = num_parts == 3
        check_tensor(name, rows, torch.int32 if is_nvfp4 else None, _MATRIX)
        self.num_tokens, cols = rows.shape
        row_bytes = cols * rows.itemsize
        if row_bytes == 0 or row_bytes % _ROW_ALIGNMENT != 0:
            raise BadCall(
                f"{name} has rows of {row_bytes} bytes (expected multiples of {_ROW_ALIGNMENT})"
            )
        if num_parts == 2 and rows.element_size() != 1:
            raise BadCall(f"{name} with scales has dtype {rows.dtype} (expected one of one byte)")
        if num_parts > 1:
            dtypes = [torch.int32, torch.float32] if is_nvfp4 else [scales]
            for part, dtype in zip(self.tensors[1:], dtypes):
                check_tensor("scales", part, dtype, [self.num_tokens, "any"])
        self.device = rows.device
        self.hidden = 8 * cols if is_nvfp4 else cols

    def send(
        self,
        call: Call,
        routes: Tensor | None = None,
        weights: Tensor | None = None,
        beside: tuple[Tensor, ...] = (),
        num_sms: int = 0,
        routing_map: Tensor | None = None,
        map_indices: Tensor | None = None,
        is_skipped: bool = False,
        **wanted: bool,
    ) -> Received:
        """Collective. Sends the rows, with their factors and the columns of `beside`, by the plan
        of `call` or by routes (or a map, and what it was made of) to plan first. num_sms: of a
        GPU; CPU tensors need none. is_skipped, wanted: more options of
        `Exchange.plan_and_dispatch`.
        """
        rows, *scales = self.tensors
        dtype, plan = rows.dtype, call.plan
        has_other_width = plan is not None and rows.size(1) != plan.exchange.hidden
        if rows.itemsize > 1 and (dtype not in FLOATS or has_other_width):
            rows = row_major(rows).view(torch.uint8)
        columns = [row_major(part) for part in (*scales, *beside)]
        packed = columns[0] if columns else None
        if len(columns) > 1:  # uint8 [T, bytes]: rows of any dtype, side by side
            packed = torch.cat([part.view(torch.uint8) for part in columns], dim=1)
        sent, num_sms = (rows, weights, packed), num_sms if rows.is_cuda else 0
        exchange, told = call.exchange, ()
        if plan is not None:
            out = exchange.dispatch(plan, *sent, num_sms=num_sms)
        else:
            plan, out, *told = exchange.plan_and_dispatch(
                routes,
                *sent,
                routing_map=routing_map,
                map_indices=map_indices,
                num_sms=num_sms,
                is_skipped=is_skipped,
                **call.options,
                **wanted,
            )
        received = [] if out.scales is None else [out.scales]
        if out.scales is None and columns:  # without columns
            received = [columns[0].new_empty((out.rows.size(0), 0))]
        if len(columns) > 1:
            widths = [part.size(1) * part.element_size() for part in columns]
            pieces = out.scales.split(widths, dim=1)
            received = [one.contiguous().view(to.dtype) for one, to in zip(pieces, columns)]
        x = out.rows if out.rows.dtype is dtype else out.rows.view(dtype)
        x = (x, *received[: len(scales)]) if self._is_tuple else x
        return Received(plan, x, out.weights, tuple(received[len(scales) :]), *told)


def parts_of(x: Rows) -> tuple[Tensor, ...]:
    return tuple(x) if isinstance(x, tuple | list) else (x,)


def bring_back(
    call: Call,
    rows: Tensor,
    weights: Tensor | None = None,
    biases: tuple[Tensor, ...] = (),
    is_wide: bool = False,
    num_sms: int = 0,
) -> Combined:
    """Collective. Sums rows into their tokens, with biases added before the one rounding.

    is_wide: sums of a rank are not rounded either. Both have rows travel as fp32.
    """
    check_tensor("rows", rows, None, _MATRIX)
    num_sms = num_sms if rows.is_cuda else 0
    exchange, plan = call.exchange, call.plan
    if not biases and not is_wide:
        return exchange.combine(plan, rows, weights, num_sms=num_sms)
    tokens, sums = exchange.combine(plan, rows.float(), weights, num_sms=num_sms)
    for bias in biases:
        tokens += bias
    return Combined(tokens.to(rows.dtype), sums)


def slot_sums(call: Call, weights: Tensor, num_sms: int = 0) -> Tensor:
    """Collective. Sums weights fp32 [N, K] of a rank_major plan's rows into the tokens: as the
    first columns of rows of zeros, so at the cost of a combine in fp32."""
    plan, hidden = call.plan, call.plan.exchange.hidden
    sums = []
    for columns in weights.split(hidden, dim=1):
        call.by(plan, "combine")
        rows = functional.pad(columns, (0, hidden - columns.size(1)))
        sums.append(bring_back(call, rows, num_sms=num_sms).x[:, : columns.size(1)])
    return torch.cat(sums, dim=1)


def biases_of(bias: Rows | None, *wanted: Any) -> tuple[Tensor, ...]:
    """Returns the biases of a combine: none, one or two; wanted: dtypes and shape of each."""
    biases = parts_of(bias)
    check(len(biases) <= 2, f"{len(biases)} biases (expected a tensor or a tuple of two)")
    biases = tuple(one for one in biases if one is not None)
    for one in biases:
        check_tensor("bias", one, *wanted)
    return biases


def round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def row_major(tensor: Tensor) -> Tensor:
    """Makes a row's elements adjacent, as a view in bytes needs.

    To torch a single column is contiguous whatever its stride.
    """
    tensor = tensor.detach().contiguous()
    if tensor.stride(-1) == 1:
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)


def numbers(values: Tensor) -> Tensor:
    """Returns `values` (-1: none) plus one, int32, to pack."""
    return values.to(torch.int32) + 1


def rows_in_use(plan: Plan) -> Tensor:
    """Returns bool [plan.num_rows, 1]: False in a budget's slack, which is undefined."""
    rows = torch.arange(plan.num_rows, device=plan.exchange.device)
    return (rows < plan.num_rows_used).unsqueeze(1)


def received_numbers(plan: Plan, packed: Tensor) -> Tensor:
    """Unpacks `packed` ([num_rows, cols], made by `numbers`); padding and slack become -1."""
    return torch.where(rows_in_use(plan), packed - 1, -1)


def received_topk(plan: Plan, ids: Tensor) -> Tensor:
    """Turns received rows' global expert ids into this rank's: 0 .. El - 1, or -1.

    ids int [plan.num_rows, K], rows of the sources' topk_idx as they arrived (`numbers` and
    `received_numbers` on the way). Same shape and dtype out; -1 where the choice is another
    rank's, none, or the row is not in use. The place of a choice in its row does not change.
    """
    local = ids - plan.exchange.rank * plan.num_local_experts
    is_here = (local >= 0) & (local < plan.num_local_experts) & rows_in_use(plan)
    return torch.where(is_here, local, -1)


def topk_of_map(routing_map: Tensor, topk: int) -> Tensor:
    """Lists experts set in each row of a bool [T, E] map: int32 [T, topk], ascending, then -1.

    This is the order in which a plan made from the map numbers its routes.
    """
    is_set, experts = routing_map.to(torch.uint8).sort(dim=1, descending=True, stable=True)
    found = torch.where(is_set.bool(), experts, -1).to(torch.int32)[:, :topk]
    return torch.nn.functional.pad(found, (0, topk - found.size(1)), value=-1)
