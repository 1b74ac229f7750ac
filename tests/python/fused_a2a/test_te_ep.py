# SPDX-License-Identifier: Apache-2.0
"""Transformer Engine's names against Megatron's, which test_nccl_ep.py compares with loops."""

import functools

import fused_cases as cases
import pytest
import torch

import weft
import weft.fused_a2a as fa
from weft.compat import te_ep

LOCAL, TOPK, HIDDEN, MOST = 3, 2, cases.HIDDEN, 16


def bootstrap(group, capacity=None, topk=TOPK, **more):
    te_ep.ep_finalize()
    sizes = (LOCAL * group.size(), MOST, HIDDEN, topk)
    te_ep.ep_bootstrap(group, *sizes, recv_capacity_per_rank=capacity, **more)


def buffer_of(capacity=None, **more):
    return te_ep.EpBuffer(TOPK, MOST, HIDDEN, LOCAL, capacity, **more)


def as_megatron_0_19(rank, num_ranks, group):
    """It reads a flag, and gives no number of choices."""
    te_ep.ep_finalize()
    assert te_ep._BOOTSTRAPPED is False
    sizes = {"num_experts": LOCAL * num_ranks, "max_tokens_per_rank": MOST, "hidden_dim": HIDDEN}
    te_ep.ep_bootstrap(group, **sizes, recv_capacity_per_rank=64, max_num_sms=0, zero_copy=False)
    assert te_ep._BOOTSTRAPPED is True
    x, idx, probs = cases.inputs(rank, 5, TOPK, LOCAL * num_ranks, torch.bfloat16)
    buffer = buffer_of(64)
    rows, weights, counts = te_ep.ep_dispatch(buffer, x, idx, probs)
    out = te_ep.ep_combine(buffer, rows, num_local_tokens=len(x))
    chosen = (idx >= 0).sum(1, keepdim=True)
    assert torch.equal(out, (x.float() * chosen).to(x.dtype))
    te_ep.ep_finalize()
    with pytest.raises(AttributeError, match="has no attribute '_OTHER'"):
        _ = te_ep._OTHER


def test_megatron_0_19_sets_it_up(ranks):
    ranks(as_megatron_0_19, 2)


def results(x, probs, dispatch, combine):
    """Outputs of a pair of calls, and the gradients."""
    xs, ps = cases.leaves(x, probs)
    rows, row_probs, counts = dispatch(xs, ps)
    out = combine(rows * 2)
    torch.autograd.backward([out, row_probs], [out.detach(), row_probs.detach()])
    return rows, row_probs, counts, out, xs.grad, ps.grad


def same(rank, num_ranks, group, capacity, alignment):
    x, idx, probs = cases.inputs(rank, (5, 0, 11)[rank], TOPK, LOCAL * num_ranks, torch.bfloat16)
    bootstrap(group, capacity)
    buffer = buffer_of(capacity, alignment=alignment)
    assert te_ep.is_ep_bootstrapped() and te_ep.get_ep_group() is group
    assert buffer.eager == (capacity is None) and not buffer.zero_copy
    assert buffer.tokens_per_expert.tolist() == [0] * LOCAL
    assert buffer.total_recv_tokens.tolist() == [0]
    memory = {}
    if capacity is not None:
        memory["recv_tokens"] = te_ep.symm_mem_alloc((capacity, HIDDEN), torch.bfloat16, group)
        assert te_ep.is_symm_backed(memory["recv_tokens"])
        te_ep.release_symm_mem_pool(group)  # and it stays
    prepared = te_ep.ep_prepare(buffer, idx).clone()
    total = buffer.total_recv_tokens.clone()
    here = results(
        x,
        probs,
        lambda xs, ps: te_ep.ep_dispatch(buffer, xs, idx, ps, **memory),
        lambda rows: te_ep.ep_combine(buffer, rows, num_local_tokens=x.size(0)),
    )
    assert torch.equal(prepared, here[2]) and torch.equal(total, buffer.total_recv_tokens)
    fa.ensure_nccl_ep_bootstrapped(group, LOCAL * num_ranks, MOST, capacity, HIDDEN, TOPK)
    other = fa.new_nccl_ep_buffer(TOPK, MOST, capacity, HIDDEN, LOCAL, alignment=alignment)

    def dispatch(xs, ps):
        rows, counts, row_probs = fa.nccl_ep_dispatch(other, xs, idx, ps)
        return rows, row_probs, counts

    there = results(
        x, probs, dispatch, lambda rows: fa.nccl_ep_combine(other, rows, num_local_tokens=x.size(0))
    )
    used = int(here[2].sum())
    for one, two in zip(here[:2], there[:2]):
        assert one.shape == two.shape and torch.equal(one[:used], two[:used])
    for one, two in zip(here[2:], there[2:]):
        assert torch.equal(one, two)
    whole = te_ep.ep_combine(buffer, here[0].detach())
    assert whole.shape == (MOST, HIDDEN) and not whole[x.size(0) :].any()
    fa.nccl_ep_finalize()
    te_ep.ep_finalize()
    te_ep.ep_finalize()
    assert not te_ep.is_ep_bootstrapped() and te_ep.get_ep_group() is None


@pytest.mark.parametrize("alignment", [0, 8])
@pytest.mark.parametrize("capacity", [None, 96])
def test_calls_are_those_of_nccl_ep(ranks, capacity, alignment):
    ranks(same, 3, capacity, alignment)


