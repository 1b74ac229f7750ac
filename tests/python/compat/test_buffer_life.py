# SPDX-License-Identifier: Apache-2.0
"""Constructors, attributes and the end of a `Buffer`, asynchronous calls, and what it refuses."""

import gc
import os
import weakref

import pytest
import torch
import torch.distributed as dist
from buffer_cases import LOW_LATENCY_TOKENS, NUM_MAX, Case, dispatch, gather

import weft
from weft.compat import nixl_ep
from weft.compat.deep_ep import (
    Buffer,
    Config,
    ElasticBuffer,
    EPBuffer,
    EventOverlap,
    HybridEPBuffer,
)
from weft.compat.uccl import Buffer as UCCLBuffer


def constructors(rank, num_ranks, group):
    buffer = Buffer(group, 1 << 20, 256, True, 12, False, True, explicitly_destroy=True)
    assert (buffer.rank, buffer.group, buffer.group_size) == (rank, group, num_ranks)
    assert (buffer.num_nvl_bytes, buffer.num_rdma_bytes) == (1 << 20, 256)
    assert buffer.low_latency_mode and buffer.explicitly_destroy and not buffer.enable_shrink
    assert buffer.runtime.is_available() and buffer.runtime.get_num_rdma_ranks() == 1
    assert isinstance(buffer.get_comm_stream(), torch.Stream | torch.cpu.Stream)
    Buffer(
        group=group,
        num_nvl_bytes=0,
        num_rdma_bytes=0,
        low_latency_mode=False,
        comm=None,
        num_qps_per_rank=24,
        allow_nvlink_for_low_latency_mode=True,
        allow_mnnvl=False,
        use_fabric=True,
        explicitly_destroy=False,
        enable_shrink=True,
    )
    Buffer(group, allow_nvlink_for_normal_mode=False, use_fabric=False)
    buffer = Buffer(group, 0, 256, is_intranode=True)  # UCCL's
    buffer.reset_rdma_buffer()
    buffer.connect_atomic_buffer(None)
    with pytest.raises(ValueError, match="Either 'group' or 'comm' must be provided."):
        Buffer(None)
    with pytest.raises(AssertionError, match="num_nvl_bytes = 100"):
        Buffer(group, 100)
    with pytest.raises(AssertionError, match="num_rdma_bytes = -128"):
        Buffer(group, 0, -128)


def test_constructors_of_all_revisions(ranks):
    ranks(constructors, 2)


def deadlines(rank, num_ranks, group):
    os.environ["WEFT_CALL_TIMEOUT_S"] = "2.5"
    try:
        sizes = {"hidden": 8, "num_experts": num_ranks}
        exchange = weft.Exchange(group, **sizes)
        told = weft.Exchange(group, **sizes, timeout=4)
        pools = [
            Buffer(group).runtime.exchanges,
            UCCLBuffer(group).runtime.exchanges,
            ElasticBuffer(group, num_max_tokens_per_rank=8).runtime,
            EPBuffer(group, None, 8, 8).runtime,
            HybridEPBuffer(group, 8, 8, 1).runtime,
        ]
        seconds = [pool._timeout for pool in pools] + [nixl_ep.Buffer(group=group)._timeout()]
        of_caller = ElasticBuffer(group, num_max_tokens_per_rank=8, num_gpu_timeout_secs=7).runtime
    finally:
        del os.environ["WEFT_CALL_TIMEOUT_S"]
    assert set(seconds) == {2.5} and of_caller._timeout == 7.0
    assert told._settings["timeout"] == 4
    if rank == 0:
        with pytest.raises(weft.TimeoutError, match="for 2.5 s from rank 1"):
            exchange.plan(torch.tensor([[0]]))
    gather(group, None)


def test_a_variable_says_how_long_calls_wait(ranks):
    ranks(deadlines, 2)


class Comm:
    """The part of an mpi4py communicator that is needed."""

    def __init__(self, group):
        self._group = group

    def Get_rank(self):
        return dist.get_rank(self._group)

    def Get_size(self):
        return dist.get_world_size(self._group)

    def allgather(self, value):
        return gather(self._group, value)


