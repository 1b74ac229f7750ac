# SPDX-License-Identifier: Apache-2.0
"""What a receiver wants to know of each row beyond its payload, sent along with the row.

A plan keeps its routes on the device and hands none out. So a source packs a few columns (its
top-k choices, the number of the token) with the scaling factors into the one tensor that
`weft.dispatch` moves beside the rows, and the receiver takes them apart again.

Numbers travel one higher than they are: padding rows arrive as zero bytes and so read as -1.
"""

from __future__ import annotations

import torch

from weft import Plan

Tensor = torch.Tensor


def row_major(tensor: Tensor) -> Tensor:
    """[T, cols] with adjacent elements in a row, as a view in bytes needs.

    To torch a single column is contiguous whatever its stride.
    """
    tensor = tensor.detach().contiguous()
    if tensor.stride(-1) == 1:
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)


def pack_columns(*parts: Tensor) -> Tensor:
    """uint8 [T, bytes]: the rows of several [T, cols] tensors of any dtype, side by side."""
    return torch.cat([row_major(part).view(torch.uint8) for part in parts], dim=1)


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
