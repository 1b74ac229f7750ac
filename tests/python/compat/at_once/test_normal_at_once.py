# SPDX-License-Identifier: Apache-2.0
"""Normal calls and those of HybridEP as they mostly are, each one call of the core, against the
same calls in steps; and what has to go in steps."""

import gc
import weakref

import pytest
import torch
from buffer_cases import Case
from interrupts import refused_by_interrupt
from ways import Ways

import weft
from weft import fused_a2a
from weft.compat.deep_ep import Buffer, HybridEPBuffer
from weft.compat.deep_ep.at_once import CallsAtOnce

PLAIN = ("_layout_at_once", "_rows_at_once", "_rows_again_at_once", "_sums_at_once")
BY_EXPERT = ("_dispatch_at_once", "_combine_at_once")
WAYS = {(CallsAtOnce, name): name for name in PLAIN}
WAYS |= {(HybridEPBuffer, name): name for name in BY_EXPERT}
LAYOUT = "num_tokens_per_rank num_tokens_per_rdma_rank num_tokens_per_expert is_token_in_rank"


def parts_of(made):
    """Tensors and numbers of what calls returned."""
    parts = []
    for part in made:
        if isinstance(part, tuple):
            parts += parts_of(part)
        elif isinstance(part, torch.Tensor | list) or part is None:
            parts.append(part)
    return parts


def same(one, other):
    one, other = parts_of(one), parts_of(other)
    assert len(one) == len(other)
    for a, b in zip(one, other):
        if isinstance(a, torch.Tensor):
            assert (a.dtype, a.shape, a.stride()) == (b.dtype, b.shape, b.stride())
            assert a.device == b.device and torch.equal(a, b)
        else:
            assert a == b and type(a) is type(b)


def grown_calls(before):
    after = weft.stats()["calls"]
    return {name: n - before.get(name, 0) for name, n in after.items() if n != before.get(name, 0)}


def normal(buffer, case, alignment=1, dtype=torch.bfloat16, **more):
    x = case.x.to(dtype)
    *layout, event = buffer.get_dispatch_layout(case.idx, case.num_experts)
    given = {"topk_idx": case.idx, "topk_weights": case.weights, "expert_alignment": alignment}
    given |= dict(zip(LAYOUT.split(), layout)) | more
    *moved, handle, other_event = buffer.dispatch(x, **given)
    again = buffer.dispatch(2 * x, handle=handle)
    assert again[1:5] == (None,) * 4
    sums = buffer.combine(moved[0], handle, topk_weights=moved[2])
    alone = buffer.combine(again[0], handle)
    for one in (event, other_event, again[5], sums[2], alone[2]):
        assert one.event is None
    plan = handle.plan
    items = tuple(handle) if plan.num_tokens else ()
    return (*layout, *moved, items, again[0], sums[:2], alone[:2], plan.rows_per_expert_list)


def either_way(rank, num_ranks, group, dtype, alignment):
    case = Case(rank, group, 2 * num_ranks, 3, (7, 0, 4), low=-2)
    buffer = Buffer(group)
    buffer.dispatch(case.x, **routing_of(buffer, case))
    made, calls = [], []
    for in_steps in (True, False):
        before = weft.stats()["calls"]
        with Ways(WAYS, in_steps) as ways:
            made.append(normal(buffer, case, alignment, dtype))
        rows = ["_rows_at_once", "_rows_again_at_once", "_sums_at_once", "_sums_at_once"]
        assert ways.seen == ([] if in_steps else ["_layout_at_once", *rows])
        calls.append(grown_calls(before))
    same(*made)
    assert calls[0] == calls[1] == {"get_dispatch_layout": 1, "dispatch": 2, "combine": 2}


def routing_of(buffer, case):
    *layout, _ = buffer.get_dispatch_layout(case.idx, case.num_experts)
    given = {"topk_idx": case.idx, "topk_weights": case.weights}
    return given | dict(zip(LAYOUT.split(), layout))


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("alignment", [1, 8])
def test_calls_at_once_are_those_in_steps(ranks, num_ranks, dtype, alignment):
    ranks(either_way, num_ranks, dtype, alignment)