def over_mpi(rank, num_ranks, group):
    comm = Comm(group)
    buffer = Buffer(None, comm=comm)
    assert buffer.group is comm and (buffer.rank, buffer.group_size) == (rank, num_ranks)
    case = Case(rank, group, 2 * num_ranks, 2, (3, 5))
    assert torch.equal(dispatch(buffer, case)[0], case.rows(case.all_x))


def test_an_mpi_communicator_will_do(ranks):
    ranks(over_mpi, 2)


def destroyed(rank, num_ranks, group):
    buffer = Buffer(group, explicitly_destroy=True, low_latency_mode=True)
    case = Case(rank, group, 2 * num_ranks, 2, (3, 5))
    recv_x, *_, handle, _ = dispatch(buffer, case)
    buffer.destroy()
    assert buffer.runtime is None
    for call in (
        lambda: buffer.get_dispatch_layout(case.idx, case.num_experts),
        lambda: buffer.dispatch(case.x, handle=handle),
        lambda: buffer.combine(recv_x, handle),
        lambda: buffer.low_latency_dispatch(case.x, case.idx, 8, case.num_experts),
        buffer.get_comm_stream,
        buffer.destroy,
    ):
        with pytest.raises(RuntimeError, match="destroyed"):
            call()
    with pytest.raises(AssertionError, match="`explicitly_destroy` flag must be set"):
        Buffer(group).destroy()
    Buffer(group, explicitly_destroy=True)  # goes without a word
    assert torch.equal(dispatch(Buffer(group), case)[0], recv_x)


def test_use_after_destroy(ranks):
    ranks(destroyed, 2)


def asynchronous(rank, num_ranks, group):
    buffer = Buffer(group)
    case = Case(rank, group, 2 * num_ranks, 2, (3, 5))
    streams = {"async_finish": True, "allocate_on_comm_stream": True}
    per_rank, _, per_expert, in_rank, event = buffer.get_dispatch_layout(
        case.idx, case.num_experts, previous_event=Buffer.capture(), **streams
    )
    assert isinstance(event, EventOverlap) and event.event is not None
    recv_x, _, recv_weights, _, handle, event = buffer.dispatch(
        case.x,
        topk_idx=case.idx,
        topk_weights=case.weights,
        num_tokens_per_rank=per_rank,
        is_token_in_rank=in_rank,
        num_tokens_per_expert=per_expert,
        previous_event=event,
        **streams,
    )
    event.current_stream_wait()
    assert torch.equal(recv_x, case.rows(case.all_x))
    out, _, event = buffer.combine(recv_x, handle, previous_event=Buffer.capture(), **streams)
    with event:
        pass
    assert torch.equal(out, case.summed(gather(group, recv_x)))
    *_, event = buffer.dispatch(case.x, handle=handle, previous_event=event)
    assert event.event is None
    with pytest.raises(AssertionError, match="allocate_on_comm_stream"):
        buffer.combine(recv_x, handle, allocate_on_comm_stream=True, async_finish=True)


def test_asynchronous_calls(ranks):
    ranks(asynchronous, 2)


