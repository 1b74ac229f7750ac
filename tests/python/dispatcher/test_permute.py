# SPDX-License-Identifier: Apache-2.0
"""Rows by expert and back, against loops."""

import pytest
import torch

from weft.dispatcher import permute, sort_chunks_by_idxs, unpermute
from weft.dispatcher.permute import gather_rows, sum_rows


def _case(num_tokens=7, num_experts=5, hidden=4, seed=0, dtype=torch.float64):
    maker = torch.Generator().manual_seed(seed)
    tokens = torch.randn(num_tokens, hidden, generator=maker).to(dtype)
    routing_map = torch.rand(num_tokens, num_experts, generator=maker) < 0.4
    probs = torch.rand(num_tokens, num_experts, generator=maker).to(dtype)
    return tokens, routing_map, probs


def _entries(routing_map):
    """(token, expert) by expert, then token."""
    num_tokens, num_experts = routing_map.shape
    return [(t, e) for e in range(num_experts) for t in range(num_tokens) if routing_map[t, e]]


@pytest.mark.parametrize("num_tokens,num_experts", [(7, 5), (1, 1), (0, 3), (64, 3)])
def test_rows_are_by_expert_then_token(num_tokens, num_experts):
    tokens, routing_map, probs = _case(num_tokens, num_experts)
    entries = _entries(routing_map)
    out = permute(tokens, routing_map, probs=probs, num_out_tokens=len(entries))
    assert out.row_token.tolist() == [t for t, _ in entries]
    assert torch.equal(out.rows, tokens[out.row_token])
    assert out.probs.tolist() == [probs[t, e].item() for t, e in entries]
    assert out.pad_offsets is None and out.tokens_per_expert is None
    back = unpermute(out.rows, out.row_token, tokens.shape)
    torch.testing.assert_close(back, tokens * routing_map.sum(1, keepdim=True))


def test_unfused_permute_requires_the_number_of_rows():
    tokens, routing_map, _ = _case()
    with pytest.raises(AssertionError, match="num_out_tokens is required"):
        permute(tokens, routing_map)
    assert permute(tokens, routing_map, fused=True).rows.shape[0] == routing_map.sum()


def test_weighted_unpermute_multiplies_each_row():
    tokens, routing_map, probs = _case()
    out = permute(tokens, routing_map, num_out_tokens=int(routing_map.sum()))
    back = unpermute(out.rows, out.row_token, tokens.shape, probs=probs, routing_map=routing_map)
    torch.testing.assert_close(back, tokens * (probs * routing_map).sum(1, keepdim=True))
    with pytest.raises(AssertionError, match="Mask must be provided"):
        unpermute(out.rows, out.row_token, tokens.shape, probs=probs)


@pytest.mark.parametrize("capacity", [0, 2, 7, 9])
def test_drop_and_pad_gives_each_expert_its_first_tokens_then_zero_rows(capacity):
    tokens, routing_map, probs = _case()
    num_experts = routing_map.shape[1]
    out = permute(
        tokens, routing_map, probs=probs, num_out_tokens=capacity * num_experts, drop_and_pad=True
    )
    kept = torch.zeros_like(routing_map)
    for e in range(num_experts):
        first = routing_map[:, e].nonzero().flatten()[:capacity].tolist()
        kept[first, e] = True
        block = slice(e * capacity, (e + 1) * capacity)
        padding = capacity - len(first)
        assert out.row_token[block].tolist() == first + [tokens.shape[0]] * padding
        assert torch.equal(out.rows[block][: len(first)], tokens[first])
        assert not out.rows[block][len(first) :].any()
        assert out.probs[block].tolist() == probs[first, e].tolist() + [0.0] * padding
    back = unpermute(
        out.rows,
        out.row_token,
        tokens.shape,
        probs=probs,
        routing_map=routing_map,
        drop_and_pad=True,
    )
    torch.testing.assert_close(back, tokens * (probs * kept).sum(1, keepdim=True))