def refused(rank, num_ranks, group):
    is_wrong = rank == 1
    x, idx, probs = cases.inputs(rank, 4, TOPK, LOCAL * num_ranks, torch.bfloat16)
    bootstrap(group)
    buffer = buffer_of()
    wrong = (
        (NotImplementedError, "tokens has dtype torch.float32", (x.float(), idx, probs), {}),
        (TypeError, "topk_weights has dtype torch.float64", (x, idx, probs.double()), {}),
        (TypeError, "topk_idx has dtype torch.float32", (x, idx.float(), probs), {}),
        (ValueError, "recv_tokens without", (x, idx, probs), {"recv_tokens": x}),
    )
    for kind, text, given, more in wrong:
        # The others hear the reason of the rank that is wrong.
        if not is_wrong:
            kind, given, more = weft.InvalidArgument, (x, idx, probs), {}
        with pytest.raises(kind, match=text):
            te_ep.ep_dispatch(buffer, *given, **more)
    rows, _, _ = te_ep.ep_dispatch(buffer, x, idx, probs)
    te_ep.ep_combine(buffer, rows)
    te_ep.ep_finalize()


def test_what_one_rank_does_wrong_all_ranks_raise(ranks):
    ranks(refused, 2)


def combined_wrongly(rank, num_ranks, group):
    x, idx, probs = cases.inputs(rank, MOST + 4, TOPK, LOCAL * num_ranks, torch.bfloat16)
    bootstrap(group)
    buffer = buffer_of()
    rows, _, _ = te_ep.ep_dispatch(buffer, x, idx, probs)

    def combine(is_wrong, wrong=buffer, num_local_tokens=None):
        which, wanted = (wrong, num_local_tokens) if is_wrong else (buffer, MOST + 4)
        te_ep.ep_combine(which, rows, num_local_tokens=wanted)

    for reason, more in (
        ("num_local_tokens = 16 of 20 tokens", {}),
        ("num_local_tokens = 19 of 20 tokens", {"num_local_tokens": 19}),
        ("has had no dispatch", {"wrong": buffer_of()}),
    ):
        call = functools.partial(combine, **more)
        wrong_on_the_last(rank, num_ranks, group, ValueError, reason, call)
    out = te_ep.ep_combine(buffer, rows, num_local_tokens=MOST + 4)
    torch.testing.assert_close(out, x * (idx >= 0).sum(1, keepdim=True))
    te_ep.ep_finalize()


def test_a_combine_loses_no_token_silently(ranks):
    ranks(combined_wrongly, 2)


def alone(_rank, _num_ranks, group):
    te_ep.ep_finalize()
    with pytest.raises(RuntimeError, match="ep_bootstrap comes first"):
        buffer_of()
    for option in ("zero_copy", "drop_on_overflow"):
        with pytest.raises(ValueError, match=f"{option} without recv_capacity_per_rank"):
            bootstrap(group, **{option: True})
    with pytest.raises(ValueError, match="num_topk = 0"):
        te_ep.ep_bootstrap(group, 3, 4, HIDDEN, 0)
    bootstrap(group)
    with pytest.raises(RuntimeError, match="called before"):
        te_ep.ep_bootstrap(group, 3, 4, HIDDEN, 1)
    with pytest.raises(ValueError, match="alignment = 3"):
        buffer_of(alignment=3)
    with pytest.raises(NotImplementedError, match="payload_dtype = torch.float16"):
        buffer_of(payload_dtype=torch.float16)
    with pytest.raises(NotImplementedError, match="recipe"):
        buffer_of(dispatch_fwd_quant_recipe=object())
    te_ep.ep_finalize()


def test_wrong_settings_are_refused(ranks):
    ranks(alone, 1)


def wrong_on_the_last(rank, num_ranks, group, kind, reason, call):
    """call() raises on all ranks: it is wrong on the last one only."""
    is_wrong = rank == num_ranks - 1
    with pytest.raises(kind if is_wrong else weft.InvalidArgument, match=reason) as found:
        call(is_wrong)
    assert is_wrong or f"rank {num_ranks - 1} refused the call" in str(found.value)


def set_up(rank, num_ranks, group):
    x, idx, probs = cases.inputs(rank, 4, TOPK, LOCAL * num_ranks, torch.bfloat16)
    te_ep.ep_finalize()
    for kind, reason, more in (
        (ValueError, "num_topk = 0", {"topk": 0}),
        (ValueError, "zero_copy without recv_capacity_per_rank", {"zero_copy": True}),
        (ValueError, "drop_on_overflow without", {"drop_on_overflow": True}),
    ):
        wrong_on_the_last(
            rank,
            num_ranks,
            group,
            kind,
            reason,
            lambda w, m=more: bootstrap(group, **m if w else {}),
        )
        assert not te_ep.is_ep_bootstrapped()
    bootstrap(group)

    def layer(is_wrong=False, again=False, **more):
        if is_wrong and again:
            te_ep.ep_bootstrap(group, LOCAL * num_ranks, MOST, HIDDEN, TOPK)
        buffer = buffer_of(**more if is_wrong else {})
        rows, _, _ = te_ep.ep_dispatch(buffer, x, idx, probs)
        return te_ep.ep_combine(buffer, rows, num_local_tokens=4)

    for kind, reason, more in (
        (RuntimeError, "called before", {"again": True}),
        (ValueError, "alignment = 3", {"alignment": 3}),
        (NotImplementedError, "payload_dtype = torch.float16", {"payload_dtype": torch.float16}),
        (NotImplementedError, "recipe", {"combine_bwd_quant_recipe": object()}),
    ) * 2:
        wrong_on_the_last(rank, num_ranks, group, kind, reason, lambda w, m=more: layer(w, **m))
        torch.testing.assert_close(layer(), x * (idx >= 0).sum(1, keepdim=True))
    te_ep.ep_finalize()


def test_all_ranks_hear_of_wrong_settings_of_one(ranks):
    ranks(set_up, 2)
