# SPDX-License-Identifier: Apache-2.0
"""Recomputation that takes the forward's layouts: Automodel's own way to ask for it, over its own
modules and over Weft's. Both have to give the bits of a layer that is not recomputed."""

import contextlib
import threading
from collections.abc import Callable

import automodel_modules as automodel
import pytest
import torch
from torch.utils.checkpoint import checkpoint

import weft
from ranks import device_of
from weft.dispatcher import MoEFlexTokenDispatcher, TokenDispatcherConfig

HIDDEN, EXPERTS, TOPK = 64, 8, 3
PAIRS = {  # recorder and scope of each backend
    "deepep": ("DispatchReplayRecorder", "dispatch_replay_scope"),
    "hybridep": ("HybridEPDispatchReplayRecorder", "hybridep_dispatch_replay_scope"),
}
# How Automodel wraps the contexts of a checkpointed block.
ASKS = {
    "deepep": "_replay_deepep_dispatch_on_recompute",
    "hybridep": "_replay_hybridep_dispatch_on_recompute",
}


def contexts(name: str) -> Callable:
    """Returns what Automodel gives to `checkpoint` as `context_fn`."""
    wrap = automodel.function_of(
        "nemo_automodel.components.moe.parallelizer",
        ASKS[name],
        Callable=Callable,
        AbstractContextManager=contextlib.AbstractContextManager,
        contextmanager=contextlib.contextmanager,
    )
    return wrap(lambda: (contextlib.nullcontext(), contextlib.nullcontext()))


def leaves(rank, num_tokens):
    maker = torch.Generator().manual_seed(rank)
    x = torch.randn(num_tokens, HIDDEN, generator=maker)
    scores = torch.randn(num_tokens, EXPERTS, generator=maker).softmax(-1)
    probs, experts = scores.topk(TOPK, dim=-1)
    experts[:1, 1:] = -1
    x, probs, experts = (tensor.to(device_of(rank)) for tensor in (x, probs, experts))
    return x.requires_grad_(), probs.requires_grad_(), experts


@contextlib.contextmanager
def layouts_counted(fused_a2a):
    """The dispatches inside whose routing was new, by the buffers that made them."""
    made = []
    buffer, grouped = fused_a2a.Buffer, fused_a2a.HybridEPBuffer
    in_steps, at_once = buffer._send, buffer._rows_at_once

    def send(*given, **options):
        made.append("deepep")
        return in_steps(*given, **options)

    def send_at_once(*given):
        sent = at_once(*given)
        made.extend(["deepep"] * (sent is not None))
        return sent

    def permute(buffer, **options):
        made.extend(["hybridep"] * (options.get("handle") is None))
        return dispatch(buffer, **options)

    dispatch = grouped.dispatch_with_permute
    buffer._send, buffer._rows_at_once = send, send_at_once
    grouped.dispatch_with_permute = permute
    try:
        yield made
    finally:
        buffer._send, buffer._rows_at_once = in_steps, at_once
        grouped.dispatch_with_permute = dispatch


def block(fused_a2a, name, group, x, probs, experts):
    """Two expert layers, one on the output of the other."""
    local = EXPERTS // group.size()
    for _ in range(2):
        if name == "deepep":
            rows, ids, row_probs, _, handle = fused_a2a.fused_dispatch(
                x, experts, probs, EXPERTS, group
            )
            factors = torch.where(ids < 0, 0.0, row_probs * (2 + ids)).sum(1, keepdim=True)
            x, _ = fused_a2a.fused_combine((rows * factors).tanh(), group, handle)
            continue
        is_chosen = torch.nn.functional.one_hot(experts + 1, EXPERTS + 1)[..., 1:]
        dense = (probs.unsqueeze(-1) * is_chosen).sum(1)
        rows, row_probs, _, counts, handle = fused_a2a.hybrid_ep_dispatch(
            x, is_chosen.any(1), dense, group, local
        )
        ids = torch.repeat_interleave(torch.arange(local), counts.cpu()).to(x.device)
        factors = (row_probs * (2 + ids)).unsqueeze(1)
        x = fused_a2a.hybrid_ep_combine((rows * factors).tanh(), handle, counts.sum())
    return x


