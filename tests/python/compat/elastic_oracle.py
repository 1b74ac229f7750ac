# SPDX-License-Identifier: Apache-2.0
"""Results that ElasticBuffer must return, by loops over everybody's inputs."""

from __future__ import annotations

import torch
from hybrid_ep_oracle import gather


class Case:
    """One rank's inputs and those of all; fp8: byte rows with scaling factors."""

    def __init__(
        self,
        rank,
        num_ranks,
        group,
        tokens,
        *,
        local=4,
        hidden=16,
        topk=3,
        seed=0,
        fp8=False,
        dtype=torch.bfloat16,
    ):
        gen = torch.Generator().manual_seed(100 * seed + rank)
        count = tokens[rank % len(tokens)]
        self.rank, self.num_ranks, self.group, self.local = rank, num_ranks, group, local
        self.experts, self.topk, self.most = local * num_ranks, topk, max(tokens) + 2
        scores = torch.rand(count, self.experts, generator=gen)
        self.idx = scores.topk(topk, dim=1).indices
        self.idx[torch.rand(count, topk, generator=gen) < 0.3] = -1
        self.weights = torch.rand(count, topk, generator=gen)
        self.sf = torch.rand(count, 2, generator=gen)
        if fp8:
            self.x = torch.randint(0, 256, (count, hidden), generator=gen, dtype=torch.uint8)
        else:
            self.x = torch.randn(count, hidden, generator=gen).to(dtype)

    def gather(self):
        self.all_idx = gather(self.group, self.idx)
        self.all_x = gather(self.group, self.x)
        self.all_weights = gather(self.group, self.weights)
        self.all_sf = gather(self.group, self.sf)
        return self

    def is_mine(self, expert, rank=None):
        rank = self.rank if rank is None else rank
        return rank * self.local <= expert < (rank + 1) * self.local

    def arrivals(self, rank=None):
        """[(source, token)] with a choice on `rank`, in order."""
        return [
            (s, t)
            for s, idx in enumerate(self.all_idx)
            for t in range(idx.size(0))
            if any(self.is_mine(int(e), rank) for e in idx[t])
        ]

    def counts(self, rank=None):
        """Choices of each expert of `rank`."""
        rank = self.rank if rank is None else rank
        mine = range(rank * self.local, (rank + 1) * self.local)
        return [sum(int((idx == e).sum()) for idx in self.all_idx) for e in mine]

    def expanded(self, alignment, rank=None):
        """{row: (source, token, k)} of `rank`, and the number of rows."""
        rank = self.rank if rank is None else rank
        rows, begin = {}, 0
        for e in range(rank * self.local, (rank + 1) * self.local):
            row = begin
            for s, idx in enumerate(self.all_idx):
                for t, k in (idx == e).nonzero().tolist():
                    rows[row] = (s, t, k)
                    row += 1
            begin += -(-(row - begin) // alignment) * alignment
        return rows, begin

    def received(self, values):
        """`values` [T, ...] of all sources, as rows in order."""
        rows = [values[s][t] for s, t in self.arrivals()]
        return torch.stack(rows) if rows else values[0][:0]

    def received_topk(self):
        ids, weights = [], []
        for s, t in self.arrivals():
            mine = [self.is_mine(int(e)) for e in self.all_idx[s][t]]
            ids.append(
                [
                    int(e) - self.rank * self.local if m else -1
                    for e, m in zip(self.all_idx[s][t], mine, strict=True)
                ]
            )
            weights.append(
                [float(w) if m else 0.0 for w, m in zip(self.all_weights[s][t], mine, strict=True)]
            )
        shape = (len(ids), self.topk)
        return torch.tensor(ids, dtype=torch.int64).view(shape), torch.tensor(weights).view(shape)

    def combined(self, rows, alignment=None, bias=(), round_per_rank=True):
        """This rank's tokens from everybody's rows (expanded with an alignment)."""
        all_rows = gather(self.group, rows)
        out = torch.zeros(self.x.size(0), rows.size(1), dtype=rows.dtype)
        for t in range(self.x.size(0)):
            total = None
            for rank in range(self.num_ranks):
                if alignment is None:
                    places = [n for n, at in enumerate(self.arrivals(rank)) if at == (self.rank, t)]
                else:
                    table, _ = self.expanded(alignment, rank)
                    places = sorted(n for n, at in table.items() if at[:2] == (self.rank, t))
                part = None
                for n in places:
                    value = all_rows[rank][n].float()
                    part = value if part is None else part + value
                if part is not None:
                    part = part.to(rows.dtype).float() if round_per_rank else part
                    total = part if total is None else total + part
            total = torch.zeros(rows.size(1)) if total is None else total
            for one in bias:
                total = total + one[t].float()
            out[t] = total.to(rows.dtype)
        return out