def of_fp8(rank, num_ranks, group, scales):
    case = Case(rank, group, 2 * num_ranks, 3, (7, 0, 4), low=-2)
    buffer = Buffer(group)
    given, num_tokens = routing_of(buffer, case), len(case.x)
    rows = case.x.to(torch.float8_e4m3fn)
    factors = torch.arange(1.0, 1 + 2 * num_tokens).view(num_tokens, 2)
    if scales == "packed":
        factors = factors.to(torch.int32)
    elif scales == "by column":
        factors = factors.t().contiguous().t()
    elif scales == "one":
        factors = torch.stack([factors[:, :1]] * 2, dim=2)[..., 0]
    buffer.dispatch((rows, factors), **given)
    made = []
    for in_steps in (True, False):
        with Ways(WAYS, in_steps) as ways:
            *out, handle, _ = buffer.dispatch((rows, factors), **given)
            again = buffer.dispatch((rows, 2 * factors), handle=handle)[0]
        assert ways.seen == ([] if in_steps else ["_rows_at_once", "_rows_again_at_once"])
        made.append(tuple(bits_of(part) for part in parts_of((*out, again))))
        assert again[0].dtype == rows.dtype and torch.equal(out[0][1] * 2, again[1])
    same(*made)


def bits_of(part):
    is_bytes = isinstance(part, torch.Tensor) and part.itemsize == 1
    return part.view(torch.uint8) if is_bytes else part


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("scales", ["plain", "packed", "by column", "one"])
def test_fp8_at_once(ranks, num_ranks, scales):
    ranks(of_fp8, num_ranks, scales)


def with_gradients(x, weights, call):
    x, weights = x.clone().requires_grad_(), weights.clone().requires_grad_()
    made = call(x, weights)
    rows, probs = made[:2]
    return (*made, *torch.autograd.grad((rows.float().sum() + (probs**2).sum()), (x, weights)))


def fused(rank, num_ranks, group):
    case = Case(rank, group, 2 * num_ranks, 3, (7, 0, 4), low=-1)

    def call(x, weights):
        given = (x, case.idx, weights, case.num_experts, group)
        rows, experts, probs, counts, handle = fused_a2a.fused_dispatch(*given)
        assert handle.plan.num_tokens == len(x) and not (experts.requires_grad)
        tokens, nothing = fused_a2a.fused_combine(rows * 2, group, handle)
        assert nothing is None and rows.requires_grad == probs.requires_grad == x.requires_grad
        assert tokens.requires_grad == x.requires_grad
        return tokens, probs, rows, experts, counts

    def by_function(x, weights):
        """The autograd functions, which take all by position."""
        given = (x, case.idx, weights, case.num_experts, group, False, False)
        rows, experts, probs, counts, handle = fused_a2a.FusedDispatch.apply(*given)
        assert fused_a2a.FusedCombine.apply(rows * 2, group, handle)[1] is None
        tokens, _ = fused_a2a.FusedCombine.apply(rows * 2, group, handle, False, False)
        return tokens, probs, rows, experts, counts

    with_gradients(case.x, case.weights, call)
    made = []
    for in_steps in (True, False):
        before = weft.stats()["calls"]
        with Ways(WAYS, in_steps) as ways:
            made.append(with_gradients(case.x, case.weights, call))
            made.append(with_gradients(case.x, case.weights, by_function))
            made.append((*call(case.x, case.weights), None, None))
            wide = torch.stack([case.x, case.x], dim=2)[:, :, 0]  # with gaps
            made.append(with_gradients(wide, case.weights, call))
        assert len(ways.seen) == (0 if in_steps else 3 * 4 + 2 + 1)
        calls = grown_calls(before)
        assert calls == {"fused_dispatch": 4, "combine": 5 + 3, "dispatch": 3}
    for one in made[1:]:
        same(made[0][:5], one[:5])
    for one in (made[1], made[3], made[4], made[5], made[7]):
        same(made[0], one)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_fused_calls(ranks, num_ranks):
    ranks(fused, num_ranks)


