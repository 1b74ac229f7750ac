# SPDX-License-Identifier: Apache-2.0
"""The functions of a flex backend by gathering everything everywhere. Slow, obvious."""

from __future__ import annotations

from functools import partial

import torch
import torch.distributed as dist

from ranks import after_call
from weft.dispatcher import manager


def use(functions: str) -> None:
    """Has the flex dispatchers of this rank run on "weft" or, in this call, the functions below."""
    if functions == "weft":
        return

    def standins(name):
        pair = (hybrid_dispatch, hybrid_combine) if name == "hybridep" else (dispatch, combine)
        return manager.Backend(*pair, None)

    after_call.append(partial(setattr, manager, "backend", manager.backend))
    manager.backend = standins


def installed() -> list[str]:
    """Names of the functions that can run here."""
    try:
        import weft.fused_a2a  # noqa: F401
    except ImportError:
        return ["standins"]
    return ["standins", "weft"]


class _Everyone(torch.autograd.Function):
    """Tensor of each rank -> tensors of all ranks; backward sums what all ranks made of it."""

    @staticmethod
    def forward(ctx, own, group):
        ctx.group = group
        shapes = [None] * group.size()
        dist.all_gather_object(shapes, tuple(own.shape), group=group)
        ctx.shapes = shapes
        gathered = [None] * group.size()
        dist.all_gather_object(gathered, own.detach(), group=group)
        return tuple(t.clone() for t in gathered)

    @staticmethod
    def backward(ctx, *grads):
        filled = [torch.zeros(s) if g is None else g for g, s in zip(grads, ctx.shapes)]
        everyone = [None] * ctx.group.size()
        dist.all_gather_object(everyone, filled, group=ctx.group)
        own = ctx.group.rank()
        return sum(theirs[own].float() for theirs in everyone).to(filled[own].dtype), None


def everyone(own, group):
    return _Everyone.apply(own, group)


def _pairs_for(rank, maps, num_local):
    """(source, token) pairs with a route to `rank`, by source, then token."""
    own = slice(rank * num_local, (rank + 1) * num_local)
    return [
        (s, t) for s, m in enumerate(maps) for t in m[:, own].any(1).nonzero().flatten().tolist()
    ]


def _stack(tensors, like, width):
    return torch.stack(tensors) if tensors else like.new_zeros((0, width))


def dispatch(
    x,
    token_indices,
    token_probs,
    num_experts,
    group,
    async_finish=False,
    allocate_on_comm_stream=False,
):
    local, rank = num_experts // group.size(), group.rank()
    all_x, all_probs = everyone(x, group), everyone(token_probs, group)
    all_idx = [None] * group.size()
    dist.all_gather_object(all_idx, token_indices, group=group)
    maps = []
    for idx in all_idx:
        m = torch.zeros((idx.shape[0], num_experts), dtype=torch.bool)
        for t, k in (idx >= 0).nonzero().tolist():
            m[t, idx[t, k]] = True
        maps.append(m)
    pairs = _pairs_for(rank, maps, local)
    indices, probs = [], []
    for s, t in pairs:
        here = (all_idx[s][t] >= rank * local) & (all_idx[s][t] < (rank + 1) * local)
        indices.append(torch.where(here, all_idx[s][t] - rank * local, -1))
        probs.append(all_probs[s][t] * here)
    num_choices = token_indices.shape[1]
    counts = sum(m[:, rank * local : (rank + 1) * local].sum(0) for m in maps)
    rows = _stack([all_x[s][t] for s, t in pairs], x, x.shape[1])
    rows = rows + 0 * sum(a.sum() for a in all_x)  # keeps the graph alive without rows
    probs = _stack(probs, token_probs, num_choices) + 0 * sum(a.sum() for a in all_probs)
    return rows, _stack(indices, token_indices, num_choices), probs, counts, (maps, local)


def combine(x, group, handle, async_finish=False, allocate_on_comm_stream=False):
    maps, local = handle
    everyones_rows = everyone(x, group)
    rank = group.rank()
    out = [torch.zeros(x.shape[1])] * maps[rank].shape[0]
    for r, rows in enumerate(everyones_rows):
        for row, (s, t) in zip(rows, _pairs_for(r, maps, local)):
            if s == rank:
                out[t] = out[t] + row.float()
    combined = _stack(out, x, x.shape[1]).to(x.dtype)
    return combined + 0 * sum(r.sum() for r in everyones_rows), None


def _slots(rank, maps, num_local, pad, budget):
    """(source, token, expert) of each row of `rank`, None for padding and slack; raw counts."""
    rows, kept_counts, dropped = [], [], False
    for expert in range(rank * num_local, (rank + 1) * num_local):
        block = [
            (s, t, expert)
            for s, m in enumerate(maps)
            for t in m[:, expert].nonzero().flatten().tolist()
        ]
        padded = -(-len(block) // pad) * pad
        block = block + [None] * (padded - len(block))
        fits = len(block) if budget is None else min(len(block), budget - len(rows))
        dropped |= fits < len(block)
        rows += block[:fits]
        kept_counts.append(fits)
    if budget is not None:
        rows += [None] * (budget - len(rows))
    return rows, kept_counts, dropped


def hybrid_dispatch(
    *,
    x,
    routing_map,
    probs,
    group,
    num_local_experts,
    num_sms_dispatch_api,
    num_sms_combine_api,
    num_permuted_tokens,
    pad_multiple,
    num_sms_preprocessing_api=None,
):
    rank = group.rank()
    all_x, all_probs = everyone(x, group), everyone(probs, group)
    maps = [None] * group.size()
    dist.all_gather_object(maps, routing_map, group=group)
    budgets = [None] * group.size()
    dist.all_gather_object(budgets, num_permuted_tokens, group=group)
    layout = [
        _slots(r, maps, num_local_experts, pad_multiple or 1, budgets[r])
        for r in range(group.size())
    ]
    slots, counts, _ = layout[rank]
    nothing = x.new_zeros(x.shape[1])
    rows = _stack([nothing if s is None else all_x[s[0]][s[1]] for s in slots], x, x.shape[1])
    none = probs.new_zeros(())
    row_probs = [none if s is None else all_probs[s[0]][s[1], s[2]] for s in slots]
    row_probs = torch.stack(row_probs) if row_probs else probs.new_zeros(0)
    rows = rows + 0 * sum(a.sum() for a in all_x)
    row_probs = row_probs + 0 * sum(a.sum() for a in all_probs)
    if budgets[rank] is not None:  # slack is undefined
        used = sum(counts)
        rows = torch.cat([rows[:used], torch.full_like(rows[used:], float("nan"))])
        row_probs = torch.cat([row_probs[:used], torch.full_like(row_probs[used:], float("nan"))])
    overflow = torch.tensor([int(layout[rank][2])], dtype=torch.int32)
    handle = (layout, x.shape[0], group, overflow)
    return rows, row_probs, None, torch.tensor(counts), handle


def hybrid_combine(*, x, handle, num_permuted_tokens, pad_multiple):
    layout, num_tokens, group, _ = handle
    rank = group.rank()
    assert num_permuted_tokens == x.shape[0] == len(layout[rank][0])
    everyones_rows = everyone(x, group)
    out = [torch.zeros(x.shape[1])] * num_tokens
    for (slots, _, _), rows in zip(layout, everyones_rows):
        for row, slot in zip(rows, slots):
            if slot is not None and slot[0] == rank:
                out[slot[1]] = out[slot[1]] + row.float()
    combined = _stack(out, x, x.shape[1]).to(x.dtype)
    return combined + 0 * sum(r.nan_to_num(0).sum() for r in everyones_rows)
