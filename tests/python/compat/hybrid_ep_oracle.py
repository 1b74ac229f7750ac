# SPDX-License-Identifier: Apache-2.0
"""Results that HybridEPBuffer must return, by loops over everybody's inputs."""

from __future__ import annotations

import torch
import torch.distributed as dist


def gather(group, value) -> list:
    """`value` of every rank, by rank."""
    values = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def rounded(values, dtype):
    """Their sum in fp32, each rounded before and the sum after; None stands for nothing."""
    total = None
    for value in values:
        if value is not None:
            value = value.to(dtype).float()
            total = value if total is None else total + value
    return None if total is None else total.to(dtype)


class Case:
    """One rank's inputs, and those of all ranks once gathered."""

    def __init__(
        self,
        rank,
        num_ranks,
        group,
        tokens,
        *,
        local=4,
        hidden=16,
        seed=0,
        density=0.3,
        dtype=torch.bfloat16,
    ):
        gen = torch.Generator().manual_seed(100 * seed + rank)
        count = tokens[rank % len(tokens)]
        self.rank, self.num_ranks, self.group, self.local = rank, num_ranks, group, local
        self.experts = local * num_ranks
        self.map = torch.rand(count, self.experts, generator=gen) < density
        self.probs = torch.rand(count, self.experts, generator=gen) * self.map
        if dtype == torch.uint8:
            self.hidden = torch.randint(0, 256, (count, hidden), generator=gen, dtype=dtype)
        else:
            self.hidden = torch.randn(count, hidden, generator=gen).to(dtype)
        self.scales = torch.rand(count, max(hidden // 128, 1), generator=gen)

    def gather(self):
        self.maps = gather(self.group, self.map)
        self.all_hidden = gather(self.group, self.hidden)
        self.all_probs = gather(self.group, self.probs)
        self.all_scales = gather(self.group, self.scales)
        return self

    def slots(self, rank, pad=1, budget=None):
        """[(row, source, token, local expert)] kept on `rank`, padded counts, rows needed."""
        kept, blocks, begin = [], [], 0
        for expert in range(self.local):
            row = begin
            for source, table in enumerate(self.maps):
                for t in range(table.size(0)):
                    if table[t, rank * self.local + expert]:
                        if budget is None or row < budget:
                            kept.append((row, source, t, expert))
                        row += 1
            end = begin + -(-(row - begin) // pad) * pad
            limit = end if budget is None else budget
            blocks.append(max(0, min(end, limit) - min(begin, limit)))
            begin = end
        return kept, blocks, begin

    def permuted(self, pad=1, budget=None):
        """rows, probs, scales (slack as zeros), padded counts and whether rows were dropped."""
        kept, blocks, needed = self.slots(self.rank, pad, budget)
        size = needed if budget is None else budget
        rows = torch.zeros((size, self.hidden.size(1)), dtype=self.hidden.dtype)
        probs = torch.zeros(size)
        scales = torch.zeros((size, self.scales.size(1)))
        for row, source, t, expert in kept:
            rows[row] = self.all_hidden[source][t]
            probs[row] = self.all_probs[source][t, self.rank * self.local + expert]
            scales[row] = self.all_scales[source][t]
        return rows, probs, scales, blocks, budget is not None and needed > budget

    def unpermuted(self, rows, probs=None, pad=1, budgets=None, domains=None):
        """This rank's tokens and dense probabilities from its own `rows` and `probs` of all.

        With several domains (lists of ranks) those of each are added up and rounded, then the
        domains are.
        """
        domains = domains or [list(range(self.num_ranks))]
        all_rows = gather(self.group, rows)
        all_probs = gather(self.group, probs)
        out = torch.zeros((self.map.size(0), rows.size(1)), dtype=rows.dtype)
        dense = torch.zeros(self.map.shape)
        parts = []  # of each rank
        for peer in range(self.num_ranks):
            kept, _, _ = self.slots(peer, pad, None if budgets is None else budgets[peer])
            part = [None] * self.map.size(0)
            for row, source, t, expert in kept:
                if source != self.rank:
                    continue
                value = all_rows[peer][row].float()
                part[t] = value if part[t] is None else part[t] + value
                if probs is not None:
                    dense[t, peer * self.local + expert] = all_probs[peer][row]
            parts.append(part)
        for t in range(self.map.size(0)):
            sums = [rounded([parts[peer][t] for peer in domain], rows.dtype) for domain in domains]
            total = rounded(sums, rows.dtype)
            if total is not None:
                out[t] = total
        return out, dense

    def arrivals(self, rank):
        """[(source, token)] with a route to `rank`, in row order of the plain dispatch."""
        experts = slice(rank * self.local, (rank + 1) * self.local)
        return [
            (source, t)
            for source, table in enumerate(self.maps)
            for t in range(table.size(0))
            if table[t, experts].any()
        ]
