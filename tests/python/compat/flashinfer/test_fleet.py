# SPDX-License-Identifier: Apache-2.0
"""The fleet plug-in for FlashInfer's `moe_ep`, against loops over everybody's tokens."""

import flashinfer_stub as stub
import pytest
import torch
import torch.distributed as dist
from buffer_cases import gather
from nixl_cases import HIDDEN, NUM_MAX, make_case, routes, rows_of, sums

import weft
from weft.compat import flashinfer, nixl_ep

PLACE = "flashinfer.moe_ep"


def made(rank, num_ranks, store, *knobs, group=None, num_experts=6, **params):
    flashinfer.register()
    bootstrap = stub.BootstrapConfig(num_ranks, rank, group, store)
    sizes = stub.FleetParams(num_experts, NUM_MAX, HIDDEN, **params)
    return stub.create_fleet(bootstrap, sizes, knobs, "weft")


def step(case, fleet, members, is_staged=False):
    """A dispatch and a combine among `members`, compared."""
    knobs = [stub.HandleAlgoKnobTopKWeights(case.weights)]
    if is_staged:
        knobs.append(stub.HandleAlgoKnobSplitOperation())
    handle = fleet.create_handle(stub.HandleParams(torch.full_like(case.idx, -1)), knobs)
    handle.update(stub.HandleParams(case.idx))
    got = handle.dispatch(stub.DispatchInputParams([case.x]))
    handle.complete()
    assert isinstance(got, stub.DispatchOutput) and got.expert_scales is None
    assert got.num_tokens == got.expert_tensors.size(1) == 3 * NUM_MAX
    for expert in range(case.local):
        want = routes(case, expert, members)
        assert int(got.expert_counts[expert]) == len(want)
        for row, (source, token, _) in enumerate(want):
            assert torch.equal(got.expert_tensors[expert, row], case.all_x[source][token])
    rows = [rows_of(rank, got.expert_tensors.shape) for rank in range(case.num_ranks)]
    out = torch.empty_like(case.x) if is_staged else None
    done = handle.combine(stub.CombineInputParams([rows[case.rank]], out))
    handle.complete()
    handle.complete()
    assert isinstance(done, stub.CombineOutput) and (out is None or done.x is out)
    torch.testing.assert_close(done.x.float(), sums(case, rows, members), rtol=0.02, atol=0.02)
    handle.destroy()


def topology(rank, num_ranks, group, folder):
    """Two ranks, three, and two. folder: of their store; else they meet by the default group's."""
    case = make_case(rank, num_ranks, group)
    store = dist.FileStore(f"{folder}/store", num_ranks) if folder else None
    with stub.installed(PLACE):
        capacity = stub.FleetAlgoKnobTopologyCapacity(3)
        larger = stub.BootstrapConfig(3, rank, None, store)
        if rank < 2:
            fleet = made(rank, 2, store, capacity)
            step(case, fleet, [0, 1])
            fleet.update_topology(larger)
            with pytest.raises(weft.InvalidArgument, match="world_size = 4 .* the capacity, 3"):
                fleet.update_topology(stub.BootstrapConfig(4, rank))
        else:
            fleet = made(rank, 3, store, capacity)
        for is_staged in (False, True):
            step(case, fleet, [0, 1, 2], is_staged)
        gather(group, None)
        if rank < 2:
            fleet.update_topology(stub.BootstrapConfig(2, rank, None, store))
            step(case, fleet, [0, 1])
        assert not fleet.supports_fault_tolerance
        with pytest.raises(NotImplementedError, match="query_fault without the knob"):
            fleet.query_fault()
        fleet.destroy()
        fleet.destroy()


@pytest.mark.parametrize("has_store", [True, False])
def test_fleets_grow_and_shrink(ranks, has_store, tmp_path):
    ranks(topology, 3, str(tmp_path) if has_store else "")


