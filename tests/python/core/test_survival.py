# SPDX-License-Identifier: Apache-2.0
"""on_peer_loss="shrink": ranks leave, die and are masked, and the others go on without them."""

import contextlib
import gc
import os
import signal
import sys
import threading
import weakref

import pytest
import torch
import torch.distributed as dist

import weft
from domain_cases import NUM_RANKS, two_domains
from oracle import HIDDEN, gather, inputs

PER_RANK = 2  # experts


def exchange_of(group, num_ranks, **options):
    experts = PER_RANK * num_ranks
    return weft.Exchange(
        group, hidden=HIDDEN, num_experts=experts, on_peer_loss="shrink", **options
    )


def is_alive(idx, alive):
    """bool [T, K]: routes to experts of ranks that are alive."""
    return torch.isin(idx.div(PER_RANK, rounding_mode="floor"), torch.tensor(alive)) & (idx >= 0)


def scales_of(idx):
    """Factor by which each route's expert multiplies."""
    return (idx + 1).float()


def run_experts(plan, rows, scales):
    """scales [PER_RANK]: a parameter of each expert of this rank."""
    each = torch.repeat_interleave(scales, torch.tensor(plan.core.rows_per_expert))
    return rows * each.unsqueeze(1)


def check_renormalisation(ex, idx, weights, kept):
    """Checks that the routes left of a token get the weight of all of them."""
    factor = ex.renormalisation(idx, weights)
    all_of_it, left = ((where * weights).sum(1) for where in (idx >= 0, kept))
    torch.testing.assert_close(factor.view(-1) * left, torch.where(left > 0, all_of_it, 0.0))
    assert (factor[left == 0] == 1).all()
    (grad,) = torch.autograd.grad((factor.view(-1) * left)[left > 0].sum(), weights)
    torch.testing.assert_close(grad, ((idx >= 0) & (left > 0).unsqueeze(1)).float())


def forward_and_backward(ex, num_ranks, step):
    """step(name) before each of four calls."""
    rank, num_experts = ex.rank, PER_RANK * num_ranks
    x, idx, weights = inputs(rank, 7 + rank, 3, num_experts)
    x.requires_grad_()
    weights.requires_grad_()
    scales = torch.arange(1.0 + PER_RANK * rank, 1.0 + PER_RANK * (rank + 1)).requires_grad_()
    step("plan")
    plan = ex.plan(idx)
    step("dispatch")
    rows, row_weights, _ = weft.dispatch(plan, x, weights)
    step("combine")
    out = weft.combine(plan, run_experts(plan, rows, scales) * row_weights.view(-1, 1)).x
    kept = is_alive(idx, ex.alive())
    torch.testing.assert_close(out, x * (kept * weights * scales_of(idx)).sum(1, keepdim=True))
    check_renormalisation(ex, idx, weights, kept)
    step("backward")
    upstream = inputs(rank, 7 + rank, 3, num_experts, seed=1)[0]
    out.backward(upstream)
    kept = is_alive(idx, ex.alive())
    inner = (x * upstream).sum(1, keepdim=True)
    factors = (kept * weights * scales_of(idx)).sum(1, keepdim=True)
    torch.testing.assert_close(x.grad, upstream * factors)
    torch.testing.assert_close(weights.grad, kept * scales_of(idx) * inner)
    wanted = torch.zeros(PER_RANK)
    for source in ex.alive():
        x, idx, weights = inputs(source, 7 + source, 3, num_experts)
        upstream = inputs(source, 7 + source, 3, num_experts, seed=1)[0]
        share = weights * (x * upstream).sum(1, keepdim=True)
        for expert in range(PER_RANK):
            wanted[expert] += share[idx == PER_RANK * rank + expert].sum()
    torch.testing.assert_close(scales.grad, wanted)


STEPS = ["plan", "dispatch", "combine", "backward"]


class _Gone(Exception):
    """This rank has left."""


