# SPDX-License-Identifier: Apache-2.0
"""FlashInfer's own registries and base classes, and its way to agree about ranks, over Weft."""

import sys
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from buffer_cases import gather
from elastic_oracle import Case
from loading import in_place, load, stub
from nixl_cases import HIDDEN, NUM_MAX, make_case, rows_of, sums

from packages import wheel
from weft.compat import flashinfer

ROOT = "flashinfer.moe_ep"
PARTS = "errors config algo_knobs core.comm.communication core.comm.handle core.comm.fleet"
MODULES = [f"{ROOT}.{part}" for part in (*PARTS.split(), "core.comm.fault_tolerance")]


@pytest.fixture(scope="module")
def package():
    return wheel("flashinfer-python 0.7.4")


@contextmanager
def registered(package):
    """Yields what `flashinfer.moe_ep` has, Weft among its back ends, without the other modules."""
    empty = {name: stub(name) for name in ("flashinfer", ROOT, f"{ROOT}.core.comm")}
    parts = dict(zip(MODULES, load(package, empty, MODULES, []), strict=True))
    for part in parts.values():
        vars(empty[ROOT]).update(
            (name, value) for name, value in vars(part).items() if not name.startswith("__")
        )
    with in_place({**empty, **parts}):
        flashinfer.register()
        yield SimpleNamespace(**vars(sys.modules[ROOT]))


def on_cpu():
    """`reconcile_active_mask` returns a tensor on a GPU, whatever there is."""
    if torch.cuda.is_available():
        return nullcontext()
    make = torch.tensor
    return patch.object(torch, "tensor", lambda data, **how: make(data, **{**how, "device": "cpu"}))


def fleet_of(ep, rank, num_ranks, store, *knobs):
    bootstrap = ep.BootstrapConfig(num_ranks, rank, tcp_store=store)
    return ep.create_fleet(bootstrap, ep.FleetParams(6, NUM_MAX, HIDDEN), knobs, "weft")


def step(ep, case, fleet, members):
    handle = fleet.create_handle(
        ep.HandleParams(case.idx), [ep.HandleAlgoKnobTopKWeights(case.weights)]
    )
    got = handle.dispatch(ep.DispatchInputParams([case.x]))
    rows = [rows_of(rank, got.expert_tensors.shape) for rank in range(case.num_ranks)]
    done = handle.combine(ep.CombineInputParams([rows[case.rank]]))
    handle.complete()
    torch.testing.assert_close(done.x.float(), sums(case, rows, members), rtol=0.02, atol=0.02)


def agrees(rank, num_ranks, group, package, folder):
    """The others agree about a lost rank, which is told that it was left out."""
    case = make_case(rank, num_ranks, group)
    store = dist.FileStore(f"{folder}/store", num_ranks)
    with registered(package) as ep, on_cpu():
        knob = ep.FleetAlgoKnobFaultTolerance(timeout_ms=1000, reconcile_timeout_s=20)
        fleet = fleet_of(ep, rank, num_ranks, store, knob)
        assert isinstance(fleet, ep.Fleet) and fleet.supports_fault_tolerance
        step(ep, case, fleet, [0, 1, 2])
        assert fleet.reconcile_active_mask().tolist() == [1, 1, 1]
        gather(group, None)
        if rank < 2:  # the last rank makes no call any more
            step(ep, case, fleet, [0, 1])
            assert fleet.query_fault()
            assert fleet.reconcile_active_mask().tolist() == [1, 1, 0]
            assert not fleet.query_fault() and fleet.active_mask_epoch == 2
            step(ep, case, fleet, [0, 1])
        gather(group, None)
        if rank == 2:
            with pytest.raises(ep.MoEEpRankEvictedError, match="rank 2 was masked out"):
                fleet.reconcile_active_mask()
        gather(group, None)
        fleet.destroy()


def test_ranks_agree_about_a_lost_one(ranks, package, tmp_path):
    ranks(agrees, 3, package, str(tmp_path))


def tells(rank, num_ranks, group, package, folder):
    case = make_case(rank, num_ranks, group)
    store = dist.FileStore(f"{folder}/store", num_ranks)
    with registered(package) as ep:
        fleet = fleet_of(ep, rank, num_ranks, store)
        step(ep, case, fleet, range(num_ranks))
        assert not fleet.supports_fault_tolerance and fleet.active_mask_epoch == 0
        for call in (fleet.query_active_mask, fleet.query_fault, fleet.reconcile_active_mask):
            with pytest.raises(ep.MoEEpFaultToleranceUnsupportedError):
                call()
        fleet.destroy()


def test_a_fleet_without_the_knob_masks_nobody(ranks, package, tmp_path):
    ranks(tells, 3, package, str(tmp_path))


def communicates(rank, num_ranks, group, package):
    case = Case(rank, num_ranks, group, (9, 0, 6), topk=4).gather()
    with registered(package) as ep:
        assert ep.is_communication_backend("weft") and ep.is_fleet_backend("weft_fleet")
        assert "weft" in ep.available_communication_backends()
        bootstrap = ep.BootstrapConfig(num_ranks, rank, process_group=group)
        params = ep.MoEEpCommParams(case.experts, case.topk, case.most, 16)
        made = ep.create_communication(bootstrap, params, "weft")
        got = made.dispatch(case.x, case.idx, case.weights, runtime_max_tokens_per_rank=case.most)
        used = len(case.arrivals())
        assert isinstance(got, ep.MoEEpDispatchResult) and got.tokens_per_rank == case.most
        assert torch.equal(got.hidden_states[:used], case.received(case.all_x))
        assert got.topk_ids[used:].eq(-1).all()
        rows = torch.zeros_like(got.hidden_states)
        rows[:used] = rank + 1
        assert torch.equal(made.combine(rows), case.combined(rows))
        made.destroy()
        with pytest.raises(ValueError, match="divisible by the EP size"):
            uneven = ep.MoEEpCommParams(case.experts + 1, case.topk, case.most, 16)
            ep.create_communication(bootstrap, uneven, "weft")


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_a_communication(ranks, num_ranks, package):
    ranks(communicates, num_ranks, package)