def masks(rank, num_ranks, group, has_group, folder):
    """The last rank is masked, and taken in again; then it is lost, and the others go on."""
    case = make_case(rank, num_ranks, group)
    store = None if has_group else dist.FileStore(f"{folder}/store", num_ranks)
    with stub.installed(PLACE):
        knob = stub.FleetAlgoKnobFaultTolerance(timeout_ms=1000)
        fleet = made(rank, num_ranks, store, knob, group=group if has_group else None)
        assert fleet.supports_fault_tolerance and fleet.active_mask_epoch == 0
        step(case, fleet, [0, 1, 2])
        if rank < 2:
            fleet.set_active_mask([1, 1, 0])
            assert fleet.query_active_mask().tolist() == [1, 1, 0] and not fleet.query_fault()
            step(case, fleet, [0, 1])
            with pytest.raises(weft.InvalidArgument, match=f"mask.{rank}. = 0 is this rank"):
                fleet.set_active_mask(torch.tensor([1 - rank if r == 1 else 0 for r in range(3)]))
            out = torch.empty(3, dtype=torch.int32)
            assert fleet.query_active_mask(out) is out and fleet.active_mask_epoch == 1
            fleet.clear_faults()
            assert fleet.query_active_mask().tolist() == [1, 1, 0]
            fleet.clear_faults(readmit=True)
            assert fleet.query_active_mask().tolist() == [1, 1, 1]
        step(case, fleet, [0, 1, 2])
        if rank < 2:  # the last rank makes no call any more
            step(case, fleet, [0, 1])
            assert fleet.query_active_mask().tolist() == [1, 1, 0] and fleet.query_fault()
            fleet.clear_faults(readmit=True)
            assert fleet.query_active_mask().tolist() == [1, 1, 0] and not fleet.query_fault()
            with pytest.raises(weft.InvalidArgument, match="mask.2. = 1 is lost"):
                fleet.set_active_mask([int(other != 1 - rank) for other in range(3)])
            assert fleet.query_active_mask().tolist() == [1, 1, 0]  # nothing of it is done
            step(case, fleet, [0, 1])
        gather(group, None)
        fleet.destroy()


@pytest.mark.parametrize("has_group", [False, True])
def test_others_go_on_without_a_rank(ranks, has_group, tmp_path):
    ranks(masks, 3, has_group, str(tmp_path))


def quantised(rank, num_ranks, group, folder):
    """The bits of `nixl_ep.Buffer`, whose own tests look into them."""
    case = make_case(rank, num_ranks, group)
    with stub.installed(PLACE):
        quants = stub.FleetAlgoKnobQuantization(frozenset([stub.QuantType.FP8E4M3]))
        fleet = made(rank, num_ranks, None, quants, group=group, num_experts=4)
        handle = fleet.create_handle(stub.HandleParams(case.idx))
        got = handle.dispatch(stub.DispatchInputParams([case.x]))
        buffer = nixl_ep.Buffer(rank=rank, group=group)
        buffer.update_memory_buffers(num_ranks, 2, 0)
        buffer.connect_ranks(range(num_ranks))
        (rows, scales), counts, *_ = buffer.dispatch(case.x, case.idx, NUM_MAX)
        assert torch.equal(got.expert_counts, counts)
        for expert, used in enumerate(counts.tolist()):
            one = got.expert_tensors[expert, :used].view(torch.uint8)
            assert torch.equal(one, rows[expert, :used].view(torch.uint8))
            assert torch.equal(got.expert_scales[expert, :used], scales[expert, :used])
        with pytest.raises(weft.InvalidArgument, match="without HandleAlgoKnobTopKWeights"):
            handle.combine(stub.CombineInputParams([rows]))
        with pytest.raises(weft.InvalidArgument, match=r"topk_ids has shape \[12, 3\]"):
            handle.update(stub.HandleParams(case.idx.new_zeros(12, 3)))


def test_quantised_rows(ranks, tmp_path):
    ranks(quantised, 2, str(tmp_path))


def test_a_layer_tells_fleets_from_communications():
    with stub.installed(PLACE):
        made = flashinfer.register()
        assert made.backend_name == "weft" and "weft" in stub.fleets and "weft" in stub.registry
        assert stub.kind_for_layer("weft_fleet") == "fleet"
        assert stub.kind_for_layer("weft_communication") == "communication"
        assert stub.fleets["weft_fleet"] is stub.fleets["weft"]


def test_what_is_refused():
    with stub.installed(PLACE):
        with pytest.raises(weft.InvalidArgument, match="7 experts .expected a multiple of the 2"):
            made(0, 1, None, stub.FleetAlgoKnobTopologyCapacity(2), num_experts=7)
