# SPDX-License-Identifier: Apache-2.0
"""EPBuffer's answers about itself, its life, its module, and copies of experts."""

import itertools
import math

import pytest
import torch
from ep_oracle import of_two_sizes
from hybrid_ep_oracle import gather, same_bits

import weft
from domain_cases import NUM_RANKS, two_domains
from weft.compat import deep_ep
from weft.compat.deep_ep import BufferAllocator, EPBuffer, comm
from weft.compat.deep_ep.elastic import model

MIB2 = 2 << 20


def itself(rank, num_ranks, group):
    buffer = EPBuffer(group, None, 8, 64, 2, explicitly_destroy=True)
    assert isinstance(buffer, deep_ep.BufferBase)
    assert (buffer.rank_idx, buffer.num_ranks, buffer.group) == (rank, num_ranks, group)
    assert buffer.num_bytes == EPBuffer.get_buffer_size_hint(group, 8, 64, 2)
    assert (buffer.num_lb_bytes, buffer.runtime.lb_storage.numel()) == (0, 0)
    assert buffer.num_allocated_qps == model.allocated_qps(True)
    assert EPBuffer(group, MIB2, allow_hybrid_mode=False).num_allocated_qps == 17
    assert buffer.main_context is buffer.context is not None
    assert buffer.get_physical_domain_size() == comm.get_physical_domain_size(buffer)
    assert deep_ep.get_logical_domain_size(group) == buffer.get_logical_domain_size()
    assert isinstance(EPBuffer.capture(), deep_ep.EventHandle)
    buffer.barrier()
    comm.barrier(buffer)
    comm.barrier(group)
    buffer.barrier(False, True, True, None)
    assert buffer.lb_get_theoretical_num_sms() % 2 == 0
    with pytest.raises(AssertionError, match="explicitly_destroy"):
        EPBuffer(group, MIB2).destroy()
    buffer.destroy()
    assert buffer.runtime is buffer.main_context is buffer.nccl_comm_handle is None
    with pytest.raises(AssertionError, match="destroyed"):
        buffer.barrier()
    for arguments, said in (
        ((MIB2 + 1,), "num_bytes"),
        ((0,), "num_bytes"),
        ((None, 0, 64), "num_max_tokens_per_rank = 0"),
        ((None, 8, 3), "hidden = 3"),
        ((MIB2, 8, 64, 0, False, 5), "lb_allocation_plan"),
    ):
        with pytest.raises(AssertionError, match=said):
            EPBuffer(group, *arguments)
    with pytest.raises(weft.InvalidArgument, match="num_bytes = 7"):  # the others hear of it
        EPBuffer(group, 7 if rank == num_ranks - 1 else MIB2)


def test_attributes_and_life(ranks):
    ranks(itself, 2)


def communicators(rank, num_ranks, group):
    for _ in range(2):
        with pytest.raises(weft.Unsupported, match="not every rank has one"):
            comm.get_nccl_comm_handle(group)
    comm.destroy_all_managed_nccl_comm()
    buffer = EPBuffer(group, MIB2)
    comm.barrier(buffer, False, with_cpu_sync=False)
    comm.barrier(group)
    for given in (group, buffer):
        assert comm.get_physical_domain_size(group_or_buffer=given) == (1, 2)
        assert comm.get_logical_domain_size(group_or_buffer=given) == (1, 2)
    if not torch.cuda.is_available():
        with pytest.raises((RuntimeError, AssertionError)):
            comm.get_comm_stream(buffer)
    assert comm.NCCLCommHandle(5, managed=True).get() == 5


def test_no_communicator_is_made(ranks):
    ranks(communicators, 2)


