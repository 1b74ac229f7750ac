# SPDX-License-Identifier: Apache-2.0
"""A failure on one rank before its call has begun is told on all ranks, and shifts no call."""

import resource
import signal
import subprocess
import sys

import pytest
import torch

import weft
from oracle import HIDDEN, inputs
from weft import exchange, ops, outputs
from weft.compat.deep_ep import Buffer


def caught(call):
    """The class and the text of what `call` raises."""
    try:
        call()
    except Exception as error:
        return type(error).__name__, str(error)
    return "nothing", ""


def wrong_where_nobody_comes(rank, num_ranks, group):
    """Rank 1 refuses a call that rank 0 never makes."""
    ex = weft.Exchange(group, hidden=HIDDEN, num_experts=4, timeout=0.5)
    return caught(lambda: ex.plan([[0]])) if rank == 1 else caught(ex.check)


def test_a_reason_that_nobody_hears_is_told_where_it_arose(ranks):
    nothing, (name, text) = ranks(wrong_where_nobody_comes, 2)
    assert nothing == ("nothing", "")
    assert "topk_idx" in text and "list" in text, (name, text)


def wrong_on_rank_1(rank, num_ranks, group):
    """Every call that rank 1 gets wrong, and after each of them one that is right on both ranks."""
    ex = weft.Exchange(group, hidden=HIDDEN, num_experts=4)
    x, idx, weights = inputs(rank, 6, 2, 4)
    plan = ex.plan(idx)
    rows = weft.dispatch(plan, x).rows
    found = []

    def attempt(call, right, wrong):
        found.append(caught(lambda: call(wrong if rank == 1 else right)))
        assert torch.equal(weft.dispatch(plan, x).rows, rows)

    def chosen(grad, scale):
        return weft.combine(plan, rows.clone().requires_grad_(grad), scale=scale)

    attempt(lambda a: weft.dispatch(plan, a), x, x.tolist())
    attempt(lambda a: weft.dispatch(plan, a), x, torch.empty_like(x, device="meta"))
    attempt(lambda a: weft.dispatch(plan, a), x, x.to_sparse())
    attempt(lambda a: weft.dispatch(plan, a), x, x[None])
    attempt(lambda a: weft.dispatch(plan, a), x, x.to(torch.complex64))
    attempt(lambda a: weft.dispatch(plan, x, a), weights, None if rank == 0 else 3)
    attempt(lambda a: weft.dispatch(plan, x.byte(), None, a), x[:, :4], x[:, 0])
    attempt(lambda a: weft.dispatch(plan, x, num_sms=a), 0, "all")
    attempt(lambda a: weft.plan_and_dispatch(ex, idx, x, **a), {}, {"rows": 3})
    attempt(lambda a: weft.combine(plan, a), rows, {})
    attempt(lambda a: chosen(a, "plan" if rank == 1 else "none"), True, True)
    attempt(lambda a: ex.plan(a), idx, idx.tolist())
    attempt(lambda a: ex.plan(idx, pad_multiple=a), 1, "one")
    attempt(lambda a: ex.plan(idx, expert_stride=a), 0, 1.5)
    attempt(lambda a: ex.plan(routing_map=a), torch.ones(6, 4).bool(), [[True]])
    for options in ({}, {"row_budget": 40}, {"overflow": "error", "row_budget": 40}):
        attempt(lambda a, o=options: weft.plan_and_dispatch(ex, idx, a, **o), x, "x")
        attempt(lambda a, o=options: weft.plan_and_dispatch(ex, a, x, **o), idx, 5)
    key = ops.register(ex)
    attempt(lambda a: ops.dispatch(x, idx, weights, key, layout=a), "rank_major", "by rank")
    return found