def refusals(rank, num_ranks, group):
    buffer = Buffer(group)
    case = Case(rank, group, 2 * num_ranks, 2, (3, 5))
    per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(case.idx, case.num_experts)
    recv_x, _, recv_weights, _, handle, _ = dispatch(buffer, case)
    rows, tokens = recv_x.size(0), case.x.size(0)

    def refused(match, x=case.x, **changes):
        arguments = {
            "num_tokens_per_rank": per_rank,
            "is_token_in_rank": in_rank,
            "num_tokens_per_expert": per_expert,
            "topk_idx": case.idx,
            "topk_weights": case.weights,
        }
        with pytest.raises(weft.InvalidArgument, match=match) as found:
            buffer.dispatch(x, **(arguments | changes))
        assert isinstance(found.value, AssertionError) and isinstance(found.value, ValueError)

    refused("both or neither", topk_weights=None)
    refused("both or neither", topk_idx=None)
    refused("float32", topk_weights=case.weights.bfloat16())
    refused(r"shape \[\d, 1\]", topk_weights=case.weights[:, :1])
    refused("int16", topk_idx=case.idx.short())
    refused("K <= 32", topk_idx=case.idx.repeat(1, 17))
    refused("num_tokens_per_rank is None", num_tokens_per_rank=None)
    refused("is_token_in_rank is None", is_token_in_rank=None)
    refused("num_tokens_per_expert is None", num_tokens_per_expert=None)
    refused("num_experts = 3", num_tokens_per_expert=per_expert[:3])
    refused("is_token_in_rank has shape", is_token_in_rank=in_rank[1:])
    refused("num_worst_tokens = 8 without", num_worst_tokens=8, topk_idx=None, topk_weights=None)
    refused("num_worst_tokens = -1", num_worst_tokens=-1)
    refused("expert_alignment = 0", expert_alignment=0)
    refused("num_sms = 21", config=Config(21))
    refused("topk_idx has shape", topk_idx=case.idx[1:], topk_weights=case.weights[1:])
    refused("beside a handle", handle=handle)
    refused("handle is a tuple", handle=(), topk_idx=None, topk_weights=None)
    refused("the handle's", case.x[1:], handle=handle, topk_idx=None, topk_weights=None)
    refused(r"shape \[\d, 16\]", case.x[:, :16], handle=handle, topk_idx=None, topk_weights=None)
    refused("rows of 6 bytes", case.x[:, :3])
    refused(r"expected a tensor \[T, H\]", case.x[0])
    refused("one byte", (case.x, torch.zeros(tokens, 1)))
    raw = case.x.view(torch.uint8)
    refused("int32", (raw, torch.zeros(tokens, 1, dtype=torch.float64)))
    refused("scales has shape", (raw, torch.zeros(tokens + 1, 1)))

    def not_combined(match, x=recv_x, of=handle, **options):
        with pytest.raises(weft.InvalidArgument, match=match):
            buffer.combine(x, of, **options)

    not_combined("x has dtype torch.int32", torch.zeros(rows, 32, dtype=torch.int32))
    not_combined("x has shape", torch.zeros(rows + 1, 32))
    not_combined("handle is a list", of=[])
    not_combined("topk_weights has dtype", topk_weights=recv_weights.double())
    not_combined("topk_weights has shape", topk_weights=recv_weights[:, :1])
    not_combined("bias has dtype", bias=case.x.float())
    not_combined("bias has shape", bias=case.x[:1].expand(tokens + 1, 32))
    not_combined("3 biases", bias=(case.x,) * 3)
    with pytest.raises(weft.InvalidArgument, match="num_experts = 0"):
        buffer.get_dispatch_layout(case.idx, 0)
    with pytest.raises(weft.InvalidArgument, match=f"num_experts = {num_ranks + 1}"):
        buffer.get_dispatch_layout(case.idx, num_ranks + 1)
    # Nothing ran, so all ranks are still in step.
    assert torch.equal(buffer.dispatch(case.x, handle=handle)[0], recv_x)


def test_bad_arguments_are_refused_before_anything_runs(ranks):
    ranks(refusals, 2)


def one_rank_is_wrong(rank, num_ranks, group):
    buffer = Buffer(group, low_latency_mode=True)
    case = Case(rank, group, 2 * num_ranks, 2, (3, 5), hidden=128, distinct=True)
    recv_x, _, _, _, handle, _ = dispatch(buffer, case)
    out, _, _ = buffer.combine(recv_x, handle)
    rows, _, fixed, *_ = buffer.low_latency_dispatch(
        case.x, case.idx, 8, case.num_experts, use_fp8=False
    )
    is_wrong = rank == 0
    with pytest.raises(weft.InvalidArgument):
        dispatch(buffer, case, expert_alignment=0 if is_wrong else 1)
    with pytest.raises(weft.InvalidArgument):
        buffer.dispatch(case.x[1:] if is_wrong else case.x, handle=handle)
    with pytest.raises(weft.InvalidArgument):
        buffer.combine(recv_x[1:] if is_wrong else recv_x, handle)
    with pytest.raises(weft.InvalidArgument):
        x = torch.zeros(9, 128, dtype=torch.bfloat16) if is_wrong else case.x
        buffer.low_latency_dispatch(x, case.idx, 8, case.num_experts, use_fp8=False)
    with pytest.raises(weft.InvalidArgument):
        place = case.x.float() if is_wrong else None
        buffer.low_latency_combine(rows, case.idx, case.weights, fixed, out=place)
    assert torch.equal(buffer.dispatch(case.x, handle=handle)[0], recv_x)
    assert torch.equal(buffer.combine(recv_x, handle)[0], out)


