# SPDX-License-Identifier: Apache-2.0
"""What fails on one rank before its call has begun is told on all ranks, and shifts no call."""

import subprocess
import sys

import torch

import weft
from oracle import HIDDEN, inputs
from weft import ops, outputs


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
    assert ex.max_tokens == 32
    plan = ex.plan(idx)
    out = weft.combine(plan, weft.dispatch(plan, x).rows).x
    torch.testing.assert_close(out, x * (idx >= 0).sum(1, keepdim=True))


def test_a_rank_refuses_while_the_others_grow(ranks):
    ranks(larger_for_others, 2)


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


def construction(rank, num_ranks, group):
    found = []
    for name, wrong in (("num_experts", "four"), ("device", "tape:3"), ("timeout", None)):
        given = {"hidden": HIDDEN, "num_experts": 4} | ({name: wrong} if rank == 1 else {})
        found.append(caught(lambda g=given: weft.Exchange(group, **g)))
    weft.Exchange(group, hidden=HIDDEN, num_experts=4)
    return found


def test_wrong_settings_of_an_exchange(ranks):
    others, own = ranks(construction, 2)
    assert [kind for kind, _ in own] == ["InvalidArgument", "RuntimeError", "InvalidArgument"]
    for (kind, text), (_, own_text) in zip(others, own, strict=True):
        assert kind == "InvalidArgument" and f"rank 1 refused the call: {own_text[:40]}" in text


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
