# SPDX-License-Identifier: Apache-2.0
"""Results that the exchange must return: everything gathered on every rank, and loops."""

from __future__ import annotations

import torch
import torch.distributed as dist

HIDDEN = 32


def inputs(rank, num_tokens, topk, num_experts, dtype=torch.float32, seed=0):
    """x [T, HIDDEN], topk_idx with holes and weights [T, K] of a rank, the same on every rank."""
    gen = torch.Generator().manual_seed(1000 * seed + rank)
    x = torch.randn(num_tokens, HIDDEN, generator=gen).to(dtype)
    idx = torch.randint(-1, num_experts, (num_tokens, topk), generator=gen)
    weights = torch.rand(num_tokens, topk, generator=gen)
    return x, idx, weights


def gather(group, value) -> list:
    """`value` of every rank, by rank."""
    values = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


def check_told(told, reasons) -> None:
    """told: of each rank its texts, in the order of the reasons that they must have."""
    for texts in told:
        for text, reason in zip(texts, reasons, strict=True):
            assert reason in text


def padded(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple


def routes_of_map(routing_map: torch.Tensor) -> torch.Tensor:
    """topk_idx with as many columns as experts, ascending, -1 behind."""
    num_tokens, num_experts = routing_map.shape
    idx = torch.full((num_tokens, num_experts), -1, dtype=torch.int64)
    for t in range(num_tokens):
        chosen = routing_map[t].nonzero().flatten()
        idx[t, : chosen.numel()] = chosen
    return idx


class Slots:
    """slots[source][t][k]: row on the expert's rank or -1; counts by rank and expert."""

    def __init__(self, all_idx, num_experts, layout, pad=1, stride=0, budgets=None):
        num_ranks = len(all_idx)
        local = num_experts // num_ranks
        self.slots = [torch.full_like(idx, -1) for idx in all_idx]
        self.rows, self.counts, self.padded, self.begin, self.required = [], [], [], [], []
        for rank in range(num_ranks):
            budget = None if budgets is None else budgets[rank]
            self._place(all_idx, rank, local, layout, pad, stride, budget)

    def _place(self, all_idx, rank, local, layout, pad, stride, budget):
        experts = range(rank * local, (rank + 1) * local)
        if layout == "rank_major":
            row = 0
            counts = [0] * local
            for source, idx in enumerate(all_idx):
                for t in range(idx.size(0)):
                    ks = [k for k in range(idx.size(1)) if int(idx[t, k]) in experts]
                    if not ks:
                        continue
                    if budget is None or row < budget:
                        for k in ks:
                            self.slots[source][t, k] = row
                            counts[int(idx[t, k]) - rank * local] += 1
                    row += 1
            self._note(row if budget is None else budget, counts, counts, [0] * local, row)
            return
        row, counts, blocks, begin = 0, [], [], []
        for expert in experts:
            if layout == "expert_strided":
                row = (expert - rank * local) * stride
            begin.append(row)
            count = kept = 0
            for source, idx in enumerate(all_idx):
                for t, k in (idx == expert).nonzero().tolist():
                    slot = row + count
                    fits = (
                        slot < row + stride
                        if layout == "expert_strided"
                        else (budget is None or slot < budget)
                    )
                    if fits:
                        self.slots[source][t, k] = slot
                        kept += 1
                    count += 1
            block = padded(count, pad)
            counts.append(kept)
            blocks.append(block)
            row += block
        required = sum(blocks)
        if layout == "expert_strided":
            self._note(stride * local, counts, None, begin, None)
        else:
            self._note(required if budget is None else budget, counts, blocks, begin, required)

    def _note(self, rows, counts, blocks, begin, required):
        self.rows.append(rows)
        self.counts.append(counts)
        self.padded.append(blocks)
        self.begin.append(begin)
        self.required.append(required)


def dispatched(all_idx, slots, all_x, rank, num_experts, fill=0):
    """Rows of `rank`."""
    local = num_experts // len(all_idx)
    rows = torch.full((slots.rows[rank], all_x[0].size(1)), fill, dtype=all_x[0].dtype)
    for source, idx in enumerate(all_idx):
        for t, k in (slots.slots[source] >= 0).nonzero().tolist():
            if int(idx[t, k]) // local == rank:
                rows[slots.slots[source][t, k]] = all_x[source][t]
    return rows


def combined(idx, slot, all_rows, num_experts, dtype):
    """Tokens of the rank whose routes are `idx` and `slot`: a rank's rows first, rounded; then
    ranks ascending, rounded."""
    local = num_experts // len(all_rows)
    x = torch.zeros((idx.size(0), all_rows[0].size(1)), dtype=dtype)
    for t in range(idx.size(0)):
        total = None
        for rank, rows in enumerate(all_rows):
            own = sorted(
                {
                    int(slot[t, k])
                    for k in range(idx.size(1))
                    if slot[t, k] >= 0 and int(idx[t, k]) // local == rank
                }
            )
            if not own:
                continue
            part = rows[own[0]].float()
            for row in own[1:]:
                part = part + rows[row].float()
            part = part.to(dtype).float()
            total = part if total is None else total + part
        if total is not None:
            x[t] = total.to(dtype)
    return x
