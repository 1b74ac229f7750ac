# SPDX-License-Identifier: Apache-2.0
"""Ranks that are late, pass what is wrong, or have no memory: what all ranks hear on GPUs."""

import time

import pytest
import torch
import torch.distributed as dist
from call_cases import HIDDEN, LOCAL, Inputs, domains_of, exchange_of

import weft
from weft import fused_a2a
from weft.compat import deep_ep

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")


def unknown_expert(rank, num_ranks, group):
    device = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    inputs = Inputs(rank, num_ranks, device, (37, 8))
    buffer = deep_ep.HybridEPBuffer(group, HIDDEN, 37, LOCAL)

    def send(idx):
        return buffer.dispatch_with_permute(
            hidden=inputs.x, topk_idx=idx, num_of_experts=inputs.num_experts
        )

    wrong = inputs.idx.clone()
    if rank == 0:
        wrong[3, 1] = inputs.num_experts
    text = rf"topk_idx\[3, 1\] = {inputs.num_experts} is out of range" if rank == 0 else "rank 0"
    with pytest.raises(weft.InvalidArgument, match=text):
        send(wrong)
    rows, *_ = send(inputs.idx)
    assert rows.size(1) == HIDDEN


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_an_expert_that_is_none_is_refused_on_every_rank(ranks, num_ranks):
    ranks(unknown_expert, num_ranks)


def late(rank, num_ranks, group, has_graphs=True):
    """The statistics of waits name the rank that is late, in calls that are captured too."""
    device = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    inputs, who, seconds = Inputs(rank, num_ranks, device, (16,)), num_ranks - 1, 0.2
    buffer = deep_ep.Buffer(group, 0, 1 << 20, low_latency_mode=True, num_qps_per_rank=LOCAL)
    waits = [torch.zeros(num_ranks, dtype=torch.int64, device=device) for _ in range(2)]

    def dispatch():
        return buffer.low_latency_dispatch(
            inputs.x, inputs.idx, 16, inputs.num_experts, None, waits[0], use_fp8=False
        )

    rows, _, handle, *_ = dispatch()

    def combine():
        buffer.low_latency_combine(
            rows, inputs.idx, inputs.weights, handle, combine_wait_recv_cost_stats=waits[1]
        )

    def check(call, told):
        torch.cuda.synchronize()
        told.zero_()
        torch.cuda.synchronize()
        dist.barrier(group)
        time.sleep(seconds * (rank == who))
        call()
        found = told.tolist()
        assert min(found) >= 0, found
        if rank != who:
            assert max(found) == found[who] > seconds * 1e6 / 2, found

    combine()
    check(dispatch, waits[0])
    check(combine, waits[1])
    for call, told in zip((dispatch, combine), waits if has_graphs else ()):
        stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
        with torch.cuda.stream(stream):
            call()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, stream=stream):
            kept = call()
        check(graph.replay, told)
        del kept


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_waits_name_who_is_late(ranks, num_ranks):
    ranks(late, num_ranks)


def late_in_domains(rank, num_ranks, group):
    with domains_of(1, num_ranks) as other:
        late(rank, num_ranks, other, has_graphs=False)


def test_waits_name_who_is_late_in_another_domain(ranks):
    ranks(late_in_domains, 2)


def wrong_on_one_rank(rank, num_ranks, group):
    """All ranks raise what the last one passes wrong, and the next call is not shifted."""
    device = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    inputs, is_wrong = Inputs(rank, num_ranks, device, (7,)), rank == num_ranks - 1

    def dispatch(x):
        return fused_a2a.fused_dispatch(x, inputs.idx, inputs.weights, inputs.num_experts, group)

    rows = dispatch(inputs.x)[0]
    for wrong in (inputs.x.tolist(), inputs.x[0], inputs.x.cpu(), inputs.x[:, :3]):
        kind = Exception if is_wrong else weft.InvalidArgument
        with pytest.raises(kind, match="" if is_wrong else f"rank {num_ranks - 1}"):
            dispatch(wrong if is_wrong else inputs.x)
        assert torch.equal(dispatch(inputs.x)[0], rows)
    fused_a2a.free_buffer()


def test_all_ranks_raise_what_one_passes_wrong(ranks):
    ranks(wrong_on_one_rank, 2)


def grows_late(rank, num_ranks, group):
    inputs = Inputs(rank, num_ranks, torch.device("cuda", rank % torch.cuda.device_count()))
    torch.cuda.set_device(inputs.device)
    plan = exchange_of(group, inputs).plan(inputs.idx)
    rows = weft.dispatch(plan, inputs.x).rows.float()  # there is staging for rows of 16 bits
    torch.cuda.synchronize()
    if rank == 1:
        time.sleep(0.5)
    # Meanwhile rank 0 waits for its kernel in a copy on the default stream, which keeps its other
    # threads from the driver.
    out = weft.combine(plan, rows).x.cpu()
    num_routes = (inputs.idx >= 0).sum(1, keepdim=True)
    assert torch.equal(out, (inputs.x.float() * num_routes).cpu())


def test_a_rank_grows_while_another_waits_for_it(ranks):
    ranks(grows_late, 2)


