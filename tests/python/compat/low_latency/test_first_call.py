# SPDX-License-Identifier: Apache-2.0
"""Ranks that do not come to the first low-latency call of a buffer with masks."""

import os

import pytest
import torch
import torch.distributed as dist

import weft
from ranks import device_of
from weft.compat.deep_ep import Buffer

RANKS, LOCAL, TOKENS, TOPK, HIDDEN = 4, 2, 6, 3, 128
EXPERTS = RANKS * LOCAL


def drawn(rank):
    gen = torch.Generator().manual_seed(rank)
    x = torch.randint(-8, 8, (TOKENS, HIDDEN), generator=gen).to(torch.bfloat16)
    return x, torch.rand(TOKENS, EXPERTS, generator=gen).topk(TOPK).indices


class Layer:
    def __init__(self, rank, group):
        self.rank, self.device = rank, device_of(rank)
        self.x, self.idx = (one.to(self.device) for one in drawn(rank))
        self.buffer = Buffer(group, 0, 1 << 20, low_latency_mode=True, enable_shrink=True)

    def call(self, alive, **options):
        """A dispatch and its combine, as the ranks that are alive make them."""
        weights = torch.ones(TOKENS, TOPK, device=self.device)
        rows, counts, row_weights, rank_info, handle, _, _ = self.buffer.low_latency_dispatch(
            self.x, self.idx, TOKENS, EXPERTS, use_fp8=False, topk_weights=weights, **options
        )
        assert rows.shape == (LOCAL, RANKS * TOKENS, HIDDEN) and handle.num_experts == EXPERTS
        layout = handle[1]
        assert layout.shape == (LOCAL, RANKS)
        for expert in range(LOCAL):
            number = self.rank * LOCAL + expert
            found = {rank: (drawn(rank)[1] == number).nonzero()[:, 0] for rank in alive}
            want = torch.cat([drawn(rank)[0][tokens] for rank, tokens in found.items()])
            sources = [rank for rank, tokens in found.items() for _ in tokens]
            count = int(counts[expert])
            assert count == len(want) and torch.equal(rows[expert, :count].cpu(), want)
            assert rank_info[expert, :count].tolist() == sources
            assert bool((row_weights[expert, :count] == 1).all())
            each = [len(found.get(rank, ())) for rank in range(RANKS)]
            assert (layout[expert] & 0xFFFFFFFF).tolist() == each
        out = self.buffer.low_latency_combine(rows, self.idx, weights, handle)[0]
        kept = torch.isin(self.idx // LOCAL, torch.tensor(alive, device=self.device))
        assert torch.equal(out, self.x * kept.sum(1, keepdim=True))

    def masked(self):
        status = torch.empty(RANKS, dtype=torch.int32, device=self.device)
        self.buffer.low_latency_query_mask_buffer(status)
        return status.nonzero().flatten().tolist()


def with_deadline(body):
    """Returns `body` with a deadline of 2 seconds for its calls."""

    def call(*args):
        os.environ["WEFT_CALL_TIMEOUT_S"] = "2"
        try:
            body(*args)
        finally:
            del os.environ["WEFT_CALL_TIMEOUT_S"]

    return call


def without(rank, _num_ranks, group, absent):
    def body():
        layer = Layer(rank, group)
        alive = [one for one in range(RANKS) if one not in absent]
        if rank in absent:
            dist.barrier(group)
            with pytest.raises(weft.PeerError, match=f"rank {rank} was given up by ranks"):
                layer.call(alive)
            return
        layer.call(alive)
        assert layer.masked() == list(absent)
        layer.call(alive)
        with pytest.raises(weft.Unsupported, match="is lost and cannot be taken in again"):
            layer.buffer.low_latency_update_mask_buffer(absent[0], False)
        layer.buffer.low_latency_update_mask_buffer(absent[0], True)  # as it is
        layer.buffer.clean_low_latency_buffer(TOKENS, HIDDEN, EXPERTS)
        fewer = alive[:-1]  # who is masked later is lost to the rest
        has_left = f"{layer.buffer.runtime.exchanges.group.ranks} are through"
        if rank == alive[-1]:
            group.get_group_store().set(has_left, b"1")
            dist.barrier(group)
            return
        group.get_group_store().wait([has_left])
        layer.buffer.low_latency_update_mask_buffer(alive[-1], True)
        layer.call(fewer)
        assert layer.masked() == sorted([*absent, alive[-1]])
        layout = layer.buffer.get_dispatch_layout(layer.idx, EXPERTS)
        with pytest.raises(weft.Unsupported, match="some did not come to the first"):
            layer.buffer.dispatch(
                layer.x,
                num_tokens_per_rank=layout[0],
                num_tokens_per_expert=layout[2],
                is_token_in_rank=layout[3],
                topk_idx=layer.idx,
                topk_weights=torch.ones(TOKENS, TOPK, device=layer.device),
            )
        dist.barrier(group)

    with_deadline(body)()


@pytest.mark.parametrize("absent", [(1,), (0,), (3,), (0, 2)])
def test_who_does_not_come_to_the_first_call_is_masked(ranks, absent):
    ranks(without, RANKS, absent)


def refused(rank, num_ranks, group):
    """A wrong argument of one rank in the first call is refused on all; then they make it."""
    layer = Layer(rank, group)
    wrong = layer.x.float() if rank == 1 else layer.x
    with pytest.raises(weft.InvalidArgument, match="x" if rank == 1 else "rank 1 refused"):
        layer.buffer.low_latency_dispatch(wrong, layer.idx, TOKENS, EXPERTS, use_fp8=False)
    layer.call(list(range(num_ranks)))
    assert layer.masked() == []


def test_a_wrong_argument_in_the_first_call_is_refused_on_all(ranks):
    ranks(refused, RANKS)
