# SPDX-License-Identifier: Apache-2.0
"""Results that calls must return: every rank makes the inputs of all ranks itself, and computes on
the CPU where their rows lie and what their sums are. Nothing here asks another rank."""

from __future__ import annotations

import copy
import itertools

import torch
from torch import Tensor

# Powers of two: a product with one is exact, so that it is all the same when it is rounded.
WEIGHTS = torch.tensor([0.0, 0.25, 0.5, 1.0, 2.0])


# Factors that experts (or ranks) multiply their rows by, by number; the last one, -1, is for rows
# that no rank may read. All are exact in every dtype.
FACTORS = torch.cat([1.0 + torch.arange(256) % 8 / 8, torch.tensor([torch.nan])])


class Batch:
    """Inputs of all ranks for a call; N tokens in all, by rank. idx [N, K] has -1 for no route."""

    def __init__(self, gen, tokens, hidden, topk, num_experts, dtype, kind="any", hot=None):
        """tokens: of each rank. kind: "any", where a token may name an expert twice; "distinct";
        "map": experts ascending, -1 behind. hot: an expert that most tokens want."""
        count, self.tokens, self.topk, self.kind = sum(tokens), tokens, topk, kind
        self.num_experts, self.hidden, self.dtype = num_experts, hidden, dtype
        self.num_ranks = len(tokens)
        self.local = num_experts // self.num_ranks
        self.begin = [0, *itertools.accumulate(tokens)]
        self.source = torch.arange(self.num_ranks).repeat_interleave(torch.tensor(tokens))
        if kind == "any":
            idx = torch.randint(-1, num_experts, (count, topk), generator=gen)
            if hot is not None:
                idx[torch.rand(count, topk, generator=gen) < 0.7] = hot
        else:
            scores = torch.rand(count, num_experts, generator=gen)
            if hot is not None:
                scores[:, hot] = 1
            idx = scores.topk(topk).indices
            idx[torch.rand(count, topk, generator=gen) < 0.2] = -1
        if kind == "map":
            idx = idx.where(idx >= 0, num_experts).sort(1).values
            idx = idx.where(idx < num_experts, -1)
        self.idx = idx
        self.owner = idx.div(self.local, rounding_mode="floor").where(idx >= 0, -1)
        self.fill(gen)

    def fill(self, gen) -> None:
        """Other tokens and weights for the same routes."""
        count = len(self.idx)
        self.x = torch.randn(count, self.hidden, generator=gen).to(self.dtype)
        self.weights = WEIGHTS[torch.randint(len(WEIGHTS), self.idx.shape, generator=gen)]

    def again(self, gen) -> Batch:
        other = copy.copy(self)
        other.fill(gen)
        return other

    def of(self, rank: int, values: Tensor) -> Tensor:
        """A rank's part of [N, ...]."""
        return values[self.begin[rank] : self.begin[rank + 1]]

    def spread(self, rank: int, values: Tensor) -> Tensor:
        """[T, E]: values [T, K] of a rank's routes at their experts."""
        idx = self.of(rank, self.idx)
        wide = values.new_zeros(len(idx), self.num_experts + 1)
        return wide.scatter_(1, idx.where(idx >= 0, self.num_experts), values)[:, :-1]


