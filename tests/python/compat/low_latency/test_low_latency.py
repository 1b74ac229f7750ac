# SPDX-License-Identifier: Apache-2.0
"""Low-latency calls of `Buffer` against loops over everybody's inputs."""

import contextlib
import os
import signal
import sys

import pytest
import torch
from buffer_cases import (
    NUM_MAX,
    check_handle,
    expected_rows,
    gather,
    low_latency_case,
    routes,
)

import weft
from weft.compat.deep_ep import Buffer


def weighted(case, all_rows, weights, skip=None):
    """The sums: those of a rank's rows first, rounded, then of the ranks in order, rounded."""
    out = torch.zeros(case.x.shape, dtype=torch.float32)
    for rank, rows in enumerate(all_rows):
        here = torch.zeros_like(out)
        for expert in range(case.local):
            number, row = rank * case.local + expert, 0
            for source, idx in enumerate(case.all_idx):
                for token, k in (idx == number).nonzero().tolist():
                    if source == case.rank and not (skip is not None and skip[token, k]):
                        here[token] += rows[expert, row].float() * weights[token, k]
                    row += 1
        out += here
    return out


def plain(rank, num_ranks, group, low, topk):
    case, buffer = low_latency_case(rank, num_ranks, group, low=low, topk=topk, hidden=24)
    stats = torch.full((case.local,), 5, dtype=torch.int32)
    waited = torch.zeros(num_ranks, dtype=torch.int64)
    options = {"use_fp8": False, "x_global_scale": torch.ones(1)}  # without NVFP4 it is ignored
    options["use_ue8m0_for_sf"] = low  # likewise
    recv_x, count, handle, event, hook = buffer.low_latency_dispatch(
        case.x, case.idx, NUM_MAX, case.num_experts, stats, waited, **options
    )
    assert event.event is None and hook is None
    assert recv_x.dtype == torch.bfloat16 and recv_x.shape == (case.local, num_ranks * NUM_MAX, 24)
    check_handle(case, handle, count)
    assert torch.equal(stats, count + 5)
    for expert in range(case.local):
        want = expected_rows(case, expert, case.all_x)
        assert torch.equal(recv_x[expert, : want.size(0)], want)

    gen = torch.Generator().manual_seed(rank)
    rows = torch.randn(recv_x.shape, generator=gen).to(torch.bfloat16)
    want = weighted(case, gather(group, rows), case.weights)
    out, event, hook = buffer.low_latency_combine(rows, case.idx, case.weights, handle)
    assert event.event is None and hook is None and out.dtype == torch.bfloat16
    torch.testing.assert_close(out.float(), want, rtol=0.02, atol=0.02)
    place = torch.full_like(case.x, 3.0)
    same, _, _ = buffer.low_latency_combine(
        rows,
        case.idx,
        case.weights,
        handle,
        out=place,
        combine_wait_recv_cost_stats=waited,
    )
    assert same is place and torch.equal(place, out)
    buffer.get_next_low_latency_combine_buffer(handle)[:] = rows
    other, _, _ = buffer.low_latency_combine(
        torch.zeros_like(rows), case.idx, case.weights, handle, zero_copy=True
    )
    assert torch.equal(other, out)
    with pytest.raises(weft.InvalidArgument, match="use_logfmt for 24 columns of x .a multiple of"):
        buffer.low_latency_combine(rows, case.idx, case.weights, handle, use_logfmt=True)
    order = torch.rand(case.idx.shape).argsort(1)  # of its own for each token
    turned = case.idx.gather(1, order), case.weights.gather(1, order)
    same, _, _ = buffer.low_latency_combine(rows, *turned, handle)
    assert torch.equal(same, out)
    others = torch.where(case.idx == rank, case.num_experts + 1, case.idx)  # an expert of none
    without_one, _, _ = buffer.low_latency_combine(rows, others, case.weights, handle)
    want = weighted(case, gather(group, rows), case.weights, skip=others != case.idx)
    torch.testing.assert_close(without_one.float(), want, rtol=0.02, atol=0.02)
    skipped = case.idx.clone()
    skipped[:, 0] = -1
    without_first, _, _ = buffer.low_latency_combine(rows, skipped, case.weights, handle)
    want = weighted(case, gather(group, rows), case.weights, skip=skipped < 0)
    torch.testing.assert_close(without_first.float(), want, rtol=0.02, atol=0.02)
    buffer.clean_low_latency_buffer(NUM_MAX, 24, case.num_experts)


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
def test_round_trip(ranks, num_ranks):
    ranks(plain, num_ranks, -1, 3)


