# SPDX-License-Identifier: Apache-2.0
"""Results that `Buffer` must return: gathers every rank's inputs and loops. Slow, obvious."""

from __future__ import annotations

import torch
import torch.distributed as dist

from weft.compat.deep_ep import Buffer

HIDDEN = 32
NUM_MAX = 16  # tokens of a rank in a low-latency call
LOW_LATENCY_TOKENS = (16, 0, 5, 9)


def gather(group, value) -> list:
    values = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


class Case:
    """Inputs of a rank, and what everybody's inputs make of them."""

    def __init__(
        self,
        rank,
        group,
        num_experts,
        topk,
        tokens,
        *,
        low=-1,
        hidden=HIDDEN,
        seed=1,
        distinct=False,
    ):
        """Indices from `low` to as far beyond the last; distinct: no expert twice a token."""
        gen = torch.Generator().manual_seed(977 * seed + rank)
        num_tokens = tokens[rank % len(tokens)]
        self.rank, self.num_experts = rank, num_experts
        self.x = torch.randn(num_tokens, hidden, generator=gen).to(torch.bfloat16)
        self.idx = torch.randint(
            low, num_experts - min(low + 1, 0), (num_tokens, topk), generator=gen
        )
        if distinct:
            for k in range(1, topk):
                repeats = (self.idx[:, :k] == self.idx[:, k : k + 1]).any(1)
                self.idx[repeats, k] = -1
        self.weights = torch.rand(num_tokens, topk, generator=gen)
        self.all_x, self.all_idx = gather(group, self.x), gather(group, self.idx)
        self.all_weights = gather(group, self.weights)
        self.num_ranks = len(self.all_x)
        self.local = num_experts // self.num_ranks

    def owner(self, expert: int) -> int:
        """The rank of an expert, or -1 for a value that is none."""
        return expert // self.local if 0 <= expert < self.num_experts else -1

    def tokens_of(self, source: int, rank: int) -> list[int]:
        """Tokens of `source` that go to `rank`, in order."""
        idx = self.all_idx[source].tolist()
        return [t for t, row in enumerate(idx) if rank in {self.owner(e) for e in row}]

    def arrivals(self, rank: int) -> list[tuple[int, int]]:
        """(source, token) of the rows of `rank`."""
        return [(s, t) for s in range(self.num_ranks) for t in self.tokens_of(s, rank)]

    def rows(self, all_values: list[torch.Tensor]) -> torch.Tensor:
        """Rows that this rank receives of [T, any] tensors of all ranks."""
        rows = [all_values[s][t] for s, t in self.arrivals(self.rank)]
        return torch.stack(rows) if rows else all_values[0].new_zeros((0, *all_values[0].shape[1:]))

    def row_idx(self) -> torch.Tensor:
        first = self.rank * self.local
        out = self.rows(self.all_idx).clone()
        for row in out:
            for k, expert in enumerate(row.tolist()):
                row[k] = expert - first if self.owner(expert) == self.rank else -1
        return out

    def row_weights(self) -> torch.Tensor:
        return torch.where(self.row_idx() >= 0, self.rows(self.all_weights), torch.zeros(()))

    def counts(self, alignment: int = 1) -> list[int]:
        """Choices of this rank's experts."""
        flat = torch.cat([idx.flatten() for idx in self.all_idx]).tolist()
        first = self.rank * self.local
        counts = [flat.count(e) for e in range(first, first + self.local)]
        return [-(-count // alignment) * alignment for count in counts]

    def prefix(self) -> torch.Tensor:
        """int32 [R, R]: rows that rank j receives from ranks 0 to i."""
        rows = [
            [len(self.tokens_of(s, r)) for r in range(self.num_ranks)]
            for s in range(self.num_ranks)
        ]
        return torch.tensor(rows, dtype=torch.int32).cumsum(0).int()

    def summed(self, all_rows: list[torch.Tensor], biases=(), domains=None) -> torch.Tensor:
        """This rank's tokens: sums in fp32 by rank, then the bias, rounded once.

        With several domains (lists of ranks) those of each are added up and, without bias,
        rounded; then the domains are.
        """
        domains = domains or [list(range(self.num_ranks))]
        out = torch.zeros(self.x.shape, dtype=torch.float32)
        for domain in domains:
            part = torch.zeros_like(out)
            for rank in domain:
                for row, (source, token) in enumerate(self.arrivals(rank)):
                    if source == self.rank:
                        part[token] += all_rows[rank][row].float()
            out += part if biases else part.to(all_rows[0].dtype).float()
        for bias in biases:
            out += bias.float()
        return out.to(all_rows[0].dtype)


def dispatch(buffer, case, x=None, with_topk=True, **options):
    """get_dispatch_layout and dispatch, as callers do."""
    per_rank, per_rdma, per_expert, in_rank, _ = buffer.get_dispatch_layout(
        case.idx, case.num_experts
    )
    if with_topk:
        options.update(topk_idx=case.idx, topk_weights=case.weights)
    return buffer.dispatch(
        case.x if x is None else x,
        num_tokens_per_rank=per_rank,
        num_tokens_per_rdma_rank=per_rdma,
        is_token_in_rank=in_rank,
        num_tokens_per_expert=per_expert,
        **options,
    )


def low_latency_case(rank, num_ranks, group, *, hidden=128, low=-1, topk=3, **options):
    """A case of two experts a rank, and a buffer for it."""
    tokens = LOW_LATENCY_TOKENS
    case = Case(rank, group, 2 * num_ranks, topk, tokens, low=low, hidden=hidden, distinct=True)
    return case, Buffer(group, low_latency_mode=True, explicitly_destroy=True, **options)


def routes(case, expert, without=()):
    """(source, token) of the rows of one of the rank's experts."""
    number = case.rank * case.local + expert
    return [
        (source, token)
        for source, idx in enumerate(case.all_idx)
        if source not in without
        for token, row in enumerate(idx.tolist())
        for k in row
        if k == number
    ]


def expected_rows(case, expert, all_values, without=()):
    rows = [all_values[source][token] for source, token in routes(case, expert, without)]
    return torch.stack(rows) if rows else all_values[0].new_zeros((0, *all_values[0].shape[1:]))


def check_handle(case, handle, recv_count, without=()):
    src_info, layout_range, num_max, hidden, num_experts = handle
    assert (num_max, hidden, num_experts) == (NUM_MAX, case.x.size(1), case.num_experts)
    assert src_info.dtype == torch.int32 and layout_range.dtype == torch.int64
    assert src_info.shape == (case.local, case.num_ranks * NUM_MAX)
    assert recv_count.dtype == torch.int32
    for expert in range(case.local):
        want = routes(case, expert, without)
        assert int(recv_count[expert]) == len(want)
        assert src_info[expert, : len(want)].tolist() == [token for _, token in want]
        for source in range(case.num_ranks):
            entry = int(layout_range[expert, source])
            begin, count = entry >> 32, entry & 0xFFFFFFFF
            assert [s for s, _ in want[begin : begin + count]] == [source] * count
            assert count == sum(s == source for s, _ in want)