def test_wrong_arguments_are_told_on_all_ranks(ranks):
    others, own = ranks(wrong_on_rank_1, 2)
    for (kind, text), (own_kind, own_text) in zip(others, own, strict=True):
        assert own_kind in ("InvalidArgument", "NotImplementedError"), own_text
        assert kind == "InvalidArgument" and "rank 1 refused the call: " in text
        assert own_text.split(" [")[0][:60] in text  # the real reason
    said = [text.split("refused the call: ")[1] for _, text in others]
    assert said[0].startswith("x is a list (a tensor is expected)")
    assert said[1].startswith("x lies on a device that is neither CPU nor CUDA")
    assert said[6].startswith("scales has 1 dimensions")
    assert said[8].startswith("rows = 3 is no option")
    assert "has no gradient" in said[10]


def larger_for_others(rank, num_ranks, group):
    """A rank whose arguments are wrong takes part while the others' exchange grows."""
    ex = weft.Exchange(group, hidden=HIDDEN, num_experts=4, max_tokens=4)
    x, idx, _ = inputs(rank, 20, 2, 4)
    for call in (
        lambda: ex.plan(None if rank == 1 else idx, layout=3 if rank == 1 else "rank_major"),
        lambda: ex.plan_and_dispatch(idx, x if rank == 0 else None),
    ):
        kind, text = caught(call)
        assert kind == "InvalidArgument" and (rank == 1 or "rank 1 refused the call" in text)
    assert ex.max_tokens == 4  # there was another reason than size
    plan = ex.plan(idx)
    assert ex.max_tokens == 32
    out = weft.combine(plan, weft.dispatch(plan, x).rows).x
    torch.testing.assert_close(out, x * (idx >= 0).sum(1, keepdim=True))


def test_a_rank_refuses_while_the_others_want_to_grow(ranks):
    ranks(larger_for_others, 2)


def other_calls(rank, num_ranks, group, on_peer_loss):
    """Rank 1 plans while the others make another call: all hear of it in that call, and torch's
    process group is not used."""
    ex = weft.Exchange(group, hidden=HIDDEN, num_experts=4, max_tokens=8, on_peer_loss=on_peer_loss)
    x, idx, _ = inputs(rank, 6, 2, 4)
    many = torch.zeros(20, 1, dtype=torch.int64)
    plan = ex.plan(idx)
    rows = weft.dispatch(plan, x).rows

    def gather(*_):
        raise AssertionError("a gather of the process group")

    usual, ex.group.gather_numbers = ex.group.gather_numbers, gather
    for call, name in (
        (lambda: weft.dispatch(plan, x), "dispatch"),
        (lambda: weft.combine(plan, rows), "combine"),
    ):
        for own in (
            lambda: ex.plan(idx),
            lambda: ex.plan(many),
            lambda: weft.plan_and_dispatch(ex, many, many.float().repeat(1, HIDDEN)),
        ):
            kind, text = caught(own if rank == 1 else call)
            assert kind == "InvalidArgument", text
            assert rank == 1 or "rank 1 calls plan" in text
            assert rank == 0 or f"rank 0 calls {name}" in text
    ex.group.gather_numbers = usual
    assert torch.equal(weft.dispatch(plan, x).rows, rows)
    assert ex.plan(many if rank == 1 else many[:0]).num_tokens == (20 if rank == 1 else 0)
    assert ex.max_tokens == 32


def other_calls_of_buffers(rank, num_ranks, group):
    """Rank 1 dispatches where rank 0 combines, also what needs another exchange or a larger one."""
    buffer = Buffer(group)
    x, idx, weights = inputs(rank, 6, 2, 4)
    x = x.bfloat16()

    def dispatch(x, idx, weights):
        sizes = buffer.get_dispatch_layout(idx, 4)
        layout = {"num_tokens_per_rank": sizes[0], "num_tokens_per_expert": sizes[2]}
        return buffer.dispatch(
            x, topk_idx=idx, topk_weights=weights, is_token_in_rank=sizes[3], **layout
        )

    rows, *_, handle, _ = dispatch(x, idx, weights)
    want = buffer.combine(rows, handle)[0]
    many = (x.repeat(1000, 1), idx.repeat(1000, 1), weights.repeat(1000, 1))
    for given in ((x, idx, weights), (x.repeat(1, 2), idx, weights), many):
        kind, text = caught(
            lambda g=given: dispatch(*g) if rank == 1 else buffer.combine(rows, handle)
        )
        assert kind in ("InvalidArgument", "BadCall"), text
        assert rank == 1 or "rank 1 calls plan" in text
        assert torch.equal(buffer.combine(rows, handle)[0], want)


