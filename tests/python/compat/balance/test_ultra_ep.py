# SPDX-License-Identifier: Apache-2.0
"""`weft.compat.ultra_ep.Manager`: placements of layers and micro-batches, weights and gradients."""

import itertools

import pytest
import torch

import weft
from oracle import check_told
from weft.compat.ultra_ep import Manager

MASTERS, SLOTS, FC1, FC2, LAYERS, TOKENS, HIDDEN = 2, 2, 24, 6, 3, 60, 16


def manager_of(group, **options):
    """Its replicas may have a single row."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ULTRA_EP_QUOTA_MIN_TOKENS_PER_REPLICA", "1")
        return Manager(group, LAYERS, MASTERS, SLOTS, FC1, FC2, **options)


def weights_of(rank, layer):
    gen = torch.Generator().manual_seed(rank * LAYERS + layer)
    return [
        [torch.randn(shape, generator=gen).bfloat16() for _ in range(MASTERS)]
        for shape in ((4, FC1 // 4), (FC2,))
    ]


def grads_of(rank, layer, num):
    gen = torch.Generator().manual_seed(99 + rank * LAYERS + layer)
    return [[torch.randn(n, generator=gen) for _ in range(num)] for n in (FC1, FC2)]


def routing(rank, num_ranks, layer):
    """Experts of one rank after another are popular."""
    gen = torch.Generator().manual_seed(rank * 7 + layer)
    experts = torch.arange(num_ranks * MASTERS).roll(layer * MASTERS)
    idx = (torch.rand(TOKENS, len(experts), generator=gen) - 0.4 * experts).topk(2).indices
    return idx, torch.zeros(TOKENS, len(experts), dtype=torch.bool).scatter_(1, idx, True)


def synced(rank, num_ranks, group):
    manager = manager_of(group)
    placements = []
    for layer in range(LAYERS):
        manager.construct_local_master_ptr_pool(
            layer, *weights_of(rank, layer), *grads_of(rank, layer, MASTERS)
        )
        placements.append(manager.update_placement(layer, routing(rank, num_ranks, layer)[1]))
    for layer in (0, 2, 1, 0):  # a backward brings them back
        event = manager.weight_sync(layer, async_finish=True)
        event.current_stream_wait()
        placement = placements[layer].placement
        for slot, expert in enumerate(placement[rank].tolist()):
            if expert >= 0:
                first, second = weights_of(expert // MASTERS, layer)
                local = expert % MASTERS
                assert torch.equal(manager.redundant_fc1_weights[slot], first[local].flatten())
                assert torch.equal(manager.redundant_fc2_weights[slot], second[local])
    return [one.placement.tolist() for one in placements]


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_replicas_of_a_layer_get_its_weights(ranks, num_ranks):
    first, *others = ranks(synced, num_ranks)
    assert all(other == first for other in others)
    if num_ranks > 1:
        assert len({str(placement) for placement in first}) > 1
        assert all(max(map(max, placement)) >= 0 for placement in first)


def reduced(rank, num_ranks, group):
    manager = manager_of(group)
    own = grads_of(rank, 0, MASTERS)
    manager.construct_local_master_ptr_pool(0, *weights_of(rank, 0), *own)
    placement = manager.update_placement(0, routing(rank, num_ranks, 0)[1]).placement
    for part, of_slots in enumerate((manager.redundant_fc1_grads, manager.redundant_fc2_grads)):
        for slot, grad in enumerate(grads_of(rank, 1, SLOTS)[part]):
            of_slots[slot] = grad
    manager.grad_reduce(0)
    for part in range(2):
        for expert in range(MASTERS):
            want = grads_of(rank, 0, MASTERS)[part][expert]
            for at, slot in itertools.product(range(num_ranks), range(SLOTS)):
                if placement[at, slot] == rank * MASTERS + expert:
                    want += grads_of(at, 1, SLOTS)[part][slot]
            assert torch.equal(own[part][expert], want)
    return bool((placement >= 0).any())


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_gradients_are_added_in_order(ranks, num_ranks):
    assert ranks(reduced, num_ranks) == [num_ranks > 1] * num_ranks


def rerouted(rank, num_ranks, group):
    """Physical experts have as many rows on all ranks, and tokens still have their experts."""
    manager = manager_of(group)
    idx, routing_map = routing(rank, num_ranks, 0)
    planned = manager.update_placement(0, routing_map)
    per_rank = MASTERS + SLOTS
    logical = torch.cat(
        [torch.arange(num_ranks * MASTERS).view(num_ranks, -1), planned.placement], dim=1
    ).flatten()
    probs = torch.rand(TOKENS, num_ranks * MASTERS).requires_grad_()
    there, map_there = manager.reroute(0, probs, routing_map)
    assert there.shape == map_there.shape == (TOKENS, num_ranks * per_rank)
    for t in range(TOKENS):
        chosen = map_there[t].nonzero().flatten()
        assert sorted(logical[chosen].tolist()) == sorted(idx[t].tolist())
        assert torch.equal(there[t, chosen], probs[t, logical[chosen]])
    assert torch.equal(there != 0, map_there & (there != 0)) and not there[~map_there].any()
    there.sum().backward()
    assert torch.equal(probs.grad != 0, routing_map)
    ids = idx.to(torch.int32)
    ids[0, 0] = -1
    before = ids.clone()
    assert manager.reroute_sparse(0, ids) is ids
    assert torch.equal(torch.where(ids >= 0, logical[ids.clamp(min=0).long()], -1).int(), before)
    counts = (map_there.sum(0).view(num_ranks, -1)).sum(1)
    return counts.tolist()


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_tokens_are_rerouted_to_physical_experts(ranks, num_ranks):
    counts = torch.tensor(ranks(rerouted, num_ranks)).sum(0)
    assert counts.max() <= 1.02 * counts.float().mean() + 1


def microbatches(rank, num_ranks, group):
    manager = manager_of(group, max_microbatches=2, explicitly_destroy=True, is_train=False)
    assert manager.redundant_fc1_grads is None
    manager.construct_local_master_ptr_pool(0, *weights_of(rank, 0))
    slots, planned = [], []
    for batch in range(2):
        slots.append(manager.allocate_microbatch_slot(0))
        planned.append(manager.update_placement(0, routing(rank, num_ranks, batch)[1]))
    assert slots == [0, 1] and not torch.equal(planned[0].placement, planned[1].placement)
    for slot in (0, 1, None):
        manager.redundant_fc2_weights.fill_(0)
        manager.weight_sync(0, microbatch_slot=slot)
        has_expert = planned[1 if slot is None else slot].placement[rank] >= 0
        assert torch.equal(manager.redundant_fc2_weights.any(1), has_expert)
    assert manager.allocate_microbatch_slot(0) == 0
    with pytest.raises(AssertionError, match="has no update_placement for micro-batch 0"):
        manager.weight_sync(0)
    with pytest.raises(AssertionError, match="no gradients without is_train"):
        manager.grad_reduce(0, microbatch_slot=1)
    manager.destroy()
    ids, flags = routing(rank, num_ranks, 1)
    for call in (
        lambda: manager.weight_sync(0),
        lambda: manager.update_placement(0, flags),
        lambda: manager.reroute(0, flags.float(), flags, microbatch_slot=1),
        lambda: manager.reroute_sparse(0, ids, microbatch_slot=1),
        lambda: manager.allocate_microbatch_slot(0),
    ):
        with pytest.raises(AssertionError, match="was destroyed"):
            call()


def test_micro_batches_keep_their_placements(ranks):
    ranks(microbatches, 2)


def refused(rank, num_ranks, group):
    texts = []

    def refuses(call, right, wrong):
        with pytest.raises(Exception) as told:
            call(*(wrong if rank == 1 else right))
        assert isinstance(told.value, weft.Error)
        texts.append(str(told.value))

    sizes = (group, LAYERS, MASTERS, SLOTS, FC1, FC2)
    refuses(Manager, sizes, (group, LAYERS, MASTERS, 17, FC1, FC2))
    refuses(Manager, sizes, (group, LAYERS, MASTERS, SLOTS, FC1, FC2 + 1))
    refuses(Manager, sizes, (*sizes, True, False, 1, True))
    manager = manager_of(group)
    _, routing_map = routing(rank, num_ranks, 0)
    refuses(manager.update_placement, (0, routing_map), (0, routing_map.int()))
    refuses(manager.update_placement, (0, routing_map), (LAYERS, routing_map))
    refuses(manager.update_placement, (0, routing_map), (1, routing_map))
    manager.update_placement(0, routing_map)
    weights, grads = weights_of(rank, 0), grads_of(rank, 0, MASTERS)
    if rank == 0:
        manager.construct_local_master_ptr_pool(0, *weights, *grads)
    refuses(manager.weight_sync, (0,), (0,))
    with pytest.raises(AssertionError, match="fc1_weights are .* .expected 2 of 24"):
        manager.construct_local_master_ptr_pool(0, weights[1], weights[1], *grads)
    manager.construct_local_master_ptr_pool(0, *weights, *grads)
    manager.construct_local_master_ptr_pool(1, *weights, *grads)
    manager.update_placement(1, routing_map)
    refuses(manager.weight_sync, (0,), (1,))
    refuses(manager.grad_reduce, (0,), (1,))
    manager.weight_sync(0)  # still usable
    with pytest.raises(AssertionError, match="explicitly_destroy"):
        manager.destroy()
    return texts


REASONS = [
    "num_local_redundant_experts = 17",
    "sizes differ between ranks",
    "legacy_placement",
    "routing_map has dtype torch.int32",
    "layer = 3 (expected 0 to 2)",
    "update_placement: layer differs between ranks: [0, 1]",
    "layer 0 has no construct_local_master_ptr_pool",
    "weight_sync: ranks differ in the call, its placement",
    "grad_reduce: ranks differ in the call, its placement",
]


def test_all_ranks_hear_what_one_refuses(ranks):
    check_told(ranks(refused, 2), REASONS)


def worth(rank, num_ranks, group):
    """A replica has at least 1024 rows by default."""
    manager = Manager(group, 1, MASTERS, SLOTS, FC1, FC2)
    return manager.update_placement(0, routing(rank, num_ranks, 0)[1]).placement.max().item()


def test_few_rows_are_not_worth_a_replica(ranks):
    assert ranks(worth, 2) == [-1, -1]