def no_memory_on_one_rank(rank, num_ranks, group):
    """All ranks raise where the last one has no room for outputs, and go on afterwards."""
    device = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    inputs, is_short = Inputs(rank, num_ranks, device, (4000,)), rank == num_ranks - 1
    exchange = exchange_of(group, inputs, max_tokens=4000)
    plan = exchange.plan(inputs.idx)
    held = weft.dispatch(plan, inputs.x).rows  # else its memory would do for the next
    rows = held.cpu()
    for call in (
        lambda: weft.dispatch(plan, inputs.x),
        lambda: weft.plan_and_dispatch(exchange, inputs.idx, inputs.x, row_budget=20_000),
    ):
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        if is_short:
            torch.cuda.set_per_process_memory_fraction(1e-6, device)
        kind = torch.OutOfMemoryError if is_short else weft.InvalidArgument
        with pytest.raises(kind, match="" if is_short else f"rank {num_ranks - 1} refused"):
            call()
            torch.cuda.synchronize()
            exchange.check()  # where nothing has waited for the GPU
        torch.cuda.set_per_process_memory_fraction(1.0, device)
        assert torch.equal(weft.dispatch(plan, inputs.x).rows.cpu(), rows)
    del held


def test_all_ranks_raise_where_one_has_no_memory(ranks):
    ranks(no_memory_on_one_rank, 2)


def refused_next(is_wrong, exchange, call, text):
    """call() raises on the rank that hears of its mistake; the others' calls are queued by then,
    and they hear of it afterwards."""
    if is_wrong:
        with pytest.raises(weft.InvalidArgument, match=text):
            call()
        return
    call()
    torch.cuda.synchronize()
    with pytest.raises(weft.InvalidArgument, match="refused"):
        exchange.check()


EMPTY, HALF = 5, 7  # tokens without choices, and with one


def other_choices(rank, num_ranks, group, has_hook):
    """The last rank combines by choices that its dispatch did not have: in another tensor, or in
    the dispatch's own."""
    device = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    inputs, is_wrong = Inputs(rank, num_ranks, device, (16,)), rank == num_ranks - 1
    idx = inputs.idx.clone()
    topk, token = idx.size(1), 2
    idx[token] = torch.arange(topk, device=device)
    idx[EMPTY], idx[HALF] = -1, -1
    idx[HALF, 0] = 0
    buffer = deep_ep.Buffer(group, 0, 1 << 20, low_latency_mode=True, num_qps_per_rank=LOCAL)
    rows, _, handle, *_ = buffer.low_latency_dispatch(
        inputs.x, idx, 16, inputs.num_experts, use_fp8=False
    )

    def combine(choices):
        out, _, hook = buffer.low_latency_combine(
            rows, choices, inputs.weights, handle, return_recv_hook=has_hook
        )
        if has_hook:
            hook()
        torch.cuda.synchronize()
        return out

    want = combine(idx)
    good, is_other = idx.clone(), torch.arange(16, device=device) == token
    strange = idx.clone()
    strange[token, 0] = topk
    for choices in (strange, idx):
        if choices is idx and is_wrong:
            idx[token] = idx[token].flip(0)
        out = combine(choices if is_wrong else idx)
        if is_wrong:
            assert out[token].isnan().all()
        assert torch.equal(out[~(is_other & is_wrong)], want[~(is_other & is_wrong)])
        idx.copy_(good)
        text = rf"source_idx\[{token}, \d\] = \d+ .the plan was made of"
        refused_next(is_wrong, handle.plan.exchange, lambda: combine(idx), text)
        assert torch.equal(combine(idx), want)
    for without in (EMPTY, HALF):  # an expert where the dispatch had none
        if is_wrong:
            idx[without, 1] = topk
        combine(idx)
        idx.copy_(good)
        text = rf"source_idx\[{without}, 1\] = {topk} .the plan was made of -1"
        refused_next(is_wrong, handle.plan.exchange, lambda: combine(idx), text)


@pytest.mark.parametrize("has_hook", [False, True])
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_choices_that_are_not_its_dispatchs_are_told_to_the_next_call(ranks, num_ranks, has_hook):
    ranks(other_choices, num_ranks, has_hook)


def no_global_scale(rank, num_ranks, group):
    device = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    inputs, is_wrong = Inputs(rank, num_ranks, device, (7,)), rank == num_ranks - 1
    exchange = exchange_of(group, inputs)
    plan = exchange.plan(inputs.idx)
    source = exchange.dispatch(plan, torch.full_like(inputs.x, rank)).rows[:, 0]
    for bad in (0.0, -1.0, float("inf"), float("nan")):
        scale = torch.full((1,), bad if is_wrong else 1.0, device=device)
        made = exchange.dispatch(plan, inputs.x, quantise="nvfp4", global_scale=scale)
        is_nan = made.scales.float().isnan()
        assert torch.equal(is_nan.all(1), source == num_ranks - 1)
        assert torch.equal(is_nan.any(1), source == num_ranks - 1)
        text = f"global_scale = {bad:g} .expected"
        refused_next(is_wrong, exchange, lambda: exchange.dispatch(plan, inputs.x), text)
        exchange.dispatch(plan, inputs.x)


def test_a_global_scale_that_is_none_is_told_to_the_next_call(ranks):
    ranks(no_global_scale, 2)