def leaving_at(name, rank, num_ranks, group):
    told = []

    def on_loss(report):
        told.append(report)
        assert ex.report() == report and ex.alive() == report.alive

    ex = exchange_of(group, num_ranks, on_loss=on_loss)
    assert ex.report() == weft.CallReport(0, list(range(num_ranks)), [], [])
    for number in range(num_ranks):

        def step(now, number=number):
            if now == name and rank == number < num_ranks - 1:
                raise _Gone

        forward_and_backward(ex, num_ranks, step)
        if number < num_ranks - 1:
            left = list(range(number + 1, num_ranks))
            lost_experts = list(range(PER_RANK * (number + 1)))
            assert told[number:] == [weft.CallReport(number + 1, left, [number], lost_experts)]
    assert ex.alive() == [rank] and ex.report().lost == []


def leaving(rank, num_ranks, group):
    """A rank leaves before each call in turn, then another; the last one goes on alone."""
    for name in STEPS:
        with contextlib.suppress(_Gone):
            leaving_at(name, rank, num_ranks, group)
        gc.collect()  # an exchange that is no more has left
        dist.barrier(group)


def test_the_rest_goes_on_when_ranks_leave(ranks):
    ranks(leaving, 3)


def killed(rank, num_ranks, group, name):
    told = []
    ex = exchange_of(group, num_ranks, on_loss=told.append)
    forward_and_backward(ex, num_ranks, lambda _: None)

    def step(now):
        if now == name and rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)

    forward_and_backward(ex, num_ranks, step)
    forward_and_backward(ex, num_ranks, lambda _: None)
    assert told == [weft.CallReport(1, [0, 2], [1], [2, 3])]


@pytest.mark.parametrize("name", ["dispatch", "backward"])
def test_gradients_are_those_of_the_survivors_when_a_rank_is_killed(ranks, name):
    ranks(killed, 3, name, dying=(1,))


def killed_between_domains(rank, num_ranks, group):
    del group
    with two_domains() as group:
        told = []
        ex = exchange_of(group, num_ranks, on_loss=told.append)
        forward_and_backward(ex, num_ranks, lambda _: None)

        def step(now):
            if now == "combine" and rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)

        forward_and_backward(ex, num_ranks, step)
        forward_and_backward(ex, num_ranks, lambda _: None)
        assert told == [weft.CallReport(1, [0, 2, 3], [1], [2, 3])]


def test_ranks_of_several_domains_go_on_when_one_is_killed(ranks):
    ranks(killed_between_domains, NUM_RANKS, dying=(1,))


def interrupted(rank, num_ranks, group):
    """Ctrl-C in a call that waits ends this rank's exchange, and the others go on."""
    ex = exchange_of(group, num_ranks, timeout=300)
    x, idx, _ = inputs(rank, 6, 2, PER_RANK * num_ranks)
    plan = ex.plan(idx)
    if rank == 0:
        timer = threading.Timer(1.5, os.kill, (os.getpid(), signal.SIGINT))
        with pytest.raises(KeyboardInterrupt):
            timer.start()
            weft.dispatch(plan, x)
        timer.join()
    dist.barrier(group)
    if rank == 0:
        with pytest.raises(weft.Error):
            ex.plan(idx)
        return
    rows = weft.dispatch(plan, x).rows
    assert ex.report() == weft.CallReport(1, [1, 2], [0], [0, 1])
    kept = is_alive(idx, [1, 2])
    torch.testing.assert_close(weft.combine(plan, rows).x, x * kept.sum(1, keepdim=True))


def test_an_interrupted_rank_is_lost(ranks):
    ranks(interrupted, 3)