def test_a_rank_dispatches_where_the_others_combine_by_a_buffer(ranks):
    ranks(other_calls_of_buffers, 2)


@pytest.mark.parametrize("on_peer_loss", ["fail", "shrink"])
def test_a_rank_plans_where_the_others_make_another_call(ranks, on_peer_loss):
    ranks(other_calls, 2, on_peer_loss)


def short_of_memory(rank, num_ranks, group):
    """Rank 1 has no memory for what a call returns."""
    ex = weft.Exchange(group, hidden=HIDDEN, num_experts=4)
    x, idx, _ = inputs(rank, 6, 2, 4)
    plan = ex.plan(idx)
    rows = weft.dispatch(plan, x).rows
    usual, found = outputs.of_bytes, []

    def of_bytes(*given):
        raise torch.OutOfMemoryError("no room for rows")

    for call in (
        lambda: weft.dispatch(plan, x),
        lambda: weft.plan_and_dispatch(ex, idx, x),
        lambda: weft.plan_and_dispatch(ex, idx, x, row_budget=30),
        lambda: weft.plan_and_dispatch(ex, idx, x.clone().requires_grad_()),
    ):
        if rank == 1:
            outputs.of_bytes = of_bytes
        found.append(caught(call))
        outputs.of_bytes = usual
        assert torch.equal(weft.dispatch(plan, x).rows, rows)
    return found


def test_memory_of_outputs(ranks):
    others, own = ranks(short_of_memory, 2)
    assert all(kind == "OutOfMemoryError" for kind, _ in own)
    for kind, text in others:
        assert kind == "InvalidArgument" and "rank 1 refused the call: no room for rows" in text


def backward_alone(rank, num_ranks, group):
    """A gradient of the wrong kind on one rank is refused in the backward, and no call shifts."""
    ex = weft.Exchange(group, hidden=HIDDEN, num_experts=4)
    x, idx, _ = inputs(rank, 6, 2, 4)
    plan = ex.plan(idx)
    rows = weft.dispatch(plan, x.clone().requires_grad_()).rows
    usual = ex.combine
    if rank == 1:
        ex.combine = lambda plan, grad, *more, **options: usual(plan, grad[None], *more, **options)
    kind, text = caught(lambda: rows.sum().backward())
    assert kind == "InvalidArgument" and "rows has 3 dimensions" in text
    ex.combine = usual
    assert torch.equal(weft.dispatch(plan, x).rows, rows)


def test_a_backward_that_fails_on_one_rank(ranks):
    ranks(backward_alone, 2)


def no_room_for_growth(rank, num_ranks, group, on_peer_loss):
    """Rank 1 has no memory to grow for a while: the exchange stays as it was, and grows then."""
    options = {"on_peer_loss": on_peer_loss, "timeout": 5}
    ex = weft.Exchange(group, hidden=HIDDEN, num_experts=2, max_tokens=4, **options)
    few, many = (torch.zeros(tokens, 1, dtype=torch.int64) for tokens in (2, 400_000))
    plan = ex.plan(few)
    # Memory that ranks share is a file. So is the store of the process group, a much smaller one.
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    if rank == 1:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 22, limit[1]))
    try:
        with pytest.raises(weft.Error, match="on rank 1"):
            ex.plan(many)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert (ex.max_tokens, ex.core.max_tokens) == (4, 4)
    x = torch.ones(2, HIDDEN)
    assert torch.equal(weft.combine(plan, weft.dispatch(plan, x).rows).x, x)
    assert ex.plan(few).num_tokens == 2
    assert ex.plan(many).num_tokens == 400_000


@pytest.mark.parametrize("on_peer_loss", ["fail", "shrink"])
def test_an_exchange_that_could_not_grow_grows_later(ranks, on_peer_loss):
    ranks(no_room_for_growth, 2, on_peer_loss)