def recomputed(rank, num_ranks, group, whose, name, num_tokens):
    with automodel.in_place(whose) as (fused_a2a, _), automodel.without_gpu():
        fused_a2a.free_buffer()
        fused_a2a.reset_hybrid_ep_buffer()
        plain = leaves(rank, num_tokens[rank])
        out = block(fused_a2a, name, group, *plain)
        out.square().sum().backward()
        found = []
        for context_fn in (None, contexts(name)):
            options = {} if context_fn is None else {"context_fn": context_fn}
            again = leaves(rank, num_tokens[rank])
            with layouts_counted(fused_a2a) as made:
                same = checkpoint(
                    block, fused_a2a, name, group, *again, use_reentrant=False, **options
                )
                assert len(made) == 2
                same.square().sum().backward()
            assert set(made) == {name}
            assert torch.equal(same, out)
            assert torch.equal(again[0].grad, plain[0].grad)
            assert torch.equal(again[1].grad, plain[1].grad)
            found.append(len(made))
    return found


@pytest.mark.parametrize("whose", automodel.WHOSE)
@pytest.mark.parametrize("name", PAIRS)
@pytest.mark.parametrize("num_tokens", [[9, 9], [5, 0]])
def test_recomputation_makes_no_layouts(ranks, whose, name, num_tokens):
    for without, replayed in ranks(recomputed, 2, whose, name, num_tokens):
        assert (without, replayed) == (4, 2)


def recorded(rank, num_ranks, group, whose, name):
    """Two records without their handles; a replay past the last one makes layouts of its own."""
    fused_a2a, _ = automodel.modules(whose)
    recorder_name, scope_name = PAIRS[name]
    recorder, scope = getattr(fused_a2a, recorder_name)(), getattr(fused_a2a, scope_name)
    inputs = leaves(rank, 5 + rank)
    with automodel.without_gpu(), torch.no_grad():
        with scope(recorder, "record"):
            out = block(fused_a2a, name, group, *inputs)
        if name == "hybridep":
            recorder.finalize()
            recorder.finalize()
        recorder.rewind()
        with layouts_counted(fused_a2a) as made, scope(recorder, "replay"):
            again = block(fused_a2a, name, group, *inputs)
            assert not made and recorder.replay_misses == 0
            with scope(None, "replay"):  # a scope of nothing ends it
                block(fused_a2a, name, group, *inputs)
            assert len(made) == 2 and recorder.replay_misses == 0
            past = block(fused_a2a, name, group, *inputs)  # with layouts of its own
            assert len(made) == 4 and recorder.replay_misses == 2
    assert torch.equal(out, again) and torch.equal(out, past)
    handles = [entry[0] for entry in recorder._records]
    rest = [
        [value.cpu() if torch.is_tensor(value) else value for value in entry[1:]]
        for entry in recorder._records
    ]
    assert len(handles) == 2 and not any(t.requires_grad for t in rest[0] if torch.is_tensor(t))
    return rest


@pytest.mark.parametrize("name", PAIRS)
def test_records_hold_what_automodel_keeps(ranks, name):
    own, ours = (ranks(recorded, 2, whose, name) for whose in automodel.WHOSE)
    for rank in range(2):
        for theirs, entry in zip(own[rank], ours[rank], strict=True):
            for wanted, value in zip(theirs, entry, strict=True):
                torch.testing.assert_close(value, wanted, rtol=0, atol=0)


@pytest.mark.parametrize("whose", automodel.WHOSE)
@pytest.mark.parametrize("name", PAIRS)
def test_scopes_nest_and_belong_to_a_thread(whose, name):
    fused_a2a, _ = automodel.modules(whose)
    recorder, scope = (getattr(fused_a2a, which) for which in PAIRS[name])
    prefix = "_" if name == "deepep" else "_hybridep_"
    state = getattr(fused_a2a, f"{prefix}dispatch_replay_state")
    outer, inner, seen = recorder(), recorder(), []

    def now():
        return state.recorder, state.mode

    with scope(outer, "record"):
        with pytest.raises(KeyError), scope(inner, "replay"):
            assert now() == (inner, "replay")
            other = threading.Thread(target=lambda: seen.append(now()))
            other.start()
            other.join()
            raise KeyError
        assert now() == (outer, "record")
        with scope(None, "record"):
            assert now() == (None, None)
        if name == "deepep":
            assert (fused_a2a._active_recorder(), fused_a2a._replay_mode()) == (outer, "record")
        else:
            with pytest.raises(ValueError, match="Unsupported HybridEP dispatch replay mode: x"):
                with scope(outer, "x"):
                    pass
    assert now() == (None, None) and seen == [(None, None)]