def test_sizes_grow():
    def hint(tokens, hidden, topk=4, fp8=False, multiple=True, num_ranks=4):
        return model.larger_call_bytes(num_ranks, tokens, hidden, topk, fp8, multiple)

    assert hint(1, 8) == MIB2 and hint(4096, 2048, 0) == hint(4096, 2048, 32)
    assert hint(4096, 2048) % MIB2 == 0 and hint(4096, 2048) >= 4 * 4096 * 2048 * 2
    assert hint(4096, 2048, 1, fp8=True) < hint(4096, 2048, 1) < hint(8192, 2048, 1)
    assert hint(8192, 2048) < hint(8192, 4096)
    assert hint(4096, 2048, 8, multiple=False) > hint(4096, 2048, 8)


@pytest.mark.parametrize("ranks_nvlink", [(1, 1), (8, 8), (16, 8), (16, 1)])
@pytest.mark.parametrize("hybrid", [True, False])
@pytest.mark.parametrize("overlap", [True, False])
def test_sm_model(ranks_nvlink, hybrid, overlap):
    (num, nvlink), device = ranks_nvlink, 131
    outer = num // nvlink if hybrid else 1
    ranks = model.Ranks(num, outer, num // outer, num // nvlink, nvlink)
    for rates in (model.Rates(50, 430, 180, 45), model.Rates(400, 150, 180, 45)):
        read, write, over_nvlink, rows = model.traffic_of(256, 8, ranks, rates)
        wanted = device
        if rows < math.inf:
            dispatch = (rows * read / 180, rows * write / 45)
            combine = (rows * (write - over_nvlink) / 180, rows * (read + over_nvlink) / 45)
            wanted = max(*dispatch, *combine)
        wanted = -(-max(4, math.ceil(1.3 * wanted)) // 4) * 4
        wanted = min(130, wanted if overlap else max(wanted, 64))
        sizes = (256, 8, ranks, rates, device, overlap)
        assert model.theoretical_num_sms_of_both(*sizes) == wanted


def test_alignments_and_names():
    assert deep_ep.__version__ == "2.5.0" and deep_ep.topk_idx_t == torch.int64
    assert deep_ep.get_num_allocation_alignment() == MIB2
    assert (deep_ep.get_num_rdma_alignment(), deep_ep.get_num_tma_alignment()) == (64, 32)
    for name in ("EngramBuffer", "PPBuffer", "BucketBuffer", "BucketSession"):
        with pytest.raises(NotImplementedError, match=f"{name}: experimental"):
            getattr(deep_ep, name)(1, group=None)


def test_an_allocator_hands_out_places():
    plan = BufferAllocator()
    first = plan.allocate((3, 5), torch.float32)
    second = plan.allocate(2 * MIB2 + 1, torch.uint8)
    third = plan.allocate((4,), torch.bfloat16)
    assert first.is_meta and (plan.alignment, plan.num_bytes) == (MIB2, 5 * MIB2)
    places = [(first, 0), (second, MIB2), (third, 4 * MIB2)]
    assert [begin for _, begin in plan.allocations] == [begin for _, begin in places]
    assert all(one is other for (one, _), (other, _) in zip(plan.allocations, places, strict=True))
    assert not plan.materialized
    for wrong in (torch.zeros(5, dtype=torch.uint8), torch.zeros(5 * MIB2, dtype=torch.int8)):
        with pytest.raises(AssertionError, match="storage has"):
            plan.materialize(wrong)
    storage = torch.zeros(5 * MIB2, dtype=torch.uint8)
    plan.materialize(storage)
    assert plan.materialized and first.shape == (3, 5) and third.dtype == torch.bfloat16
    begins = [one.data_ptr() - storage.data_ptr() for one in (first, second, third)]
    assert begins == [0, MIB2, 4 * MIB2]
    third.fill_(1)
    assert storage.nonzero().flatten().tolist() == [
        4 * MIB2 + 2 * i + j for i in range(4) for j in (0, 1)
    ]
    with pytest.raises(AssertionError, match="materialized already"):
        plan.allocate((1,), torch.int8)
    with pytest.raises(AssertionError, match="materialized already"):
        plan.materialize(storage)


class Copies:
    """num_local experts of each rank, of a domain of `size`; slots of each rank for others'."""

    def __init__(self, seed, size, num_local, num_slots, device):
        gen = torch.Generator().manual_seed(seed)
        self.size, self.num_local, self.num_slots = size, num_local, num_slots
        mapping = torch.full((size, num_slots), -1, dtype=torch.int32)
        for rank, slot in itertools.product(range(size), range(num_slots)):
            expert = int(torch.randint(0, size * num_local, (1,), generator=gen))
            if expert // num_local != rank and torch.rand(1, generator=gen) < 0.8:
                mapping[rank, slot] = expert
        self.mapping = mapping.to(device)


def buffer_with(group, shapes):
    """And tensors of its LB region."""
    plan = BufferAllocator()
    made = [plan.allocate(shape, dtype) for shape, dtype in shapes]
    return EPBuffer(group, MIB2, lb_allocation_plan_or_num_bytes=plan), made


def prefetch(rank, num_ranks, group, seed):
    num_slots, num_local = 3, 2
    sizes = [((5, 16), torch.bfloat16), ((40_000,), torch.uint8)]
    shapes = [((num_slots, *shape), dtype) for shape, dtype in sizes]
    buffer, slots = buffer_with(group, shapes)
    device = buffer.runtime.lb_storage.device
    size = buffer.num_nvlink_ranks
    first = rank - rank % size
    copies = Copies(seed + first, size, num_local, num_slots, device)
    gen = torch.Generator().manual_seed(seed + rank)
    own = [
        torch.randint(0, 100, (num_local, *shape), generator=gen).to(dtype).to(device)
        for shape, dtype in sizes
    ]
    for one in slots:
        one.fill_(7)
    event = buffer.lb_prefetch_weights(slots, tuple(own), copies.mapping)
    event.wait()
    everybody = gather(group, [one.cpu() for one in own])
    for part, slot in enumerate(slots):
        for c, expert in enumerate(copies.mapping[rank - first].tolist()):
            want = torch.full_like(slot[c], 7).cpu()
            if expert >= 0:
                want = everybody[first + expert // num_local][part][expert % num_local]
            assert same_bits(slot[c].cpu(), want)
    # The same of one tensor without a list, of another shape with as many bytes.
    slots[0].zero_()
    flat = own[0].view(num_local, 80)
    buffer.lb_prefetch_weights(slots[0], flat, copies.mapping, 2, buffer.capture()).wait()
    for c, expert in enumerate(copies.mapping[rank - first].tolist()):
        if expert >= 0:
            want = everybody[first + expert // num_local][0][expert % num_local]
            assert same_bits(slots[0][c].cpu(), want)


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_weights_are_prefetched(ranks, num_ranks):
    ranks(prefetch, num_ranks, 3)


def reduce(rank, num_ranks, group, seed):
    num_slots, num_local, width = 4, 2, 24
    buffer, (slots,) = buffer_with(group, [((num_slots, width), torch.float32)])
    device = buffer.runtime.lb_storage.device
    size = buffer.num_nvlink_ranks
    first = rank - rank % size
    copies = Copies(seed + first, size, num_local, num_slots, device)
    copies.mapping[:, 0] = -1
    for at in range(1, size):  # several copies of one expert, whose sum depends on the order
        copies.mapping[at] = 1
    own = of_two_sizes((num_local, width), seed + rank, torch.float32).to(device)
    slots.copy_(of_two_sizes((num_slots, width), 50 + rank, torch.float32))
    all_own, all_slots = gather(group, own.cpu()), gather(group, slots.cpu())

    def added(order):
        want = all_own[rank].clone()
        for at, c in order:
            expert = int(copies.mapping[at, c])
            if expert >= 0 and expert // num_local == rank - first:
                want[expert % num_local] += all_slots[first + at][c]
        return want

    order = list(itertools.product(range(size), range(num_slots)))
    buffer.lb_reduce_grads(slots, own, copies.mapping).wait()
    assert same_bits(own.cpu(), added(order))
    assert same_bits(slots.cpu(), all_slots[rank])
    own.copy_(all_own[rank])
    buffer.lb_reduce_grads(slots, own, copies.mapping).wait()
    assert same_bits(own.cpu(), added(order))  # run after run
    return torch.equal(added(order), added(order[::-1]))


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_gradients_are_added_in_order(ranks, num_ranks):
    is_same = ranks(reduce, num_ranks, 5)
    assert num_ranks == 1 or not all(is_same)


def copies_of_two_domains(rank, num_ranks, group):
    with two_domains() as hosts:
        prefetch(rank, num_ranks, hosts, 11)
        reduce(rank, num_ranks, hosts, 11)


def test_copies_stay_in_their_domain(ranks):
    ranks(copies_of_two_domains, NUM_RANKS)


def mappings_of_one_domain_differ(rank, num_ranks, group):
    """The others' is their own affair."""
    with two_domains() as hosts:
        buffer, (slots,) = buffer_with(hosts, [((2, 8), torch.float32)])
        own = torch.full_like(slots, rank)
        mapping = torch.tensor([[2, -1], [-1, 1]], dtype=torch.int32, device=slots.device)
        if rank < 2:
            mapping[1] = mapping[1].flip(0)
        wrong = mapping.flip(1) if rank == 3 else mapping
        for call in (buffer.lb_prefetch_weights, buffer.lb_reduce_grads):
            with pytest.raises(weft.InvalidArgument, match="mapping differs from that of ranks"):
                call(slots, own, wrong)
        buffer.lb_prefetch_weights(slots, own, mapping).wait()
        assert slots[int(mapping[rank % 2, 1] >= 0)].eq(rank ^ 1).all()


def test_mappings_that_differ_within_a_domain_are_refused(ranks):
    ranks(mappings_of_one_domain_differ, NUM_RANKS)


def copies_refused(rank, num_ranks, group):
    buffer, (slots,) = buffer_with(group, [((2, 8), torch.float32)])
    own = torch.zeros_like(slots)
    mapping = torch.full((num_ranks, 2), -1, dtype=torch.int32, device=slots.device)

    def refuses(match, call, *given):
        with pytest.raises(AssertionError, match=match):
            call(*given)

    weights, grads = buffer.lb_prefetch_weights, buffer.lb_reduce_grads
    refuses("expected as many, 1 to 16", weights, [slots], [], mapping)
    refuses(
        "a multiple of 16", weights, slots[:, :3].contiguous(), own[:, :3].contiguous(), mapping
    )
    refuses("20 bytes", grads, slots[:, :5].contiguous(), own[:, :5].contiguous(), mapping)
    refuses("not contiguous", weights, slots.t(), own.t(), mapping)
    refuses("redundancy_mapping has", weights, slots, own, mapping[:, 0])
    refuses("redundancy_mapping has", weights, slots, own, mapping.long())
    refuses("expected float32", grads, slots.half(), own.half(), mapping)
    refuses("expected -1 to", weights, slots, own, torch.full_like(mapping, 2 * num_ranks))
    with pytest.raises(weft.InvalidArgument, match="num_sms = -1"):  # on one rank
        weights(slots, own, mapping, -1 if rank == 1 else 0)
    other = mapping.clone()
    other[1, 0] = 0
    for call in (weights, grads):
        with pytest.raises(weft.InvalidArgument, match="ranks differ in the call, its placement"):
            call(slots, own, other if rank == 1 else mapping)
    with pytest.raises(weft.InvalidArgument, match="ranks differ in the call, its placement"):
        (weights if rank == 1 else grads)(slots, own, mapping)
    grads(slots, own, mapping).wait()
    assert not own.any()


def test_copies_that_are_refused(ranks):
    ranks(copies_refused, 2)
