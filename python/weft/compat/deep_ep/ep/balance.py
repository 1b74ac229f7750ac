# SPDX-License-Identifier: Apache-2.0
"""Copies of experts on other ranks of a domain: their weights go out, their gradients come back.
`EPBuffer` in buffer.py inherits the calls; weft/copies.py carries them out."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from weft.copies import (
    Carry,
    add_gradients,
    carry,
    checksum,
    put_weights,
    rows_of,
    sends_of,
    unknown_expert,
)

from ..checks import check, check_tensor
from ..payload import parts_of, round_up
from ..runtime import Call, without_gradients
from ..utils.envs import get_nvlink_gbs, get_sm_read_gbs, get_sm_write_gbs
from ..utils.event import EventOverlap, event_of

MAX_TENSORS = 16  # of a call
_UNIT_BYTES = 16  # multiple of an expert's weights
_GRADIENT_BYTES = 32  # multiple of an expert's gradients


def check_weights(redundant: tuple[Tensor, ...], own: tuple[Tensor, ...], num_slots: int) -> None:
    """Checks that slots and experts have equally many, matching tensors."""
    check(
        len(redundant) == len(own) and 1 <= len(own) <= MAX_TENSORS,
        f"{len(redundant)} redundant_expert_weights and {len(own)} expert_weights (expected as "
        f"many, 1 to {MAX_TENSORS})",
    )
    for slot, expert in zip(redundant, own):
        _check_place("redundant_expert_weights", slot)
        _check_place("expert_weights", expert)
        check(
            slot.size(0) == num_slots and expert.size(0) == own[0].size(0),
            f"redundant_expert_weights and expert_weights of {slot.size(0)} and {expert.size(0)} "
            f"experts (expected {num_slots} and {own[0].size(0)})",
        )
        each, other = (math.prod(one.shape[1:]) * one.element_size() for one in (slot, expert))
        check(
            each == other and each > 0 and each % _UNIT_BYTES == 0,
            f"an expert has {each} bytes in redundant_expert_weights and {other} in expert_weights "
            f"(expected as many, a multiple of {_UNIT_BYTES})",
        )


def _check_place(name: str, tensor: Tensor) -> None:
    check(isinstance(tensor, Tensor), f"{name} has a {type(tensor).__name__} (expected tensors)")
    check(tensor.dim() >= 2, f"{name} has shape {list(tensor.shape)} (expected experts and more)")
    check(tensor.is_contiguous(), f"{name} is not contiguous")


def check_gradients(redundant: tuple[Tensor, ...], own: tuple[Tensor, ...], num_slots: int) -> None:
    check_tensor("expert_grads", own[0], torch.float32, ["experts", "h"])
    width = own[0].size(1)
    check_tensor("redundant_expert_grads", redundant[0], torch.float32, [num_slots, width])
    check(
        width > 0 and 4 * width % _GRADIENT_BYTES == 0,
        f"an expert has {4 * width} bytes in expert_grads (expected a multiple of "
        f"{_GRADIENT_BYTES})",
    )
    _check_place("redundant_expert_grads", redundant[0])
    _check_place("expert_grads", own[0])


def carry_by(
    call: Call,
    num_ranks: int,
    name: str,
    mapping: Tensor,
    num_sms: int,
    of: Any = None,
    domain: range | None = None,
) -> Carry:
    """Returns a `Carry` by exchanges of `call`. Ranks with different mappings, or another `of`,
    raise. domain: the mapping's ranks, if not all."""
    most = mapping.numel()  # blocks that any rank sends
    slots = mapping.tolist()
    said = (name, slots if domain is None else list(mapping.shape), of)

    def carried(blocks: Tensor, to: list[int], sources: list[int]) -> Tensor:
        row, each = rows_of(blocks.size(1))
        key, sms = (row, num_ranks, blocks.device), num_sms if blocks.is_cuda else 0

        def carry_on(blocks: Tensor, to: Sequence[int], num_received: int) -> Tensor:
            return carry(call.exchange, blocks, to, num_received, said, num_sms=sms)

        def plans(num_rows: int) -> None:
            size = max(most * each, len(domain or ()), 1)
            call.plans(key, size, 1, layout="rank_major", row_budget=num_rows)

        if domain is not None:  # a number is compared with other domains', too
            plans(len(domain))
            shape, device = (len(domain), row // 4), blocks.device
            mine = torch.full(shape, checksum(slots), dtype=torch.int32, device=device)
            mine = mine.view(torch.uint8)
            theirs = carry_on(mine, domain, len(domain))
        plans(len(sources) * each)
        if domain is not None:
            others = [domain[at] for at in (theirs != mine).any(1).nonzero().flatten().tolist()]
            check(not others, f"the mapping differs from that of ranks {others} (must be equal)")
        return carry_on(blocks, to, len(sources))

    return carried


class ExpertCopies:
    """Calls of a buffer with `runtime.copies`, `pool`, ranks and a communication stream."""

    def lb_get_theoretical_num_sms(self) -> int:
        """Returns SMs whose copies fill NVLink."""
        slowest = min(get_sm_read_gbs(), get_sm_write_gbs())
        return round_up(math.ceil(get_nvlink_gbs() / slowest), 2)

    @without_gradients
    def lb_prefetch_weights(
        self,
        redundant_expert_weights: Tensor | Sequence[Tensor],
        expert_weights: Tensor | Sequence[Tensor],
        redundancy_mapping: Tensor,
        num_sms: int = 0,
        previous_event: Any = None,
    ) -> EventOverlap:
        """Collective. Copies experts' weights bit by bit into slots of the domain's other ranks.

        redundant_expert_weights [slots, ...] and expert_weights [El, ...] of any dtype, or up to 16
        of each, contiguous; an expert has as many bytes in both, a multiple of 16.
        redundancy_mapping int32 [ranks of the domain, slots], the same on all of them: the expert
        that a slot is for, counted in the domain, or -1: it is left as it is. Read on the host.
        num_sms: 0 by Weft's table. Returns an event; the current stream does not wait.
        """
        pairs = (parts_of(redundant_expert_weights), parts_of(expert_weights))
        steps = (check_weights, put_weights)
        options = (redundancy_mapping, num_sms, previous_event)
        return self._balance("lb_prefetch_weights", *steps, *pairs, *options)

    @without_gradients
    def lb_reduce_grads(
        self,
        redundant_expert_grads: Tensor,
        expert_grads: Tensor,
        redundancy_mapping: Tensor,
        num_sms: int = 0,
        previous_event: Any = None,
    ) -> EventOverlap:
        """Collective. Adds gradients in slots of the domain's ranks to their experts' gradients:
        the expert's own, then by ascending rank, then by slot.

        redundant_expert_grads fp32 [slots, h], left as they are; expert_grads fp32 [El, h],
        contiguous, a multiple of 32 bytes per expert. The rest as for `lb_prefetch_weights`.
        """
        pair = ((redundant_expert_grads,), (expert_grads,))
        steps = (check_gradients, add_gradients)
        options = (redundancy_mapping, num_sms, previous_event)
        return self._balance("lb_reduce_grads", *steps, *pair, *options)

    def _balance(
        self,
        name: str,
        check_tensors: Callable[..., None],
        move: Callable[..., None],
        redundant: tuple[Tensor, ...],
        own: tuple[Tensor, ...],
        mapping: Tensor,
        num_sms: int,
        previous_event: Any,
    ) -> EventOverlap:
        """Collective."""
        self.pool()
        with Call(name, self.runtime.copies, layout="rank_major", row_budget=0) as call:
            check_tensor("redundancy_mapping", mapping, torch.int32, [self.num_nvlink_ranks, "any"])
            check_tensors(redundant, own, mapping.size(1))
            check(num_sms >= 0, f"num_sms = {num_sms} (expected at least 0)")
            inputs, device = (*redundant, *own, mapping), own[0].device
            with self._comm.call(device, inputs, previous_event, True) as work:
                problem = unknown_expert(mapping, own[0].size(0))
                check(problem is None, f"redundancy_mapping{problem}")
                sends = sends_of(mapping, own[0].size(0), self.rank_idx)
                size = self.num_nvlink_ranks
                first = self.rank_idx - self.rank_idx % size
                domain = None if size == self.num_ranks else range(first, first + size)
                how = (name, mapping, round_up(num_sms, 2))
                carried = carry_by(call, self.num_ranks, *how, domain=domain)
                move(redundant, own, sends, carried)
        return event_of(work)