@pytest.mark.parametrize("num_tokens", [0, 7, 40])
def test_fused_permute_pads_each_block(num_tokens):
    tokens, routing_map, probs = _case(num_tokens)
    counts = routing_map.sum(0)
    out = permute(
        tokens,
        routing_map,
        probs=probs,
        num_out_tokens=int(counts.sum()),
        fused=True,
        tokens_per_expert=counts,
        align_size=4,
    )
    assert out.tokens_per_expert.tolist() == [-(-c // 4) * 4 for c in counts.tolist()]
    assert out.rows.shape[0] == int(out.tokens_per_expert.sum())
    begin = 0
    for e, padded in enumerate(out.tokens_per_expert.tolist()):
        chosen = routing_map[:, e].nonzero().flatten()
        block = slice(begin, begin + padded)
        assert torch.equal(out.rows[block][: len(chosen)], tokens[chosen])
        assert not out.rows[block][len(chosen) :].any()
        assert not out.probs[block][len(chosen) :].any()
        begin += padded
    back = unpermute(
        out.rows,
        out.row_token,
        tokens.shape,
        probs=probs,
        routing_map=routing_map,
        pad_offsets=out.pad_offsets,
    )
    torch.testing.assert_close(back, tokens * (probs * routing_map).sum(1, keepdim=True))


@pytest.mark.parametrize("mode", ["plain", "drop_and_pad", "padded"])
def test_gradients(mode):
    tokens, routing_map, probs = _case()
    counts = routing_map.sum(0)
    options = {
        "plain": {"num_out_tokens": int(counts.sum())},
        "drop_and_pad": {"num_out_tokens": 2 * 5, "drop_and_pad": True},
        "padded": {
            "num_out_tokens": int(counts.sum()),
            "fused": True,
            "tokens_per_expert": counts,
            "align_size": 4,
        },
    }[mode]

    def round_trip(tokens, probs):
        out = permute(tokens, routing_map, probs=probs, **options)
        back = unpermute(
            out.rows.sin() * out.probs[:, None],
            out.row_token,
            tokens.shape,
            drop_and_pad=mode == "drop_and_pad",
            pad_offsets=out.pad_offsets,
        )
        weighed = unpermute(
            out.rows,
            out.row_token,
            tokens.shape,
            probs=probs,
            routing_map=routing_map,
            drop_and_pad=mode == "drop_and_pad",
            pad_offsets=out.pad_offsets,
        )
        return back, weighed

    inputs = (tokens.requires_grad_(), probs.requires_grad_())
    assert torch.autograd.gradcheck(round_trip, inputs)
    assert torch.autograd.gradgradcheck(round_trip, inputs)


def test_half_types_are_summed_in_fp32_and_rounded_once():
    rows = (torch.randn(64, 8, generator=torch.Generator().manual_seed(1)) * 100).bfloat16()
    index = torch.arange(64) % 3
    out = sum_rows(rows, index, 4)
    expected = torch.zeros(4, 8)
    for row, t in zip(rows.float(), index.tolist()):
        expected[t] += row
    assert torch.equal(out, expected.bfloat16())


def test_absent_rows_are_zero_and_go_nowhere():
    rows = torch.randn(3, 2, dtype=torch.float64, requires_grad=True)
    index = torch.tensor([3, 0, 3, 2])
    assert torch.equal(gather_rows(rows, index, True)[[0, 2]], torch.zeros(2, 2).double())
    assert torch.autograd.gradcheck(lambda r: gather_rows(r, index, True), (rows,))
    wide = torch.randn(4, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda r: sum_rows(r, index, 3, True), (wide,))
    assert gather_rows(rows[:0], torch.tensor([0, 0]), True).shape == (2, 2)


@pytest.mark.parametrize("as_tensor", [False, True])
def test_chunks_are_sorted_with_their_probs(as_tensor):
    rows = torch.arange(12.0).reshape(6, 2).requires_grad_()
    probs = torch.arange(6.0).requires_grad_()
    sizes, order = [1, 0, 3, 2], [3, 1, 0, 2]
    if as_tensor:
        sizes, order = torch.tensor(sizes), torch.tensor(order)
    out, out_probs = sort_chunks_by_idxs(rows, sizes, order, probs=probs)
    assert out_probs.tolist() == [4, 5, 0, 1, 2, 3]
    assert torch.equal(out, rows[[4, 5, 0, 1, 2, 3]])
    (out * torch.arange(6.0)[:, None]).sum().backward()
    assert rows.grad[:, 0].tolist() == [2, 3, 4, 5, 0, 1]
    assert sort_chunks_by_idxs(rows, sizes, order)[1] is None