def wrong_plans(rank, num_ranks, group):
    """Rank 1 gives something that is no plan, or a plan of another exchange."""
    exchange._alive.clear()  # other tests' caches may keep some; the one that is meant is alone
    ex = weft.Exchange(group, hidden=HIDDEN, num_experts=4)
    x, idx, _ = inputs(rank, 6, 2, 4)
    plan = ex.plan(idx)
    rows = weft.dispatch(plan, x).rows
    found = []
    for call in (
        lambda: weft.dispatch(plan if rank == 0 else None, x),
        lambda: weft.dispatch(plan if rank == 0 else ex, x),
        lambda: weft.combine(*((plan, rows) if rank == 0 else (rows, plan))),
        lambda: ex.combine(plan if rank == 0 else 3, rows),
    ):
        found.append(caught(call))
        assert torch.equal(weft.dispatch(plan, x).rows, rows)
    other = weft.Exchange(group, hidden=2 * HIDDEN, num_experts=4)
    foreign = other.plan(idx)
    for call in (
        lambda: ex.dispatch(plan if rank == 0 else foreign, x),
        lambda: weft.dispatch(plan if rank == 0 else None, x) if rank == 0 else ex.dispatch(0, x),
    ):
        found.append(caught(call))
        assert torch.equal(weft.dispatch(plan, x).rows, rows)
    return found


def test_a_plan_that_is_none(ranks):
    others, own = ranks(wrong_plans, 2)
    assert all(kind == "InvalidArgument" for kind, _ in others + own)
    assert all("rank 1 refused the call: " in text for _, text in others)
    said = [text.split(": ", 1)[1] for _, text in own]
    assert said[0].startswith("plan is a NoneType (expected what Exchange.plan returns)")
    assert said[1].startswith("plan is a Exchange") and said[2].startswith("plan is a Tensor")
    assert said[4].startswith(f"plan is of another exchange, for hidden = {2 * HIDDEN}")


def construction(rank, num_ranks, group):
    found = []
    for name, wrong in (
        ("num_experts", "four"),
        ("device", "tape:3"),
        ("timeout", "long"),
        ("device", "meta"),
        ("hidden", "64"),
        ("hidden", 6),
    ):
        given = {"hidden": HIDDEN, "num_experts": 4} | ({name: wrong} if rank == 1 else {})
        found.append(caught(lambda g=given: weft.Exchange(group, **g)))
    weft.Exchange(group, hidden=HIDDEN, num_experts=4)
    return found


def test_wrong_settings_of_an_exchange(ranks):
    others, own = ranks(construction, 2)
    kinds = ["RuntimeError" if at == 1 else "InvalidArgument" for at in range(len(own))]
    assert [kind for kind, _ in own] == kinds
    for (kind, text), (_, own_text) in zip(others, own, strict=True):
        assert kind == "InvalidArgument" and f"rank 1 refused the call: {own_text[:40]}" in text
    assert "device = 'meta' (expected cpu or cuda)" in own[3][1]
    assert "hidden = '64' is a str (expected int)" in own[4][1]
    assert "hidden = 6 (expected a multiple of" in own[5][1]


def test_a_group_that_is_none():
    with pytest.raises(weft.InvalidArgument, match="group = 3 is a int .expected a process group"):
        weft.Exchange(3, hidden=HIDDEN, num_experts=4)


AT_EXIT = """
import torch, torch.distributed as dist, weft
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
exchange = weft.Exchange(hidden=16, num_experts=4)
plan = exchange.plan(torch.zeros(3, 2, dtype=torch.int64))
rows = weft.dispatch(plan, torch.randn(3, 16, requires_grad=True)).rows
"""


def test_gloo_may_let_go_before_the_interpreter_ends():
    stopped = """
import types, weft.group
weft.group.time = types.SimpleNamespace(monotonic=lambda: 5.0, sleep=print)
"""
    done = subprocess.run([sys.executable, "-c", stopped + AT_EXIT], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "0.5\n"), done.stderr


def test_nothing_is_said_at_exit():
    done = subprocess.run([sys.executable, "-c", AT_EXIT], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
