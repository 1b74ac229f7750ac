# SPDX-License-Identifier: Apache-2.0
"""Copies of experts on other ranks: weights go from an expert's rank to its copies, gradients come
back and are added up. balance.py does that for layers, compat/deep_ep/ep/balance.py for callers of
DeepEP.

What a copy holds travels as rows of bytes, by an exchange with one expert on each rank. The host
knows which copies there are, so both sides know how many rows there are, and which, if they were
told the same: so ranks compare what they were told (`checksum`)."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from weft.errors import InvalidArgument
from weft.exchange import Exchange
from weft.outputs import Plan

_ROW_BYTES = 8192  # most bytes of a row; a guess
_UNIT_BYTES = 16  # a row is a multiple of this

# (blocks uint8 [n, bytes], the target rank of each, the source ranks of the m that come here,
# ascending) -> uint8 [m, bytes], by source rank, then its order. Collective.
Carry = Callable[[Tensor, list[int], list[int]], Tensor]


class Copy(NamedTuple):
    """Slot `slot` of rank `at` has expert `expert` of rank `owner`; ranks as the group counts."""

    at: int
    slot: int
    owner: int
    expert: int

    @property
    def expert_of_all(self) -> tuple[int, int]:
        return self.owner, self.expert


class Hop(NamedTuple):
    """A copy on its way. Rank `sender` is the owner, or has the expert in its slot `held`."""

    copy: Copy
    sender: int
    held: int = -1  # -1: owner


def unknown_expert(placement: Tensor, num_local: int) -> str | None:
    """Returns what is wrong with an entry of a placement, as `sends_of` takes it, None if nothing
    is. Waits for a GPU."""
    num_ranks, _ = placement.shape
    last = num_ranks * num_local - 1
    for at, slots in enumerate(placement.tolist()):
        for slot, expert in enumerate(slots):
            if not -1 <= expert <= last:
                experts = f"{num_ranks} ranks of {num_local} experts"
                return f"[{at}, {slot}] = {expert} (expected -1 to {last}: {experts})"
    return None


class Sends(NamedTuple):
    """Copies of this rank's experts, and this rank's copies of others'; by rank and slot."""

    from_here: list[Copy]
    to_here: list[Copy]


def sends_of(placement: Tensor, num_local: int, rank: int) -> Sends:
    """Returns the copies from and to `rank` in its domain, of adjacent ranks. placement int32
    [ranks of the domain, slots]: rank of the domain * num_local + expert, or -1. Waits for a
    GPU."""
    num_ranks, _ = placement.shape
    copies = copies_of(placement, num_local, rank - rank % num_ranks)
    from_here = [one for one in copies if one.owner == rank]
    to_here = [one for one in copies if one.at == rank]
    return Sends(from_here, to_here)


