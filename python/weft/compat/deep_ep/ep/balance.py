# SPDX-License-Identifier: Apache-2.0
"""Copies of experts on other ranks of a domain: their weights go out, their gradients come back.
`EPBuffer` in buffer.py inherits the calls.

What a slot holds travels as rows of bytes, by an exchange with one expert on each rank. The mapping
is read on the host, so both sides know how many rows there are, and which."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from ..checks import check, check_tensor
from ..payload import parts_of, round_up
from ..runtime import Call, without_gradients
from ..utils.envs import get_nvlink_gbs, get_sm_read_gbs, get_sm_write_gbs
from ..utils.event import EventOverlap, event_of

MAX_TENSORS = 16  # of a call
_ROW_BYTES = 8192  # of what travels at once; a guess
_UNIT_BYTES = 16  # that a row is a multiple of
_GRADIENT_BYTES = 32  # that one of an expert is a multiple of


class Copy(NamedTuple):
    """Slot `slot` of rank `at` has expert `expert` of rank `owner`; ranks as the group counts."""

    at: int
    slot: int
    owner: int
    expert: int


def copies_of(mapping: Tensor, num_local: int, rank: int) -> list[Copy]:
    """Of the domain of `rank`, whose ranks are adjacent, by rank and slot. mapping int32 [ranks of
    the domain, slots]: rank of the domain * num_local + expert, or -1. Waits for a GPU."""
    num_ranks, _ = mapping.shape
    first = rank - rank % num_ranks
    found = []
    for at, slots in enumerate(mapping.tolist()):
        for slot, expert in enumerate(slots):
            check(
                -1 <= expert < num_ranks * num_local,
                f"redundancy_mapping[{at}, {slot}] = {expert} (expected -1 to "
                f"{num_ranks * num_local - 1}: {num_ranks} ranks of {num_local} experts)",
            )
            if expert >= 0:
                owner, local = divmod(expert, num_local)
                found.append(Copy(first + at, slot, first + owner, local))
    return found


class Sends(NamedTuple):
    """Copies that this rank's experts have, and copies that it has of others'; by rank and slot.
    most: of either, on any rank."""

    from_here: list[Copy]
    to_here: list[Copy]
    most: int
    num_ranks: int  # of the group
    num_sms: int


def sends_of(mapping: Tensor, num_local: int, rank: int, num_ranks: int, num_sms: int) -> Sends:
    """See `copies_of`."""
    copies = copies_of(mapping, num_local, rank)
    from_here = [one for one in copies if one.owner == rank]
    to_here = [one for one in copies if one.at == rank]
    return Sends(from_here, to_here, mapping.numel(), num_ranks, num_sms)


def check_weights(redundant: tuple[Tensor, ...], own: tuple[Tensor, ...], num_slots: int) -> None:
    """Of slots and of experts: as many tensors, which belong together."""
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


def bytes_of(tensor: Tensor) -> Tensor:
    """uint8 [experts, bytes] of the same memory."""
    return tensor.detach().flatten(1).view(torch.uint8)


def send(
    call: Call, num_ranks: int, blocks: Tensor, to: list[int], sizes: tuple[int, int], num_sms: int
) -> Tensor:
    """Collective. blocks uint8 [n, bytes], block i to rank to[i] -> uint8 [m, bytes], those for
    this rank, by the source's rank, then its order. sizes: m, and the most that n is on any rank,
    alike on all of them."""
    num_received, most = sizes
    width, device = blocks.size(1), blocks.device
    row = min(_ROW_BYTES, round_up(width, _UNIT_BYTES))
    each = -(-width // row)  # rows of a block
    rows = functional.pad(blocks, (0, each * row - width)).view(-1, row)
    routes = torch.tensor(to, dtype=torch.int32).repeat_interleave(each).view(-1, 1).to(device)
    budget = num_received * each
    key = (row, num_ranks, device)
    call.plans(key, max(most * each, 1), 1, layout="rank_major", row_budget=budget)
    num_sms = num_sms if rows.is_cuda else 0
    _, out = call.exchange.plan_and_dispatch(routes, rows, num_sms=num_sms, **call.options)
    return out.rows.view(num_received, each * row)[:, :width]


def put_weights(
    redundant: tuple[Tensor, ...], own: tuple[Tensor, ...], call: Call, sends: Sends
) -> None:
    """Collective. Each owner's bytes into the slots of others that have its experts."""
    device = own[0].device
    mine = torch.tensor([one.expert for one in sends.from_here], dtype=torch.int64, device=device)
    blocks = torch.cat([bytes_of(one).index_select(0, mine) for one in own], dim=1)
    to = [one.at for one in sends.from_here]
    came = send(call, sends.num_ranks, blocks, to, (len(sends.to_here), sends.most), sends.num_sms)
    order = sorted(sends.to_here, key=lambda one: (one.owner, one.slot))
    into = torch.tensor([one.slot for one in order], dtype=torch.int64, device=device)
    widths = [bytes_of(one).size(1) for one in redundant]
    for slot, part in zip(redundant, came.split(widths, dim=1)):
        bytes_of(slot).index_copy_(0, into, part)


def add_gradients(
    redundant: tuple[Tensor, ...], own: tuple[Tensor, ...], call: Call, sends: Sends
) -> None:
    """Collective. Gradients in the slots of others onto each owner's: by ascending rank, then slot,
    one after another."""
    device, sums = own[0].device, own[0].detach()
    slots = [one.slot for one in sends.to_here]
    here = torch.tensor(slots, dtype=torch.int64, device=device)
    blocks = bytes_of(redundant[0]).index_select(0, here)
    to = [one.owner for one in sends.to_here]
    sizes = (len(sends.from_here), sends.most)
    came = send(call, sends.num_ranks, blocks, to, sizes, sends.num_sms)
    came = came.contiguous().view(torch.float32)
    waves: list[tuple[list[int], list[int]]] = []  # rows and experts; an expert once in each
    seen: dict[int, int] = {}
    for row, one in enumerate(sends.from_here):
        wave = seen[one.expert] = seen.get(one.expert, -1) + 1
        if wave == len(waves):
            waves.append(([], []))
        waves[wave][0].append(row)
        waves[wave][1].append(one.expert)
    for rows, experts in waves:
        row, expert = (torch.tensor(one, device=device) for one in (rows, experts))
        sums.index_copy_(0, expert, sums.index_select(0, expert) + came.index_select(0, row))


class ExpertCopies:
    """The calls, for a buffer with `runtime.copies`, `pool`, ranks and a communication stream."""

    def lb_get_theoretical_num_sms(self) -> int:
        """SMs that fill NVLink with copies of experts."""
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
        """Collective. Weights of experts into slots of other ranks of the domain, bit by bit.

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
        """Collective. Gradients in slots of the domain's ranks are added to those of the experts
        that the slots are for: what is there, then by ascending rank, then by slot.

        redundant_expert_grads fp32 [slots, h], left as they are; expert_grads fp32 [El, h],
        contiguous, of a multiple of 32 bytes for an expert. The rest as for `lb_prefetch_weights`.
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
                where = (own[0].size(0), self.rank_idx, self.num_ranks, round_up(num_sms, 2))
                move(redundant, own, call, sends_of(mapping, *where))
        return event_of(work)