def test_ids_that_name_no_expert_are_ignored(ranks):
    ranks(plain, 2, -3, 3)


def by_position(rank, num_ranks, group):
    """Behind num_experts: the orders of V1, of sgl-deep-ep and of the hybrid-ep branch."""
    case, buffer = low_latency_case(rank, num_ranks, group)
    stats = torch.zeros(case.local, dtype=torch.int32)
    waits = torch.zeros(num_ranks, dtype=torch.int64)
    scale, weights = torch.ones(1), case.weights
    calls = [  # what is given, results, whether rows are FP8, whether there is a hook
        ((), 5, True, False),
        ((None,), 5, True, False),
        ((stats,), 5, True, False),
        ((weights,), 7, True, False),
        ((stats, waits), 5, True, False),
        ((None, waits), 5, True, False),
        ((None, stats), 5, True, False),
        ((weights, stats), 7, True, False),
        ((None, None, False), 5, False, False),
        ((stats, waits, True, True, False, False, True), 5, True, True),
        ((stats, None, False, False, False, True, False), 5, False, False),
        ((stats, waits, scale), 5, True, False),
        ((stats, waits, None, False), 5, False, False),
        ((None, None, scale, True, True, False, False, False, True), 5, True, True),
        ((stats, None, scale, False, False, False, False, True, False), 5, False, False),
        ((None, None, None), 5, True, False),
        ((None, None, waits), 5, True, False),
        ((None, None, None, scale, False), 5, False, False),
        ((weights, stats, waits, scale, True, True, False, False, False, True), 7, True, False),
        ((None, stats, None) + (None, False) + (False,) * 5 + (True,), 5, False, True),
    ]
    added = torch.zeros_like(stats)
    for given, num_results, is_fp8, has_hook in calls:
        results = buffer.low_latency_dispatch(case.x, case.idx, NUM_MAX, case.num_experts, *given)
        recv, count, *between, handle, _, hook = results
        if hook is not None:
            hook()
        added += count * any(one is stats for one in given)
        assert len(results) == num_results and (hook is not None) == has_hook, given
        assert isinstance(recv, tuple) == is_fp8 and torch.equal(stats, added), given
        check_handle(case, handle, count)
        for expert, used in enumerate(count.tolist() if between else ()):
            number = rank * case.local + expert
            want = [
                weight
                for idx, all_weights in zip(case.all_idx, case.all_weights, strict=True)
                for weight in all_weights[idx == number].tolist()
            ]
            assert between[0][expert, :used].tolist() == want
    rows = recv.new_ones(recv.shape)
    of_v1 = (False, False, False, False, None, None)
    out, _, _ = buffer.low_latency_combine(rows, case.idx, weights, handle, *of_v1)
    same, _, _ = buffer.low_latency_combine(rows, case.idx, weights, handle, *of_v1, False, None, 0)
    assert torch.equal(out, same)
    mixed, *_ = buffer.low_latency_dispatch(
        case.x, case.idx, NUM_MAX, case.num_experts, stats, waits, use_fp8=False
    )
    assert mixed.dtype == torch.bfloat16
    for given in (
        (None,) * 2 + (False,) * 6,
        (None,) * 3 + (False,) * 7,
        (None,) * 4 + (False,) * 8,
    ):
        with pytest.raises(TypeError, match="multiple values"):
            buffer.low_latency_dispatch(case.x, case.idx, NUM_MAX, case.num_experts, *given)
    with pytest.raises(TypeError, match="use_fp8"):
        buffer.low_latency_dispatch(
            case.x, case.idx, NUM_MAX, case.num_experts, None, None, False, use_fp8=False
        )


def test_arguments_by_position_in_any_order(ranks):
    ranks(by_position, 2)


def test_one_choice(ranks):
    ranks(plain, 2, -1, 1)