class Rows:
    """Places of a batch's routes on `rank`, and which routes are kept, on all ranks."""

    def __init__(self, batch, rank, layout="expert_major", pad=1, stride=0, budgets=None, alive=()):
        """budgets: rows of each rank, or as many as come. alive: ranks that take part; (): all."""
        self.batch, self.rank, self.layout = batch, rank, layout
        self.idx, self.owner = self._among(alive)
        ranks = torch.arange(batch.num_ranks)
        if layout == "rank_major":
            hit = (self.owner.unsqueeze(2) == ranks).any(1)
            at = hit.cumsum(0) - 1
            slot, needed = at.gather(1, self.owner.clamp(min=0)), hit.sum(0)
            self.padded = None
        else:
            slot, needed = self._slots(pad, stride)
        most = needed if budgets is None else torch.tensor(budgets)
        if layout == "expert_strided":
            stride = self.stride
            most = torch.full_like(needed, stride * batch.local)
            limit = (self.idx % batch.local + 1) * stride
        else:
            limit = most[self.owner]
        self.kept = (self.owner >= 0) & (slot < limit)
        self.required, self.num_rows = int(needed[rank]), int(most[rank])
        self.used = min(self.required, self.num_rows)
        mine = self.kept & (self.owner == rank)
        self.counts = torch.bincount(self.idx[mine] % batch.local, minlength=batch.local)
        dropped = (self.owner >= 0) & ~self.kept
        self.overflow = bool((dropped & ((self.owner == rank) | self._from(rank))).any())
        self.route = torch.full((self.num_rows,), -1)  # of each row, as a place in idx.flatten()
        places = mine.flatten().nonzero().flatten()
        if layout == "rank_major":
            places = places.flip(0)  # of a token's routes the first stays
        self.route[slot.flatten()[places]] = places
        self.token = self.route.div(batch.topk, rounding_mode="floor")
        is_row = self.token >= 0
        inside = torch.arange(self.num_rows) < self.used
        self.is_row, self.is_defined = is_row, is_row if layout == "expert_strided" else inside

    def _among(self, alive) -> tuple[Tensor, Tensor]:
        batch = self.batch
        if len(alive) in (0, batch.num_ranks):
            return batch.idx, batch.owner
        here = torch.zeros(batch.num_ranks + 1, dtype=torch.bool)
        here[list(alive)] = True  # the last one: no rank
        gone = ~(here[batch.owner] & here[batch.source].unsqueeze(1))
        return batch.idx.masked_fill(gone, -1), batch.owner.masked_fill(gone, -1)

    def _from(self, rank: int) -> Tensor:
        return (self.batch.source == rank).unsqueeze(1)

    def _slots(self, pad: int, stride: int) -> tuple[Tensor, Tensor]:
        """Row of every route on its rank, and how many rows each rank needs."""
        batch, flat = self.batch, self.idx.flatten()
        counts = torch.bincount(flat + 1, minlength=batch.num_experts + 1)[1:]
        blocks = -(-counts // pad) * pad
        by_rank = blocks.view(batch.num_ranks, batch.local)
        begin = (by_rank.cumsum(1) - by_rank).flatten()
        if self.layout == "expert_strided":
            self.stride = stride or int(blocks.max())
            begin = torch.arange(batch.num_experts) % batch.local * self.stride
        self.padded = by_rank[self.rank]
        order = flat.argsort(stable=True)[len(flat) - int(counts.sum()) :]
        experts = flat[order]
        slot = torch.full_like(flat, -1)
        slot[order] = torch.arange(len(order)) - (counts.cumsum(0) - counts - begin)[experts]
        return slot.view(self.idx.shape), by_rank.sum(1)

    def received(self, values: Tensor, alive=()) -> tuple[Tensor, Tensor]:
        """This rank's rows of [N, any], zeros for padding and for tokens of ranks that were lost
        since; and which rows are defined."""
        rows = values.new_zeros(self.num_rows, *values.shape[1:])
        has = self._has_token(alive)
        rows[has] = values[self.token[has]]
        return rows, self.is_defined

    def _has_token(self, alive) -> Tensor:
        """bool [rows]."""
        has = self.is_row.clone()
        if alive:
            has[self.is_row] = torch.isin(
                self.batch.source[self.token[self.is_row]], torch.tensor(alive)
            )
        return has

    def row_weights(self, weights: Tensor, columns: int = 0, alive=()) -> Tensor:
        """Weights of the rows, taken from [N, K]: [rows, 1], or [rows, K] with zeros elsewhere; or,
        where a map has told the exchange no K, so many columns."""
        if self.layout == "rank_major":
            here = torch.where(self.owner == self.rank, weights, 0.0)
            rows = self.received(here, alive)[0]
            more = (columns or rows.size(1)) - rows.size(1)
            return torch.nn.functional.pad(rows, (0, more))
        rows, has = torch.zeros(self.num_rows, 1), self._has_token(alive)
        rows[has, 0] = weights.flatten()[self.route[has]]
        return rows

    def row_experts(self) -> Tensor:
        """[rows, K] of "rank_major": this rank's experts, from 0, -1 for those of others."""
        here = (self.idx - self.rank * self.batch.local).where(self.owner == self.rank, -1)
        return torch.where(self.is_row.unsqueeze(1), self.received(here)[0], -1)

    def factors(self, dtype: torch.dtype) -> Tensor:
        """[rows, 1]: what the experts of this rank multiply its rows by."""
        is_row, number = self.is_row, torch.full_like(self.route, -1)
        by_rank = self.layout == "rank_major"
        number[is_row] = self.rank if by_rank else self.idx.flatten()[self.route[is_row]]
        return FACTORS[number].to(dtype).unsqueeze(1)

    def taken(self, alive=()) -> Tensor:
        """bool [T, K]: this rank's routes that lead anywhere."""
        batch = self.batch
        kept = batch.of(self.rank, self.kept)
        if alive:
            kept = kept & torch.isin(batch.of(self.rank, self.owner), torch.tensor(alive))
        return kept

    def sums(self, x, dtype=None, weights=None, order="rank", alive=()) -> Tensor:
        """This rank's tokens x [T, H], each row of theirs times its factor (and weights [T, K]):
        those of a rank added in the order of its rows and rounded, then the ranks' ascending; or
        all in the order of a token's choices."""
        batch, dtype = self.batch, dtype or x.dtype
        idx, owner = (batch.of(self.rank, numbers) for numbers in (self.idx, self.owner))
        kept = self.taken(alive)
        if self.layout == "rank_major":
            is_same = (owner.unsqueeze(2) == owner.unsqueeze(1)).tril(-1)
            kept = kept & ~(is_same & kept.unsqueeze(1)).any(2)
        by = FACTORS[owner if self.layout == "rank_major" else idx]
        values = (x.float().unsqueeze(1) * by.unsqueeze(2)).to(dtype).float()
        if weights is not None:
            values = values * weights.unsqueeze(2)
        values = values.where(kept.unsqueeze(2), 0.0)
        if order == "topk":
            return added(values.unbind(1)).to(dtype)
        token = torch.arange(len(x)).unsqueeze(1)
        ascending = idx.argsort(dim=1, stable=True)
        values, owner = values[token, ascending], owner.gather(1, ascending).clamp(min=0)
        parts = torch.zeros(len(x), batch.num_ranks, x.size(1))
        for k in range(batch.topk):
            parts[token[:, 0], owner[:, k]] += values[:, k]
        return added(parts.to(dtype).float().unbind(1)).to(dtype)


def added(parts) -> Tensor:
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total