def test_what_one_rank_does_wrong_all_ranks_raise(ranks):
    ranks(one_rank_is_wrong, 3)


def sizes_in_turns(rank, num_ranks, group):
    buffer = Buffer(group)
    alive = []
    for seed in range(6):
        shape = {"hidden": (64, 32, 512)[seed % 3], "seed": seed}
        experts = (2, 3)[seed % 2] * num_ranks
        case = Case(rank, group, experts, 2 + seed % 2, (3, 0, 5), low=-2, **shape)
        recv_x, recv_idx, recv_weights, counts, handle, _ = dispatch(buffer, case)
        assert torch.equal(recv_x, case.rows(case.all_x)) and counts == case.counts()
        assert torch.equal(recv_idx, case.row_idx())
        assert torch.equal(recv_weights, case.row_weights())
        alive.append((case, handle, recv_x * 2))
        # What one rank refuses on this size, all ranks raise; the next size does not see it.
        given = {"bias": torch.zeros(1, 1)} if rank == num_ranks - 1 else {}
        with pytest.raises(weft.InvalidArgument, match="bias has"):
            buffer.combine(recv_x, handle, **given)
    for case, handle, rows in reversed(alive):
        combined, _, _ = buffer.combine(rows, handle)
        assert torch.equal(combined, case.summed(gather(group, rows)))


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_one_buffer_serves_several_sizes_in_turns(ranks, num_ranks):
    ranks(sizes_in_turns, num_ranks)


def tuple_items(rank, num_ranks, group):
    case = Case(rank, group, 2 * num_ranks, 2, (3, 5))
    buffer = Buffer(group)
    handle = dispatch(buffer, case)[4]
    prefix, *others = handle
    assert len(others) == 5 and prefix.dtype == torch.int32
    others_known = prefix[:, [r for r in range(num_ranks) if r != rank]]
    assert (others_known == -1).all()
    assert torch.equal(handle[-1], handle.send_head) and handle[-1].shape == handle[4].shape
    assert torch.equal(handle[3:5][1], handle[4]) and "Handle" in repr(handle)
    with pytest.raises(IndexError):
        handle[6]


def test_handle_reads_like_a_tuple(ranks):
    ranks(tuple_items, 2)


def raw_buffer(rank, num_ranks, group):
    buffer = Buffer(group, 1024, 2048)
    assert buffer.get_local_buffer_tensor(torch.int8, use_rdma_buffer=True).zero_().numel() == 2048
    assert buffer.get_local_buffer_tensor(torch.int32, offset=512).numel() == 128
    view = buffer.get_local_buffer_tensor(torch.bfloat16, torch.Size([4, 8]), 64)
    assert view.shape == (4, 8)
    with pytest.raises(AssertionError, match="at most 512"):
        buffer.get_local_buffer_tensor(torch.bfloat16, torch.Size([513]))
    assert buffer.get_local_buffer_tensor(torch.int64, torch.Size([]), 8).shape == ()
    large = Buffer(group, 1 << 22, 1 << 40)
    assert large.get_local_buffer_tensor(torch.int8, use_rdma_buffer=True).numel() == 1 << 40
    for given in ({}, {"size": torch.Size([1 << 10, 1 << 12])}, {"offset": 1 << 21}):
        view = large.get_local_buffer_tensor(torch.uint8, **given)
        assert view.untyped_storage().nbytes() == 1
        assert not view.zero_().any() and view.fill_(3).unique().tolist() == [3]


def test_raw_buffer_has_the_asked_size_and_takes_no_memory(ranks):
    ranks(raw_buffer, 1)