def beside_rows(rank, num_ranks, group):
    """Counts are added up once, however often the call had to be made."""
    ex = exchange_of(group, num_ranks)
    x, idx, _ = inputs(rank, 9, 2, PER_RANK * num_ranks)
    plan, sums = ex.plan(idx), torch.zeros(PER_RANK, dtype=torch.int32)
    if rank == 0:
        ex.close()
        return
    out = ex.core.dispatch(
        plan.core,
        (x, None, None, None, None, sums, None),
        False,
        weft._core.Options(),
        None,
    )
    assert ex.alive() == list(range(1, num_ranks))
    counts = plan.core.rows_per_expert
    assert sums.tolist() == counts and out[0].size(0) == sum(counts)


def test_counts_are_added_once(ranks):
    ranks(beside_rows, 3)


def masking(rank, num_ranks, group):
    """A masked rank is out, whichever rank masks it and however often."""
    ex = exchange_of(group, num_ranks)
    x, idx, _ = inputs(rank, 5, 3, PER_RANK * num_ranks)
    ex.plan(idx)
    with pytest.raises(weft.InvalidArgument, match=f"mask: rank {rank} "):
        ex.mask([rank])
    with pytest.raises(weft.InvalidArgument, match="mask: rank 7 "):
        ex.mask([7])
    with pytest.raises(weft.InvalidArgument, match="mask: ranks = "):
        ex.mask(["1"])
    dist.barrier(group)
    if rank == 0:
        ex.mask([1])
        ex.mask(r for r in (1, 3))
    if rank == 2:
        ex.mask([4])
    dist.barrier(group)
    if rank in (1, 3, 4):
        with pytest.raises(weft.PeerError, match="was given up by the others"):
            ex.plan(idx)
        return
    plan, rows = ex.plan_and_dispatch(idx, x)
    assert ex.alive() == [0, 2]
    kept = is_alive(idx, [0, 2])
    torch.testing.assert_close(weft.combine(plan, rows.rows).x, x * kept.sum(1, keepdim=True))


def test_masked_ranks_are_out(ranks):
    ranks(masking, 5)


def refusing(rank, num_ranks, group):
    settings = {"hidden": HIDDEN, "num_experts": PER_RANK * num_ranks}
    usual = weft.Exchange(group, **settings)
    with pytest.raises(weft.Unsupported, match="was not made with on_peer_loss = shrink"):
        usual.mask([1 - rank])
    assert usual.report() == weft.CallReport(0, [0, 1], [], [])
    with pytest.raises(weft.InvalidArgument, match="on_peer_loss = 'ignore' is unknown"):
        weft.Exchange(group, **settings, on_peer_loss="ignore")
    with pytest.raises(weft.InvalidArgument, match="on_loss = 3 is a int"):
        weft.Exchange(group, **settings, on_peer_loss="shrink", on_loss=3)
    with pytest.raises(weft.InvalidArgument, match="on_peer_loss"):
        weft.Exchange(group, **settings, on_peer_loss="shrink" if rank == 0 else "fail")
    with pytest.raises(weft.InvalidArgument):  # wrong on one rank
        weft.Exchange(group, **settings, on_loss=print if rank == 0 else "print")


def test_what_cannot_be_is_refused(ranks):
    ranks(refusing, 2)


def growing(rank, num_ranks, group):
    """An exchange grows while all are there, and afterwards among those that are left."""
    told = []
    ex = exchange_of(group, num_ranks, max_tokens=4, on_loss=told.append)
    _, idx, _ = inputs(rank, 40, 2, PER_RANK * num_ranks)
    older = ex.plan(idx[:3])
    plan = ex.plan(idx)
    assert ex.max_tokens == 64
    if rank == num_ranks - 1:
        ex.close()
        return
    alone = [idx.repeat(2, 1), idx][rank]  # one rank wants more
    larger = ex.plan(alone)
    assert ex.max_tokens == 128 and [report.lost for report in told] == [[2]]
    out = weft.combine(larger, torch.ones(larger.num_rows, HIDDEN)).x
    kept = is_alive(alone, [0, 1]).sum(1, keepdim=True)
    torch.testing.assert_close(out, kept.expand(-1, HIDDEN).float())
    wrong = torch.tensor([[0, ex.num_experts * (1 - rank)]])  # on one rank, and no lack of room
    with pytest.raises(weft.InvalidArgument, match="topk_idx"):
        ex.plan(wrong)
    assert ex.max_tokens == 128
    rows = torch.ones(older.num_rows, HIDDEN)
    out = weft.combine(older, rows).x  # from before it grew twice
    kept = is_alive(idx[:3], [0, 1]).sum(1, keepdim=True)
    torch.testing.assert_close(out, kept.expand(-1, HIDDEN).float())
    assert weft.combine(plan, torch.ones(plan.num_rows, HIDDEN)).x.size(0) == 40