def copies_of(placement: Tensor, num_local: int, first: int = 0) -> list[Copy]:
    """Returns copies by rank and slot. placement: as for `sends_of`. first: the domain's rank 0.
    Waits for a GPU."""
    return [
        Copy(first + at, slot, first + expert // num_local, expert % num_local)
        for at, slots in enumerate(placement.tolist())
        for slot, expert in enumerate(slots)
        if expert >= 0
    ]


def rows_of(width: int) -> tuple[int, int]:
    """Splits a block of `width` bytes: returns the bytes of a row, and the number of rows."""
    row = min(_ROW_BYTES, -(-width // _UNIT_BYTES) * _UNIT_BYTES)
    return row, -(-width // row)


def checksum(*said: Any) -> int:
    """Hashes `said` to a number of at most 28 bits, which an exchange compares between ranks at a
    call."""
    digest = hashlib.blake2b(repr(said).encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little") >> 4


def carry(
    exchange: Exchange,
    blocks: Tensor,
    to: Sequence[int],
    num_received: int,
    said: Sequence[Any],
    **options: Any,
) -> Tensor:
    """Carries blocks by an exchange with one expert per rank (`Carry`). said: the call's name, its
    placement, and what else must be equal on all ranks, which raise InvalidArgument otherwise.
    options: of `plan_and_dispatch`."""
    return _carried(exchange, blocks, to, num_received, said, **options)[0]


def _carried(
    exchange: Exchange,
    blocks: Tensor,
    to: Sequence[int],
    num_received: int,
    said: Sequence[Any],
    **options: Any,
) -> tuple[Tensor, Plan]:
    """Returns the blocks and the plan."""
    width, device = blocks.size(1), blocks.device
    options["number"] = checksum(*said, width)
    row, each = rows_of(width)
    if each * row > width:
        blocks = functional.pad(blocks, (0, each * row - width))
    rows = blocks.view(-1, row)
    targets = torch.tensor(to, dtype=torch.int32, device="cpu")
    routes = targets.repeat_interleave(each).view(-1, 1).to(device)
    budget = num_received * each
    try:
        plan, out = exchange.plan_and_dispatch(
            routes, rows, layout="rank_major", row_budget=budget, **options
        )
    except InvalidArgument as error:
        if "number of this call" not in str(error):
            raise
        raise InvalidArgument(
            f"{said[0]}: ranks differ in the call, its placement, what it moves or what "
            f"was there already: {error}",
            rank=exchange.rank,
        ) from error
    return out.rows.view(num_received, each * row)[:, :width], plan


TAG_BYTES = 16  # before a block, where its rank may be lost


def carry_from_those_left(
    exchange: Exchange,
    blocks: Tensor,
    to: Sequence[int],
    sources: Sequence[int],
    said: Sequence[Any],
    **options: Any,
) -> Tensor:
    """Carries blocks by an exchange that goes on without lost ranks. sources: the rank of each
    block that comes here, ascending; zeros for a lost rank's. Waits for a GPU."""
    # Rows of a rank lost before the plan are absent, of one lost later zeros: so blocks are tagged
    # with their rank.
    device = blocks.device
    tag = torch.zeros(blocks.size(0), TAG_BYTES, dtype=torch.uint8, device=device)
    tag.view(torch.int32)[:, 0] = exchange.rank + 1
    tagged = torch.cat([tag, blocks], dim=1)
    came, plan = _carried(exchange, tagged, to, len(sources), said, **options)
    if device.type == "cuda":  # a call that was cut short has no plan
        torch.cuda.current_stream(device).synchronize()
        exchange.check()
    came = came[: sum(plan.core.rows_per_expert) // rows_of(tagged.size(1))[1]]
    source = came[:, :TAG_BYTES].contiguous().view(torch.int32)[:, 0] - 1
    has_come = torch.isin(torch.tensor(sources, dtype=torch.int32, device=device), source)
    out = torch.zeros(len(sources), blocks.size(1), dtype=torch.uint8, device=device)
    out[has_come] = came[source >= 0, TAG_BYTES:]
    return out


def bytes_of(tensor: Tensor) -> Tensor:
    """Views a contiguous tensor [experts, ...] as uint8 [experts, bytes]."""
    rows = tensor.detach()
    return (rows.flatten(1) if rows.dim() > 1 else rows[:, None]).view(torch.uint8)


def _numbers(numbers: Sequence[int], device: torch.device) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int64, device=device)


def _picked(tensors: Sequence[Tensor], rows: Sequence[int]) -> Tensor:
    """Returns `rows` of all tensors side by side: uint8 [rows, bytes]."""
    device = tensors[0].device
    index = _numbers(rows, device)
    parts = [bytes_of(one).index_select(0, index) for one in tensors]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)


def _parts(blocks: Tensor, like: Sequence[Tensor]) -> Sequence[Tensor]:
    """Splits what `_picked` put side by side, into bytes for each tensor of `like`."""
    return blocks.split([bytes_of(one).size(1) for one in like], dim=1)


def put_weights(
    slots: Sequence[Tensor], own: Sequence[Tensor], sends: Sends, carried: Carry
) -> None:
    """Collective. Copies each owner's experts into other ranks' slots for them.

    slots [any, ...] and own [El, ...]: pairwise the same bytes per expert, contiguous."""
    from_here, to_here = ([Hop(one, one.owner) for one in part] for part in sends)
    pass_weights(slots, own, from_here, to_here, carried)


def pass_weights(
    slots: Sequence[Tensor],
    own: Sequence[Tensor],
    from_here: Sequence[Hop],
    to_here: Sequence[Hop],
    carried: Carry,
) -> None:
    """Collective. Sends and gets hops; like `put_weights`, but also out of this rank's slots."""
    sent = sorted(from_here, key=_order)
    parts = [
        _picked(own, [hop.copy.expert for hop in sent if hop.held < 0]),
        _picked(slots, [hop.held for hop in sent if hop.held >= 0]),
    ]
    blocks = torch.cat(parts) if all(map(len, parts)) else max(parts, key=len)
    order = sorted(to_here, key=_order)
    came = carried(blocks, [hop.copy.at for hop in sent], [hop.sender for hop in order])
    into = _numbers([hop.copy.slot for hop in order], blocks.device)
    for slot, part in zip(slots, _parts(came, slots)):
        bytes_of(slot).index_copy_(0, into, part)


def _order(hop: Hop) -> tuple[int, bool, Copy]:
    """Sorts hops alike on both sides: by sender, its own experts first."""
    return hop.sender, hop.held >= 0, hop.copy


def add_gradients(
    slots: Sequence[Tensor], own: Sequence[Tensor], sends: Sends, carried: Carry
) -> None:
    """Collective. Adds gradients in others' slots onto each owner's: by ascending rank, then slot,
    one by one, in fp32; rounded once.

    slots [any, ...] and own [El, ...]: pairwise of equal dtype and trailing shape, contiguous.
    """
    blocks = _picked(slots, [one.slot for one in sends.to_here])
    sources = [one.at for one in sends.from_here]
    came = carried(blocks, [one.owner for one in sends.to_here], sources)
    experts = sorted({one.expert for one in sends.from_here})
    waves = _waves([experts.index(one.expert) for one in sends.from_here])
    touched = _numbers(experts, blocks.device)
    for grads, part in zip(own, _parts(came, slots)):
        grads = grads.detach().view(grads.size(0), -1)
        parts = part.contiguous().view(grads.dtype)
        sums = grads.index_select(0, touched).float()
        for rows, places in waves:
            row, place = _numbers(rows, blocks.device), _numbers(places, blocks.device)
            added = sums.index_select(0, place) + parts.index_select(0, row).float()
            sums.index_copy_(0, place, added)
        grads.index_copy_(0, touched, sums.to(grads.dtype))


def add_in_turn(
    placement: Tensor,
    shape: tuple[int, int, int],
    add: Callable[[int, Tensor], None],
    carried: Carry,
    device: torch.device,
) -> Tensor:
    """Collective. Returns, fp32 [El, elements], for each expert of this rank what its places add in
    turn: replicas by ascending rank, then the master. A sum goes from place to place.

    placement: of the whole group. shape: El, this rank, elements. add(place, sum): adds a place of
    this rank, masters first, onto sum, fp32 [elements].
    """
    num_local, rank, elements = shape
    replicas: dict[int, list[tuple[int, int]]] = {}  # by expert: rank and slot of each
    for at, slots in enumerate(placement.tolist()):
        for slot, expert in enumerate(slots):
            if expert >= 0:
                replicas.setdefault(expert, []).append((at, slot))
    arrived: dict[int, Tensor] = {}  # by expert, the sum that this rank goes on with
    nothing = torch.zeros(elements, dtype=torch.float32, device=device)
    for turn in range(max(map(len, replicas.values()), default=0)):
        sums, to, awaited = [nothing[None, :][:0]], [], []
        for expert, places in sorted(replicas.items()):
            if turn >= len(places):
                continue
            at, slot = places[turn]
            is_last = turn + 1 == len(places)
            then = expert // num_local if is_last else places[turn + 1][0]
            if at == rank:
                total = arrived.pop(expert, nothing).clone()
                add(num_local + slot, total)
                sums.append(total[None, :])
                to.append(then)
            if then == rank:
                awaited.append((at, expert))
        came = carried(torch.cat(sums).view(torch.uint8), to, sorted(at for at, _ in awaited))
        came = came.contiguous().view(torch.float32)
        arrived |= {expert: total for (_, expert), total in zip(sorted(awaited), came)}
    first = rank * num_local
    totals = torch.stack([arrived.get(first + e, nothing) for e in range(num_local)])
    for expert, total in enumerate(totals):
        add(expert, total)
    return totals


def _waves(places: Sequence[int]) -> list[tuple[list[int], list[int]]]:
    """Returns steps of (rows, their places): a place comes at most once in a step, and its rows in
    their order."""
    waves: list[tuple[list[int], list[int]]] = []
    seen: dict[int, int] = {}
    for row, place in enumerate(places):
        wave = seen[place] = seen.get(place, -1) + 1
        if wave == len(waves):
            waves.append(([], []))
        waves[wave][0].append(row)
        waves[wave][1].append(place)
    return waves