def exact_sums(rank, num_ranks, group):
    """Small whole numbers, which bf16 adds without rounding."""
    case, buffer = low_latency_case(rank, num_ranks, group)
    x = torch.randint(-4, 5, case.x.shape).to(torch.bfloat16)
    weights = torch.randint(0, 3, case.weights.shape).float()
    recv_x, _, handle, *_ = buffer.low_latency_dispatch(
        x, case.idx, NUM_MAX, case.num_experts, use_fp8=False
    )
    out, *_ = buffer.low_latency_combine(recv_x, case.idx, weights, handle)
    times = torch.where(case.idx >= 0, weights, torch.zeros(())).sum(1, keepdim=True)
    assert torch.equal(out.float(), x.float() * times)


def test_sums_are_weighted(ranks):
    ranks(exact_sums, 4)


def in_ten_bits(rank, num_ranks, group):
    case, buffer = low_latency_case(rank, num_ranks, group, hidden=256)
    recv_x, _, handle, *_ = buffer.low_latency_dispatch(
        case.x, case.idx, NUM_MAX, case.num_experts, use_fp8=False
    )
    gen = torch.Generator().manual_seed(rank)
    rows = torch.randn(recv_x.shape, generator=gen).to(torch.bfloat16)
    given = (rows, case.idx, case.weights, handle)
    out, *_ = buffer.low_latency_combine(*given, use_logfmt=True)
    plain, *_ = buffer.low_latency_combine(*given)
    assert torch.equal(out, plain) == (len(out) == 0)  # a rank without tokens gets none
    want = weighted(case, gather(group, rows), case.weights)
    torch.testing.assert_close(out.float(), want, rtol=0.03, atol=0.03)
    source = {"scale": "source", "source_weights": case.weights, "source_idx": case.idx}
    flat = rows.view(-1, 256)
    same = handle.plan.exchange.combine(handle.plan, flat, wire="logfmt10", **source)
    assert torch.equal(same.x, out)
    later, _, hook = buffer.low_latency_combine(*given, use_logfmt=True, return_recv_hook=True)
    hook()
    assert torch.equal(later, out)


def test_logfmt_travels_in_ten_bits(ranks):
    ranks(in_ten_bits, 2)


def with_weights(rank, num_ranks, group):
    case, buffer = low_latency_case(rank, num_ranks, group)
    recv_x, count, weights, sources, handle, event, hook = buffer.low_latency_dispatch(
        case.x, case.idx, NUM_MAX, case.num_experts, topk_weights=case.weights, use_fp8=False
    )
    check_handle(case, handle, count)
    for expert in range(case.local):
        want = routes(case, expert)
        number = rank * case.local + expert
        assert sources[expert, : len(want)].tolist() == [source for source, _ in want]
        sent = [
            case.all_weights[source][token, k]
            for source, idx in enumerate(case.all_idx)
            for token, k in (idx == number).nonzero().tolist()
        ]
        assert weights[expert, : len(want)].tolist() == [float(one) for one in sent]


def test_weights_travel_on_request(ranks):
    ranks(with_weights, 2)


def python_calls(call):
    """How many functions of Python's a call makes."""
    seen = []
    sys.setprofile(lambda _frame, event, _arg: seen.append(1) if event == "call" else None)
    try:
        call()
    finally:
        sys.setprofile(None)
    return len(seen)


def frugal(rank, num_ranks, group):
    """Serving engines make these calls for each layer: what they ask is asked by the core."""
    case, buffer = low_latency_case(rank, num_ranks, group)
    given = (case.x, case.idx, NUM_MAX, case.num_experts)
    rows, _, handle, *_ = buffer.low_latency_dispatch(*given, use_fp8=False)
    back = (rows, case.idx, case.weights, handle)
    buffer.low_latency_combine(*back)
    assert python_calls(lambda: buffer.low_latency_dispatch(*given)) <= 48
    assert python_calls(lambda: buffer.low_latency_combine(*back)) <= 36


def test_calls_make_few_calls_of_python(ranks):
    ranks(frugal, 1)


