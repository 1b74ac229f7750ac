# SPDX-License-Identifier: Apache-2.0
import os

import pytest
import torch
from buffer_cases import Case, dispatch, gather

import weft
from domain_cases import DOMAINS, NUM_RANKS, two_domains
from weft.compat.deep_ep import EventHandle as DeepEPHandle
from weft.compat.uccl import Buffer, EventHandle, EventOverlap, UCCLBuffer, ep


def round_trip(rank, num_ranks, group):
    os.environ["LOCAL_WORLD_SIZE"] = str(num_ranks)
    buffer = UCCLBuffer(group, 1 << 20, 1 << 20)
    assert buffer.num_rdma_bytes == 0 and buffer.num_nvl_bytes == 1 << 20 and buffer.is_intranode
    case = Case(rank, group, 2 * num_ranks, 2, (5, 0, 3))
    recv_x, recv_idx, recv_weights, counts, handle, event = dispatch(buffer, case)
    assert isinstance(event, EventOverlap) and event.event is None
    assert torch.equal(recv_x, case.rows(case.all_x)) and torch.equal(recv_idx, case.row_idx())
    assert torch.equal(recv_weights, case.row_weights()) and counts == case.counts()
    event = EventOverlap(EventHandle())
    again, *_ = buffer.dispatch(case.x, handle=handle, previous_event=event, async_finish=True)
    assert torch.equal(again, recv_x)
    out, _, _ = buffer.combine(recv_x, handle)
    assert torch.equal(out, case.summed(gather(group, recv_x)))
    worst = dispatch(buffer, case, num_worst_tokens=5 * num_ranks)[0]
    assert worst.size(0) == 5 * num_ranks and torch.equal(worst[: recv_x.size(0)], recv_x)
    with pytest.raises(AssertionError, match="`explicitly_destroy` flag must be set"):
        buffer.destroy()


def test_round_trip(ranks):
    ranks(round_trip, 3)


def several_hosts(rank, num_ranks, group):
    os.environ["LOCAL_WORLD_SIZE"] = "1"
    with pytest.raises(ValueError, match="is_intranode = True with 2 ranks"):
        Buffer(group, is_intranode=True)
    with pytest.raises(ValueError, match="is_intranode = True with 2 ranks"):
        UCCLBuffer(group, 128, 256, is_intranode=True)
    buffer = UCCLBuffer(group, 128, 256, explicitly_destroy=True)
    assert buffer.num_rdma_bytes == 256 and not buffer.is_intranode
    assert buffer.get_local_buffer_tensor(torch.uint8).numel() == 256
    buffer.reset_rdma_buffer()
    buffer.connect_atomic_buffer(None)
    buffer.destroy()
    with pytest.raises(RuntimeError, match="destroyed"):
        buffer.reset_rdma_buffer()
    UCCLBuffer(group, 128, 256)  # rebuilding is nothing special
    os.environ["LOCAL_WORLD_SIZE"] = "2"


def test_ranks_of_several_hosts(ranks):
    ranks(several_hosts, 2)


def hosts_by_memory(rank, num_ranks, group):
    """No more ranks than a host has may still be ranks of two."""
    os.environ["LOCAL_WORLD_SIZE"] = str(num_ranks)
    with two_domains() as hosts:
        for kind in (Buffer, UCCLBuffer):
            with pytest.raises(ValueError, match="with 4 ranks in 2 domains"):
                kind(hosts, is_intranode=True)
        buffer = UCCLBuffer(hosts, 128, 256)
        assert buffer.num_rdma_bytes == 256 and not buffer.is_intranode
        assert buffer.runtime.get_num_rdma_ranks() == 2
        case = Case(rank, hosts, 2 * num_ranks, 2, (5, 0, 3))
        recv_x, recv_idx, _, _, handle, _ = dispatch(buffer, case)
        assert len(handle) == 10 and torch.equal(recv_idx, case.row_idx())
        assert torch.equal(recv_x, case.rows(case.all_x))
        event = EventOverlap(EventHandle())
        again, *_ = buffer.dispatch(case.x, handle=handle, previous_event=event, async_finish=True)
        assert torch.equal(again, recv_x)
        out, _, _ = buffer.combine(recv_x, handle)
        assert torch.equal(out, case.summed(gather(hosts, recv_x), domains=DOMAINS))
        worst = dispatch(buffer, case, num_worst_tokens=5 * num_ranks)[0]
        assert worst.size(0) == 5 * num_ranks and torch.equal(worst[: recv_x.size(0)], recv_x)


def test_hosts_that_share_no_memory(ranks):
    ranks(hosts_by_memory, NUM_RANKS)


def low_latency(rank, num_ranks, group):
    case = Case(rank, group, 2 * num_ranks, 2, (5, 3), hidden=128, distinct=True)
    buffer = Buffer(group, low_latency_mode=True)
    (recv_x, scales), count, handle, _, hook = buffer.low_latency_dispatch(
        case.x, case.idx, 8, case.num_experts, return_recv_hook=True
    )
    hook()
    rows = torch.ones(recv_x.shape, dtype=torch.bfloat16)
    out, _, _ = buffer.low_latency_combine(
        rows, case.idx, torch.ones_like(case.weights), handle, False, False, False, False
    )
    assert torch.equal(out[:, 0].float(), (case.idx >= 0).sum(1).float())
    with pytest.raises(AssertionError, match="Overlap mode requires return_recv_hook=True"):
        buffer.low_latency_combine(rows, case.idx, case.weights, handle, overlap=True)


def test_low_latency(ranks):
    ranks(low_latency, 2)


def test_sms_are_set_for_this_family_alone():
    before = UCCLBuffer.num_sms
    try:
        UCCLBuffer.set_num_sms(28)
        assert Buffer.num_sms == UCCLBuffer.num_sms == 28
        assert UCCLBuffer.get_dispatch_config(8).num_sms == 28
        assert weft.compat.deep_ep.Buffer.num_sms == 20
        with pytest.raises(AssertionError, match="must be even"):
            UCCLBuffer.set_num_sms(3)
    finally:
        UCCLBuffer.set_num_sms(before)


def test_raw_runtime_is_not_there():
    assert ep.get_num_proxy_threads() == 0 and ep.Buffer is Buffer
    ep.register_proxies(0, [])
    ep.unregister_proxy(0)
    with pytest.raises(weft.Unsupported, match="UCCLBuffer"):
        ep.Proxy(0, 0, 0)
    assert issubclass(EventHandle, DeepEPHandle)
    EventHandle(7).current_stream_wait()
