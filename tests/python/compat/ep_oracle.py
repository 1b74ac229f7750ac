# SPDX-License-Identifier: Apache-2.0
"""Results that EPBuffer must return, by loops over everybody's inputs: sums stage by stage."""

from __future__ import annotations

import elastic_oracle
import torch
from hybrid_ep_oracle import gather


class Case(elastic_oracle.Case):
    """Enough choices that the order of a sum matters."""

    def __init__(self, rank, num_ranks, group, tokens, **more):
        super().__init__(rank, num_ranks, group, tokens, local=6, topk=6, **more)


def of_two_sizes(shape, seed, dtype=torch.bfloat16):
    """Numbers so large and so small that a sum in fp32 loses the small ones, unless large ones have
    cancelled before: it depends on the order."""
    gen = torch.Generator().manual_seed(seed)
    size = torch.randint(0, 2, shape, generator=gen) * 26 - 14
    sign = torch.randint(0, 2, shape, generator=gen) * 2 - 1
    part = torch.randint(4, 6, shape, generator=gen) / 4
    return (sign * part * size.float().exp2()).to(dtype)


def stage(rows, dtype, bias=()):
    """One rounding: from 0, the biases, then the rows, in fp32. Two rows without a bias are added
    as they are."""
    if not bias and len(rows) == 2:
        return (rows[0].float() + rows[1].float()).to(dtype)
    total = None
    for one in (*bias, *rows):
        total = one.float() + (0.0 if total is None else total)
    return total.to(dtype)


def last_slots(slots, group_of):
    """Groups of slots, each with its slots ascending, by the largest of them."""
    groups = {}
    for k, expert in slots:
        groups.setdefault(group_of(expert), []).append((k, expert))
    return sorted(groups.items(), key=lambda one: max(k for k, _ in one[1]))


class Combine:
    """The modes of a buffer. domain: ranks of one, in hybrid mode of several."""

    def __init__(self, case, *, alignment=None, multiple=True, domain=None):
        self.case, self.alignment, self.multiple = case, alignment, multiple
        self.domain = domain if multiple else None

    def __call__(self, rows, bias=()):
        """This rank's tokens from everybody's rows."""
        case, dtype = self.case, rows.dtype
        all_rows = gather(case.group, rows)
        out = torch.zeros(case.x.size(0), rows.size(1), dtype=dtype)
        for t in range(len(out)):
            slots = [(k, int(e)) for k, e in enumerate(case.idx[t]) if e >= 0]
            biases = [one[t] for one in bias]
            if slots or biases:
                out[t] = self._token(all_rows, t, slots, dtype, biases)
        return out

    def _token(self, all_rows, t, slots, dtype, bias):
        rank_of = lambda expert: expert // self.case.local  # noqa: E731
        if self.alignment is not None and not self.multiple:
            return stage([self._row(all_rows, t, k, e) for k, e in slots], dtype, bias)
        if self.domain is None:
            parts = [
                self._of_rank(all_rows, t, mine, dtype) for _, mine in last_slots(slots, rank_of)
            ]
            return stage(parts, dtype, bias)
        parts = []
        for _, theirs in last_slots(slots, lambda expert: rank_of(expert) // self.domain):
            ranks = last_slots(theirs, rank_of)
            parts.append(
                stage([self._of_rank(all_rows, t, mine, dtype) for _, mine in ranks], dtype)
            )
        return stage(parts, dtype, bias)

    def _of_rank(self, all_rows, t, slots, dtype):
        if self.alignment is None:
            rank = slots[0][1] // self.case.local
            return all_rows[rank][self.case.arrivals(rank).index((self.case.rank, t))]
        return stage([self._row(all_rows, t, k, e) for k, e in slots], dtype)

    def _row(self, all_rows, t, k, expert):
        rank = expert // self.case.local
        table = self._tables().setdefault(
            rank, {at: row for row, at in self.case.expanded(self.alignment, rank)[0].items()}
        )
        return all_rows[rank][table[self.case.rank, t, k]]

    def _tables(self):
        if not hasattr(self, "_made"):
            self._made = {}
        return self._made