def test_an_exchange_grows_without_lost_ranks(ranks):
    ranks(growing, 3)


def raising_exchange(group, num_ranks):
    def on_loss(report):
        raise RuntimeError(f"lost {report.lost} of {ex.num_ranks}")

    ex = exchange_of(group, num_ranks, on_loss=on_loss)
    return ex


def raising(rank, num_ranks, group):
    """A call that has ended stays good, whatever the callback does; and a callback that holds the
    exchange does not keep it alive."""
    ex = raising_exchange(group, num_ranks)
    if rank == 0:
        ex.close()
        return
    heard = []
    usual, sys.unraisablehook = sys.unraisablehook, lambda one: heard.append(str(one.exc_value))
    try:
        plan = ex.plan(torch.tensor([[0, 2]]))
    finally:
        sys.unraisablehook = usual
    assert heard == ["lost [0] of 2"] and plan.core.rows_per_expert == [1, 0]
    kept = weakref.ref(ex)
    del ex, plan
    gc.collect()
    assert kept() is None


def test_what_a_callback_raises_changes_nothing(ranks):
    ranks(raising, 2)


_kept = {}  # exchanges of this process, from one call of a test to the next


def killed_for_now(rank, num_ranks, group):
    ex = _kept["ex"] = exchange_of(group, num_ranks, timeout=60)
    with pytest.raises(weft.InvalidArgument, match="readmit"):
        ex.readmit([1 - rank % 2])
    with pytest.raises(weft.InvalidArgument, match="readmit: ranks = "):
        ex.readmit(["1"])
    for call in (ex.mask, ex.readmit):
        with pytest.raises(weft.InvalidArgument, match="rank 1099511627776 is out of range"):
            call([2**40])
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    _kept["plan"] = ex.plan(torch.tensor([[0, 3]]))
    assert ex.alive() == [0, 2]


def coming_back(rank, num_ranks, group):
    """A new process in the place of a rank that was killed; then all go on as if it had always been
    there, and plans of before are refused."""
    ex = _kept.pop("ex", None)
    invitation = gather(group, ex.invitation() if rank == 0 else "")[0]
    if rank == 1:
        for text in (invitation[:-5], "weft-" + "5b" * 1_000_000, "x" + "ä" * 50):
            with pytest.raises(weft.InvalidArgument, match="is no invitation"):
                weft.Group.rejoin(1, text)
        ex = exchange_of(weft.Group.rejoin(1, invitation), num_ranks, timeout=60)
    else:
        ex.readmit([1])
    assert ex.alive() == [0, 1, 2] and ex.report().epoch == 2
    forward_and_backward(ex, num_ranks, lambda _: None)
    assert ex.alive() == [0, 1, 2]
    if rank == 1:
        ex.refuse("dispatch", "no plan of before")
    else:
        with pytest.raises(weft.InvalidArgument):
            weft.dispatch(_kept.pop("plan"), torch.zeros(1, HIDDEN))
    forward_and_backward(ex, num_ranks, lambda _: None)


def test_a_new_process_takes_the_place_of_a_lost_rank(ranks):
    ranks(killed_for_now, 3, dying=(1,))
    ranks(coming_back, 3)
