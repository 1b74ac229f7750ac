# SPDX-License-Identifier: Apache-2.0
"""The communication plug-in for FlashInfer's `moe_ep`, against loops over everybody's tokens."""

import flashinfer_stub as stub
import pytest
import torch
from elastic_oracle import Case
from hybrid_ep_oracle import gather, same_bits

import weft
from weft.compat import flashinfer

PLACES = ("flashinfer.moe_ep", "flashinfer.moe_ep.core.comm.communication")


NAMES = ("runtime_max_tokens_per_rank", "max_tokens_per_rank")  # from 0.7.4 on, and before


def made(case, group, invalid, backend="weft", dtype=None):
    """Calls may have twice the tokens of this one."""
    flashinfer.register()
    sizes = (case.experts, case.topk, 2 * case.most, 16)
    params = stub.MoEEpCommParams(*sizes, dtype, invalid_expert_id=invalid)
    bootstrap = stub.BootstrapConfig(case.num_ranks, case.rank, group)
    return stub.create_communication(bootstrap, params, backend)


def received(case, got, ids_of_all, most, invalid, scales=None):
    """Compares what came with everybody's tokens, and returns how many rows carry one."""
    used = len(case.arrivals())
    assert isinstance(got, stub.MoEEpDispatchResult) and got.tokens_per_rank == most
    assert len(got.hidden_states) == len(got.topk_ids) == case.num_ranks * most
    assert same_bits(got.hidden_states[:used], case.received(case.all_x))
    want = case.received([torch.where(ids < 0, invalid, ids) for ids in ids_of_all])
    assert same_bits(got.topk_ids[:used], want) and got.topk_ids[used:].eq(invalid).all()
    assert same_bits(got.topk_weights[:used], case.received_topk()[1])
    if scales is None:
        assert got.hidden_states_scale is None
    else:
        assert same_bits(got.hidden_states_scale[:used], case.received(scales))
    return used


def layer(rank, num_ranks, group, place, invalid, dtype):
    case = Case(rank, num_ranks, group, (9, 0, 6), topk=4).gather()
    ids = torch.where(case.idx < 0, invalid, case.idx).to(dtype)
    ids_of_all = [one.to(dtype) for one in case.all_idx]
    with stub.installed(place):
        comm = made(case, group, invalid)
        assert comm.is_platform_supported() and comm.backend_name == "weft"
        ways = ((None, NAMES[0], 16), (case.most, NAMES[0], 20), (case.most + 5, NAMES[1], 16))
        for most, name, width in ways:
            got = comm.dispatch(case.x, ids, case.weights, **{name: most})
            most = most or 2 * case.most
            used = received(case, got, ids_of_all, most, invalid)
            rows = torch.full(got.hidden_states.shape, float("nan"), dtype=torch.bfloat16)
            gen = torch.Generator().manual_seed(rank)
            rows[:used] = torch.randn(rows[:used].shape, generator=gen).to(torch.bfloat16)
            output = torch.empty(len(case.x), width, dtype=torch.bfloat16)[:, :16]
            out = comm.combine(rows.view(num_ranks, most, 16), output=output)
            assert out.data_ptr() == output.data_ptr() and same_bits(out, case.combined(rows))
        comm.destroy()
        comm.destroy()


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
@pytest.mark.parametrize("invalid, dtype", [(-1, torch.int32), (1000, torch.int64)])
def test_tokens_go_and_come_back(ranks, num_ranks, invalid, dtype):
    ranks(layer, num_ranks, PLACES[0], invalid, dtype)


def quantised(rank, num_ranks, group):
    """Half a byte an element, with factors of one byte."""
    case = Case(rank, num_ranks, group, (5, 8), fp8=True)
    case.x = torch.cat([case.x, case.x, case.x, case.x], dim=1)[:, :48]
    case.gather()
    scale = (case.sf * 255).to(torch.uint8)
    with stub.installed(PLACES[1]):
        config = type("Config", (), {"backend_name": "weft"})()
        comm = made(case, group, -1, config)
        got = comm.dispatch(case.x, case.idx, case.weights, hidden_states_scale=scale)
        received(case, got, case.all_idx, 2 * case.most, -1, gather(group, scale))
        rows = torch.ones(len(got.topk_ids), 16)
        assert same_bits(comm.combine(rows), case.combined(rows))


def test_quantised_rows(ranks):
    ranks(quantised, 2)


def refusals(rank, num_ranks, group):
    case = Case(rank, num_ranks, group, (4,)).gather()
    with stub.installed(PLACES[0]):
        comm = made(case, group, -1)
        with pytest.raises(AssertionError, match="a combine without a dispatch"):
            comm.combine(case.x)
        with pytest.raises(weft.InvalidArgument, match="topk_ids is a list"):  # on one rank
            comm.dispatch(case.x, case.idx.tolist() if rank else case.idx)
        for name in NAMES:
            for most in (0, 2 * case.most + 1):
                with pytest.raises(
                    ValueError, match=f"{name} = {most} .expected 1 to {2 * case.most}"
                ):
                    comm.dispatch(case.x, case.idx, **{name: most})
        got = comm.dispatch(case.x, case.idx)
        assert got.topk_weights is None
        with pytest.raises(AssertionError, match="before the combine"):
            comm.dispatch(case.x, case.idx)
        with pytest.raises(AssertionError, match="expert_output has shape"):
            comm.combine(got.hidden_states[1:])


def test_what_is_refused(ranks):
    ranks(refusals, 2)


def test_there_has_to_be_a_flashinfer():
    with pytest.raises(weft.NotAvailable, match="no plug-ins"):
        flashinfer.register()
    with stub.installed("flashinfer.moe_ep.others"), pytest.raises(weft.NotAvailable):
        flashinfer.register()