def by_expert(rank, num_ranks, group, has_map, pad_multiple):
    case = Case(rank, group, 2 * num_ranks, 2, (7, 0, 4), distinct=True)
    table = torch.zeros(len(case.x), case.num_experts + 1, dtype=torch.bool)
    table.scatter_(1, case.idx.masked_fill(case.idx < 0, case.num_experts), True)
    table = table[:, :-1].contiguous()
    if has_map:
        routing = {"routing_map": table, "probs": 0.5 * table}
    else:
        idx = case.idx.clamp(max=case.num_experts - 1)
        routing = {"topk_idx": idx, "topk_weights": case.weights}
        routing["num_of_experts"] = case.num_experts
    sizes = {"hidden_dim": case.x.size(1), "max_num_of_tokens_per_rank": 8}
    buffer = HybridEPBuffer(group, num_local_experts=2, **sizes)

    def call():
        given = {"hidden": case.x, "pad_multiple": pad_multiple, **routing}
        *out, handle = buffer.dispatch_with_permute(**given)
        sums = buffer.combine_with_unpermute(hidden=out[0], probs=out[1], handle=handle)
        alone = buffer.combine_with_unpermute(
            hidden=out[0], handle=handle, pad_multiple=pad_multiple
        )
        config = tuple(map(str, vars(handle.config).items()))
        return *out, sums, alone, list(config), handle.plan.rows_per_expert_list

    call()
    made = []
    for in_steps in (True, False):
        before = weft.stats()["calls"]
        with Ways(WAYS, in_steps) as ways:
            made.append(call())
        names = ["_dispatch_at_once", "_combine_at_once", "_combine_at_once"]
        assert ways.seen == ([] if in_steps else names)
        calls = grown_calls(before)
        assert calls == {"dispatch_with_permute": 1, "combine_with_unpermute": 2}
    same(*made)


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("has_map", [True, False])
@pytest.mark.parametrize("pad_multiple", [None, 4])
def test_calls_by_expert(ranks, num_ranks, has_map, pad_multiple):
    ranks(by_expert, num_ranks, has_map, pad_multiple)


def fused_by_expert(rank, num_ranks, group):
    case = Case(rank, group, 2 * num_ranks, 2, (7, 0, 4), low=0, distinct=True)
    table = torch.zeros(len(case.x), case.num_experts, dtype=torch.bool)
    table.scatter_(1, case.idx.clamp(min=0), True)

    def call(x, probs):
        rows, weights, nothing, counts, handle = fused_a2a.hybrid_ep_dispatch(
            x, table, probs, group, 2
        )
        assert nothing is None and rows.requires_grad == weights.requires_grad == x.requires_grad
        tokens = fused_a2a.hybrid_ep_combine(rows * 2, handle)
        assert tokens.requires_grad == x.requires_grad and not counts.requires_grad
        return tokens, weights, rows, counts

    def by_function(x, probs):
        """The autograd functions, which take all by position."""
        rows, weights, _, counts, handle = fused_a2a.HybridEPDispatch.apply(
            x, table, probs, group, 2
        )
        tokens = fused_a2a.HybridEPCombine.apply(rows * 2, handle)
        return tokens, weights, rows, counts

    probs = 0.5 * table
    with_gradients(case.x, probs, call)
    made = []
    for in_steps in (True, False):
        before = weft.stats()["calls"]
        with Ways(WAYS, in_steps) as ways:
            made.append(with_gradients(case.x, probs, call))
            made.append(with_gradients(case.x, probs, by_function))
            made.append((*call(case.x, probs), None, None))
        assert len(ways.seen) == (0 if in_steps else 3 * 2 + 2)
        calls = grown_calls(before)
        assert calls["hybrid_ep_dispatch"] == 3
        assert calls["dispatch_with_permute"] == calls["combine_with_unpermute"] == 5
    for one in made[1:]:
        same(made[0][:4], one[:4])
    for one in (made[1], made[3], made[4]):
        same(made[0], one)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_fused_calls_by_expert(ranks, num_ranks):
    ranks(fused_by_expert, num_ranks)


def grown(rank, num_ranks, group):
    """More tokens than there is room for, in one call on one rank; then other numbers of rows, for
    which the memory of the call before is too small or too large."""
    buffer = Buffer(group)
    small = Case(rank, group, 2 * num_ranks, 2, (5, 3))
    normal(buffer, small)
    for tokens in ((40, 4100), (5, 3), (4100, 1), (900, 900), (930, 900), (1, 0)):
        case = Case(rank, group, 2 * num_ranks, 2, tokens)
        with Ways(WAYS) as ways:
            made = normal(buffer, case)
        assert len(ways.seen) == 5
        with Ways(WAYS, in_steps=True):
            same(made, normal(buffer, case))
    assert buffer._pool.last.max_tokens > 4100


def test_growth_at_once(ranks):
    ranks(grown, 2)