@pytest.mark.parametrize("whose", automodel.WHOSE)
@pytest.mark.parametrize("name", PAIRS)
def test_recorders_count_misses(whose, name):
    fused_a2a, _ = automodel.modules(whose)
    recorder = getattr(fused_a2a, PAIRS[name][0])()
    assert recorder.take() is None and recorder.replay_misses == 1
    if name == "deepep":
        recorder.record("first")
        recorder.record("second")
        wanted = ["first", "second"]
    else:
        recorder.record("first", torch.tensor([2, 3]))
        recorder.record("second", torch.tensor([0, 7]))
        recorder.finalize()
        wanted = [("first", 5), ("second", 7)]

    def take():
        entry = recorder.take()
        return entry if name == "deepep" or entry is None else (entry[0], entry[2])

    assert [take(), take(), take()] == [*wanted, None] and recorder.replay_misses == 2
    recorder.rewind()
    assert take() == wanted[0]


def by_expert(rank, num_ranks, group):
    """Weft's dispatcher, whose rows arrive by expert, makes no plan in the recomputation either."""
    import weft
    import weft.fused_a2a as fused_a2a

    fused_a2a.free_buffer()
    local = EXPERTS // num_ranks
    config = TokenDispatcherConfig(num_moe_experts=EXPERTS, moe_router_topk=TOPK)
    own = list(range(rank * local, (rank + 1) * local))
    dispatcher = MoEFlexTokenDispatcher(local, own, config, group)

    def moe(x, probs, experts):
        rows, counts, row_probs = dispatcher.token_permutation2(x, x.size(0), probs, experts)
        each = torch.repeat_interleave(2.0 + torch.tensor(own), counts.cpu())
        factors = each.to(x.device) * row_probs
        return dispatcher.token_unpermutation((rows * factors.unsqueeze(1)).tanh())

    plain = leaves(rank, 4 * rank)
    out = moe(*plain)
    out.square().sum().backward()
    made, plan_and_dispatch = [], weft.plan_and_dispatch

    def noted(*given, **options):
        made.append(1)
        return plan_and_dispatch(*given, **options)

    again = leaves(rank, 4 * rank)
    weft.plan_and_dispatch = noted
    try:
        with automodel.in_place("weft"):
            wrapped = contexts("deepep")
        same = checkpoint(moe, *again, use_reentrant=False, context_fn=wrapped)
        same.square().sum().backward()
    finally:
        weft.plan_and_dispatch = plan_and_dispatch
    assert len(made) == 1
    assert torch.equal(same, out)
    assert torch.equal(again[0].grad, plain[0].grad)
    assert torch.equal(again[1].grad, plain[1].grad)


def test_rows_by_expert_are_replayed(ranks):
    ranks(by_expert, 2)


def with_a_budget(rank, num_ranks, group, budget):
    """A fixed number of rows is replayed as it was, enough or not; fewer rows are refused."""
    fused_a2a, _ = automodel.modules("weft")
    fused_a2a.reset_hybrid_ep_buffer()
    x, probs, experts = leaves(rank, 6)
    is_chosen = torch.nn.functional.one_hot(experts + 1, EXPERTS + 1)[..., 1:]
    dense = (probs.unsqueeze(-1) * is_chosen).sum(1)
    local = EXPERTS // num_ranks

    def tokens():
        rows, row_probs, _, counts, handle = fused_a2a.hybrid_ep_dispatch(
            x, is_chosen.any(1), dense, group, local, num_permuted_tokens=budget
        )
        used = int(counts.sum())
        rows = rows * torch.nn.functional.pad(row_probs[:used], (0, budget - used)).unsqueeze(1)
        return fused_a2a.hybrid_ep_combine(rows, handle, budget), int(handle[-1])

    recorder = fused_a2a.HybridEPDispatchReplayRecorder()
    with torch.no_grad():
        with fused_a2a.hybridep_dispatch_replay_scope(recorder, "record"):
            wanted, overflow = tokens()
        recorder.finalize()
        with layouts_counted(fused_a2a) as made:
            with fused_a2a.hybridep_dispatch_replay_scope(recorder, "replay"):
                found, again = tokens()
        assert overflow == again and not made
        assert torch.equal(found, wanted)
        if overflow:
            return overflow
        recorder.rewind()
        budget = None  # then as many as are used
        with fused_a2a.hybridep_dispatch_replay_scope(recorder, "replay"):
            with pytest.raises(weft.InvalidArgument, match="num_permuted_tokens"):
                tokens()
    return overflow


@pytest.mark.parametrize("budget, is_short", [(8, True), (40, False)])
def test_budgets_are_replayed(ranks, budget, is_short):
    assert ranks(with_a_budget, 2, budget) == [is_short, is_short]