def masked(rank, num_ranks, group):
    case, buffer = low_latency_case(rank, num_ranks, group, enable_shrink=True)
    status = torch.full((num_ranks,), 7, dtype=torch.int32)
    buffer.low_latency_query_mask_buffer(status)
    assert status.tolist() == [0] * num_ranks
    out_of_it = num_ranks - 1
    buffer.low_latency_update_mask_buffer(out_of_it, True)
    buffer.low_latency_query_mask_buffer(status)
    assert status.tolist() == [int(r == out_of_it) for r in range(num_ranks)]
    for idx in case.all_idx:  # nothing is sent to it
        idx[idx // case.local == out_of_it] = -1
    recv_x, count, handle, *_ = buffer.low_latency_dispatch(
        case.x, case.idx, NUM_MAX, case.num_experts, use_fp8=False
    )
    check_handle(case, handle, count, without=(out_of_it,))
    for expert in range(case.local):
        want = expected_rows(case, expert, case.all_x, without=(out_of_it,))
        assert torch.equal(recv_x[expert, : want.size(0)], want)
    ones = torch.ones_like(case.weights)
    rows = torch.where(handle.is_row.unsqueeze(2), torch.ones_like(recv_x), float("nan"))
    out, *_ = buffer.low_latency_combine(rows, case.idx, ones, handle)
    choices = (case.all_idx[rank] >= 0).sum(1) if rank != out_of_it else torch.zeros(())
    assert torch.equal(out.float(), choices.float().view(-1, 1).expand_as(out))
    buffer.low_latency_clean_mask_buffer()
    buffer.low_latency_query_mask_buffer(status)
    assert status.tolist() == [0] * num_ranks
    with pytest.raises(AssertionError, match="rank_to_mask = 9"):
        buffer.low_latency_update_mask_buffer(9, True)
    with pytest.raises(AssertionError, match="mask_status has"):
        buffer.low_latency_query_mask_buffer(status[:1])
    with pytest.raises(AssertionError, match="enable_shrink is False"):
        Buffer(group).low_latency_clean_mask_buffer()


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_masked_ranks_are_left_out(ranks, num_ranks):
    ranks(masked, num_ranks)


class SoftBuffer(Buffer):
    """A buffer as among several hosts: a masked rank still makes its calls."""

    _LOSES_RANKS = False


def masked_late(rank, num_ranks, group):
    """A rank is masked between dispatch and combine: what it was sent does not count."""
    case, _ = low_latency_case(rank, num_ranks, group)
    buffer = SoftBuffer(group, low_latency_mode=True, enable_shrink=True)
    recv_x, _, handle, *_ = buffer.low_latency_dispatch(
        case.x, case.idx, NUM_MAX, case.num_experts, use_fp8=False
    )
    out_of_it = num_ranks - 1
    buffer.low_latency_update_mask_buffer(out_of_it, True)
    out, *_ = buffer.low_latency_combine(
        torch.ones_like(recv_x), case.idx, torch.ones_like(case.weights), handle
    )
    counts = (case.idx >= 0) & (case.idx // case.local != out_of_it)
    assert torch.equal(out.float(), counts.sum(1).float().view(-1, 1).expand_as(out))


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_ranks_masked_after_the_dispatch_do_not_count(ranks, num_ranks):
    ranks(masked_late, num_ranks)


def status_of(buffer):
    status = torch.full((buffer.group_size,), 7, dtype=torch.int32)
    buffer.low_latency_query_mask_buffer(status)
    return status.tolist()


def check_round(case, buffer, without, before_combine=lambda: (), use_fp8=False):
    """A dispatch that comes to what is left without some ranks, and a combine, before which
    others may go."""
    stats = torch.full((case.local,), 5, dtype=torch.int32)
    given = (case.x, case.idx, NUM_MAX, case.num_experts, stats)
    recv_x, count, handle, *_ = buffer.low_latency_dispatch(*given, use_fp8=use_fp8)
    assert status_of(buffer) == [int(r in without) for r in range(case.num_ranks)]
    check_handle(case, handle, count, without)
    assert torch.equal(stats, count + 5)
    rows = recv_x
    if use_fp8:
        recv_x, scales = recv_x
        rows = recv_x.float() * scales.repeat_interleave(128, dim=2)
    for expert in range(case.local):
        want = expected_rows(case, expert, case.all_x, without)
        kept = rows[expert, : want.size(0)].float()
        torch.testing.assert_close(kept, want.float(), rtol=0.1 * use_fp8, atol=0.1 * use_fp8)
    without = (*without, *before_combine())
    ones = torch.where(handle.is_row.unsqueeze(2), 1.0, float("nan")).to(torch.bfloat16)
    rows = ones.expand(handle.shape).contiguous()
    out, *_ = buffer.low_latency_combine(rows, case.idx, torch.ones_like(case.weights), handle)
    assert status_of(buffer) == [int(r in without) for r in range(case.num_ranks)]
    owners = torch.where(case.idx < 0, -1, case.idx // case.local)
    counts = (owners >= 0) & ~torch.isin(owners, torch.tensor(without, dtype=torch.int64))
    assert torch.equal(out.float(), counts.sum(1).float().view(-1, 1).expand_as(out))


class _Gone(Exception):
    """This rank has left."""


def lost(rank, num_ranks, group, when, kills, use_fp8):
    """Rank 1 is lost for good, masked on all others when the call returns that has lost it."""
    case, buffer = low_latency_case(rank, num_ranks, group, enable_shrink=True)
    wider, _ = low_latency_case(rank, num_ranks, group, hidden=256)  # another exchange of the same

    def leave(now):
        if now == when and rank == 1:
            if kills:
                os.kill(os.getpid(), signal.SIGKILL)
            if now == "plan":  # lost between the plan and the rows of a dispatch
                exchange = buffer.runtime.exchanges.last
                stride = num_ranks * NUM_MAX
                exchange.plan(case.idx, layout="expert_strided", expert_stride=stride)
            buffer.destroy()
            raise _Gone
        return (1,) if now == when else ()

    check_round(wider, buffer, ())
    check_round(case, buffer, ())
    with contextlib.suppress(_Gone):
        leave("dispatch")
        leave("plan")
        check_round(case, buffer, () if when == "combine" else (1,), lambda: leave("combine"))
        check_round(case, buffer, (1,), use_fp8=use_fp8)
        check_round(wider, buffer, (1,))
        more = (case.x, case.idx, 4 * NUM_MAX, case.num_experts)  # for which the exchange grows
        recv_x, *_ = buffer.low_latency_dispatch(*more, use_fp8=False)
        assert recv_x.size(1) == num_ranks * 4 * NUM_MAX
        check_round(case, buffer, (1,))
        # Whom a caller gives up is lost, too, and may hear of it while it leaves the call before.
        if rank == 2:
            with pytest.raises(weft.PeerError, match="was given up by the others"):
                check_refused(case, buffer)
                buffer.low_latency_dispatch(case.x, case.idx, NUM_MAX, case.num_experts)
            return
        check_refused(case, buffer)
        assert status_of(buffer) == [0, 1, 0]
        buffer.low_latency_update_mask_buffer(2, True)
        assert status_of(buffer) == [0, 1, 1]
        check_round(case, buffer, (1, 2))


def check_refused(case, buffer):
    with pytest.raises(weft.Unsupported, match="rank 1 is lost and cannot be taken in again"):
        buffer.low_latency_update_mask_buffer(1, False)
    with pytest.raises(weft.Unsupported, match="rank 1 is lost and cannot be taken in again"):
        buffer.low_latency_clean_mask_buffer()
    widest = torch.zeros(case.x.size(0), 384, dtype=torch.bfloat16)
    with pytest.raises(weft.Unsupported, match=r"ranks \[1\] are lost"):
        buffer.low_latency_dispatch(widest, case.idx, NUM_MAX, case.num_experts)


@pytest.mark.parametrize("use_fp8", [False, True])
@pytest.mark.parametrize("when", ["dispatch", "plan", "combine"])
def test_ranks_that_leave_are_masked_on_all_others(ranks, when, use_fp8):
    ranks(lost, 3, when, False, use_fp8)


def test_a_rank_that_is_killed_is_masked_on_all_others(ranks):
    ranks(lost, 3, "combine", True, False, dying=(1,))


def refusals(rank, num_ranks, group):
    case, buffer = low_latency_case(rank, num_ranks, group)
    recv_x, _, handle, *_ = buffer.low_latency_dispatch(
        case.x, case.idx, NUM_MAX, case.num_experts, use_fp8=False
    )

    def refused(
        match, x=case.x, idx=case.idx, num_max=NUM_MAX, experts=case.num_experts, **options
    ):
        with pytest.raises(weft.InvalidArgument, match=match):
            buffer.low_latency_dispatch(x, idx, num_max, experts, **options)

    refused("float32", case.x.float())
    refused("12 columns", case.x[:, :12], use_fp8=False)
    refused("multiple of 128", case.x[:, :64])
    refused("multiple of 512", use_ue8m0=True, round_scale=True)
    refused("without round_scale", use_ue8m0=True)
    long = torch.zeros(NUM_MAX + 1, 128, dtype=torch.bfloat16)
    refused(f"at most num_max_dispatch_tokens_per_rank = {NUM_MAX}", long)
    refused(r"topk_idx has shape \[17, 1\]", idx=torch.zeros(17, 1, dtype=torch.int64))
    refused("num_experts = 1", experts=1)
    refused("one of the two", async_finish=True, return_recv_hook=True)
    refused("topk_weights has", topk_weights=case.weights.double())
    stats = torch.zeros(case.local)
    refused("cumulative_local_expert_recv_stats", cumulative_local_expert_recv_stats=stats)
    refused("dispatch_wait_recv_cost_stats", dispatch_wait_recv_cost_stats=stats)
    refused("multiple of 64", case.x[:, :32], use_nvfp4=True)
    refused("multiple of 128", case.x[:, :64], use_mxfp8=True)
    refused("use_mxfp8 beside use_nvfp4", use_nvfp4=True, use_mxfp8=True)
    refused("x_global_scale is a float", use_nvfp4=True, x_global_scale=2.0)
    refused("x_global_scale has dtype", use_nvfp4=True, x_global_scale=torch.ones(1).double())
    refused(r"x_global_scale has shape \[0\]", use_nvfp4=True, x_global_scale=torch.ones(0))
    with pytest.raises(AssertionError, match="low_latency_mode is False"):
        Buffer(group).low_latency_dispatch(case.x, case.idx, NUM_MAX, case.num_experts)

    def not_combined(match, x=recv_x, idx=case.idx, weights=case.weights, of=handle, **options):
        with pytest.raises(weft.InvalidArgument, match=match):
            buffer.low_latency_combine(x, idx, weights, of, **options)

    not_combined("x has shape", recv_x[:, 1:])
    not_combined("handle is a tuple", of=())
    not_combined("topk_idx has shape", idx=case.idx[:, :1])
    not_combined("topk_weights has", weights=case.weights.bfloat16())
    not_combined("out has", out=case.x.float())
    not_combined("zero_copy without rows", zero_copy=True)
    not_combined("use_logfmt beside", zero_copy=True, use_logfmt=True)
    not_combined("one of the two", async_finish=True, return_recv_hook=True)
    buffer.low_latency_combine(recv_x, case.idx, case.weights, handle)


def test_bad_arguments_are_refused_before_anything_runs(ranks):
    ranks(refusals, 2)


def other_choices(rank, num_ranks, group):
    """Rank 0 combines by choices that are not its dispatch's: in another tensor, or in the
    dispatch's own."""
    case, buffer = low_latency_case(rank, num_ranks, group, topk=2, hidden=24)
    case.idx = torch.rand(len(case.idx), case.num_experts).argsort(1)[:, :2]
    idx = case.idx.clone()
    recv_x, _, handle, _, _ = buffer.low_latency_dispatch(
        case.x, idx, NUM_MAX, case.num_experts, use_fp8=False
    )
    given = (case.weights, handle)
    want, _, _ = buffer.low_latency_combine(recv_x, idx, *given)

    def refused(choices):
        with pytest.raises(weft.InvalidArgument, match=r"combine: source_idx\[0, [01]\] = \d"):
            buffer.low_latency_combine(recv_x, choices, *given)

    def changed(*first):
        choices = idx.clone()
        if rank == 0:
            choices[0] = torch.tensor(first)
        return choices

    one, two = idx[0].tolist() if rank == 0 else (0, 0)
    strange = next(expert for expert in range(case.num_experts) if expert not in (one, two))
    refused(changed(strange, two))
    refused(changed(two, strange))
    refused(changed(strange, strange))
    with torch.inference_mode():  # where no tensor counts its versions
        idx.copy_(changed(two, one))
        refused(idx)
    idx.copy_(case.idx)
    same, _, _ = buffer.low_latency_combine(recv_x, idx, *given)
    assert torch.equal(same, want)


def test_choices_that_are_not_its_dispatchs_are_refused(ranks):
    ranks(other_choices, 2)