def check_round(buffer, case, back=None):
    """A dispatch and a combine of normal mode; back: the handle of a dispatch before to repeat.
    Sums are those of bf16 whose rows come as they went: the token, once for each rank."""
    if back is None:
        recv_x, recv_idx, recv_weights, counts, back, _ = dispatch(buffer, case)
        assert torch.equal(recv_idx, case.row_idx()) and counts == case.counts()
        assert torch.equal(recv_weights, case.row_weights())
        assert torch.equal(recv_x, case.rows(case.all_x))
    else:
        recv_x, *_ = buffer.dispatch(case.x, handle=back)
    out, *_ = buffer.combine(recv_x, back)
    owners = torch.where(case.all_idx[case.rank] < 0, -1, case.all_idx[case.rank] // case.local)
    ranks = torch.stack([(owners == r).any(1) for r in range(case.num_ranks)]).sum(0)
    torch.testing.assert_close(out, case.x * ranks.view(-1, 1).to(out.dtype))
    return back


def going_on(rank, num_ranks, group):
    """Normal mode goes on without lost ranks, by handles of before as well."""
    case = Case(rank, group, 2 * num_ranks, 3, (7, 0, 9))
    buffer = Buffer(group, explicitly_destroy=True, enable_shrink=True)
    handle = check_round(buffer, case)
    gone = num_ranks - 1
    if rank == gone:
        buffer.destroy()
        return
    for source, idx in enumerate(case.all_idx):
        idx[(idx // case.local == gone) | torch.tensor(source == gone)] = -1
    check_round(buffer, case, handle)
    check_round(buffer, case)
    status = torch.full((num_ranks,), 7, dtype=torch.int32)
    buffer.low_latency_query_mask_buffer(status)
    assert status.tolist() == [int(r == gone) for r in range(num_ranks)]
    exchange = weakref.ref(buffer.runtime.exchanges.last)
    gc.disable()
    del buffer, handle
    assert exchange() is None
    gc.enable()


def test_normal_mode_goes_on_without_lost_ranks(ranks):
    ranks(going_on, 3)


def decode_and_prefill(rank, num_ranks, group):
    buffer = Buffer(group, 1 << 20, 1 << 20, low_latency_mode=True)
    decode = Case(rank, group, 2 * num_ranks, 2, LOW_LATENCY_TOKENS, distinct=True)
    prefill = Case(rank, group, 2 * num_ranks, 2, (40, 3))

    def exchange_of_decode():
        rows, _, handle, *_ = buffer.low_latency_dispatch(
            decode.x, decode.idx, NUM_MAX, decode.num_experts, use_fp8=False
        )
        buffer.low_latency_combine(rows, decode.idx, decode.weights, handle)
        return handle.plan.exchange

    first = weakref.ref(exchange_of_decode())
    for _ in range(2):
        check_round(buffer, prefill)
        assert exchange_of_decode() is first()
    assert first().max_tokens == NUM_MAX


def wrong_among_exchanges(rank, num_ranks, group):
    """Each call is another's successor on another exchange, and wrong on the last rank."""
    buffer = Buffer(group, 1 << 20, 1 << 20, low_latency_mode=True)
    is_wrong = rank == num_ranks - 1
    cases = [
        Case(rank, group, 2 * num_ranks, 2, (7, 3), distinct=True, hidden=hidden)
        for hidden in (32, 64)
    ]

    def decode(case, x):
        rows, _, handle, *_ = buffer.low_latency_dispatch(
            x, case.idx, NUM_MAX, case.num_experts, use_fp8=False
        )
        buffer.low_latency_combine(rows, case.idx, case.weights, handle)

    def prefill(case, x):
        layout = buffer.get_dispatch_layout(case.idx, case.num_experts)
        named = dict(num_tokens_per_rank=layout[0], is_token_in_rank=layout[3])
        named["num_tokens_per_expert"] = layout[2]
        weights = {"topk_idx": case.idx, "topk_weights": case.weights}
        rows, *_, handle, _ = buffer.dispatch(x, **named, **weights)
        buffer.combine(rows, handle)

    ways = [(call, case) for case in cases for call in (decode, prefill)]
    for _ in range(2):
        for call, case in ways:
            call(case, case.x)
    for call, case in [*ways, *ways[::2], *ways[1::2]]:
        with pytest.raises(weft.InvalidArgument, match=f"dtype|rank {num_ranks - 1} refused"):
            call(case, case.x.double() if is_wrong else case.x)
        call(case, case.x)


def test_all_hear_what_one_refuses_where_a_buffer_has_several_exchanges(ranks):
    ranks(wrong_among_exchanges, 2)


def test_one_buffer_serves_decode_and_prefill_by_an_exchange_each(ranks):
    ranks(decode_and_prefill, 2)