def grown_by_expert(rank, num_ranks, group):
    sizes = {"hidden_dim": 32, "max_num_of_tokens_per_rank": 8, "num_local_experts": 2}
    buffer = HybridEPBuffer(group, **sizes)
    for tokens in ((5, 3), (40, 700), (5, 3), (700, 1)):
        case = Case(rank, group, 2 * num_ranks, 2, tokens, low=0, distinct=True)
        given = {"hidden": case.x, "topk_idx": case.idx, "num_of_experts": case.num_experts}
        rows, *_, counts, handle = buffer.dispatch_with_permute(**given)
        with Ways(WAYS, in_steps=True):
            again, *_, same_counts, _ = buffer.dispatch_with_permute(**given)
        same((rows, counts), (again, same_counts))
        assert handle.plan.topk == 8


def test_growth_by_expert(ranks):
    ranks(grown_by_expert, 2)


def in_steps(rank, num_ranks, group):
    """A call that is no plain one, or has other sizes than the call before, goes in steps."""
    case = Case(rank, group, 2 * num_ranks, 2, (5, 3))
    buffer = Buffer(group)
    given = routing_of(buffer, case)
    event = buffer.capture()
    rows, *_, handle, _ = buffer.dispatch(case.x, **given)
    wrong = [torch.zeros(len(case.x), 32, dtype=torch.uint8), torch.ones(len(case.x), 1)]
    for x, more in (
        (case.x, {"previous_event": event}),
        (case.x, {"async_finish": True}),
        (case.x, {"num_worst_tokens": 64}),
        (case.x, {"topk_idx": None, "topk_weights": None}),
        (wrong, {}),  # a list
        (case.x.view(torch.uint8), {}),
        (torch.nn.Parameter(case.x), {}),
    ):
        with Ways(WAYS) as ways:
            made = buffer.dispatch(x, **given | more)
        assert ways.seen == [] and made[4] is not None
        buffer.dispatch(case.x, **given)
        with Ways(WAYS) as ways:
            buffer.dispatch(case.x, **given)
        assert ways.seen == ["_rows_at_once"]
    for more in ({"bias": case.x}, {"previous_event": event}, {"async_finish": True}):
        with Ways(WAYS) as ways:
            buffer.combine(rows, handle, **more)
        assert ways.seen == []
    with Ways(WAYS) as ways, torch.no_grad():
        buffer.get_dispatch_layout(case.idx, case.num_experts, async_finish=True)
    assert ways.seen == []


def test_what_is_unusual_goes_in_steps(ranks):
    ranks(in_steps, 2)


def interrupted(rank, num_ranks, group):
    """The others hear of an interrupt, too, that comes before a call has begun."""
    case = Case(rank, group, 2 * num_ranks, 2, (5, 3))
    buffer, is_stopped = Buffer(group), rank == num_ranks - 1
    given = routing_of(buffer, case)
    rows, *_, handle, _ = buffer.dispatch(case.x, **given)
    wide = torch.cat([case.x, case.x], dim=1)
    buffer.dispatch(wide, **given)  # on another exchange, which is not the last one of a call
    buffer.combine(rows, handle)

    calls = (
        lambda: buffer.dispatch(wide, **given),
        lambda: buffer.dispatch(case.x, handle=handle),
        lambda: buffer.combine(rows, handle),
    )
    refused_by_interrupt(calls, Buffer, "_num_sms", is_stopped, num_ranks - 1)


def test_an_interrupt_before_the_call_is_told(ranks):
    ranks(interrupted, 2)


def given_back(rank, num_ranks, group):
    """Results of calls go with their last reference, also those shorter than their memory."""
    case = Case(rank, group, 2 * num_ranks, 2, (400, 300))
    buffer = Buffer(group)
    numbers = (400, 390, 400, 396)
    kept = []
    for in_steps in (False, True):
        with Ways(WAYS, in_steps):
            for number in numbers:
                case.x, case.idx, case.weights = (
                    part[:number].contiguous() for part in (case.all_x[0], case.all_idx[0], WHOLE)
                )
                made = parts_of(normal(buffer, case))
                kept += [weakref.ref(part) for part in made if isinstance(part, torch.Tensor)]
                del made
    gc.collect()
    assert kept and not any(ref() is not None for ref in kept)


WHOLE = torch.full((400, 2), 0.5)


def test_results_are_given_back(ranks):
    ranks(given_back, 2)
