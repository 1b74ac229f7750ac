# SPDX-License-Identifier: Apache-2.0
"""Ranks that pass weights on: who sends what to whom when, and that replicas get the same bits."""

import itertools
import math

import pytest
import torch

import weft
from domain_cases import NUM_RANKS, two_domains
from oracle import check_told
from weft import copies, relays

LOCAL, SLOTS, SHAPES = 2, 3, [(5, 7), (3,)]
MB = 1_000_000


def domains_of(num_ranks, num_domains):
    """Domain of each rank."""
    return [rank * num_domains // num_ranks for rank in range(num_ranks)]


def drawn(seed, num_ranks, local=LOCAL, slots=SLOTS, is_planned=True):
    """A placement with few popular experts. is_planned: experts of others, each once on a rank."""
    gen = torch.Generator().manual_seed(seed)
    placement = torch.full((num_ranks, slots), -1, dtype=torch.int32)
    popular = torch.randint(0, num_ranks * local, (slots + 1,), generator=gen).tolist()
    for rank, slot in itertools.product(range(num_ranks), range(slots)):
        expert = popular[int(torch.randint(0, len(popular), (1,), generator=gen))]
        is_there = expert in placement[rank] or expert // local == rank
        if torch.rand(1, generator=gen) < 0.9 and not (is_planned and is_there):
            placement[rank, slot] = expert
    return placement


def everywhere(num_ranks, expert=0):
    """One expert on all ranks."""
    placement = torch.full((num_ranks, 1), expert, dtype=torch.int32)
    placement[expert // LOCAL] = -1
    return copies.copies_of(placement, LOCAL)


SHAPES_OF_GROUPS = [(1, 1), (2, 1), (3, 1), (4, 2), (7, 2), (8, 1), (8, 2), (9, 3), (16, 4)]


def cases(is_planned=(False, True)):
    """Copies, the domain of each rank, and the rounds."""
    drawings = itertools.product(SHAPES_OF_GROUPS, range(12), is_planned)
    for (num_ranks, num_domains), seed, is_planned in drawings:
        every = copies.copies_of(drawn(seed, num_ranks, is_planned=is_planned), LOCAL)
        domain_of = domains_of(num_ranks, num_domains)
        yield every, domain_of, relays.passed_on(every, domain_of)


def test_every_place_gets_its_expert_once():
    for every, _, rounds in cases():
        assert sorted(hop.copy for hops in rounds for hop in hops) == every


def test_nobody_sends_what_it_has_not_got_in_an_earlier_round():
    for _, _, rounds in cases():
        got = set()
        for hops in rounds:
            for hop in hops:
                if hop.held < 0:
                    assert hop.sender == hop.copy.owner
                else:
                    assert (hop.sender, hop.held, hop.copy.expert_of_all) in got
            got |= {(hop.copy.at, hop.copy.slot, hop.copy.expert_of_all) for hop in hops}


def of_expert(copies_of_it, domain_of):
    """The domains that have it, and its places in that with most; its master's among both."""
    owner = copies_of_it[0].owner
    at = {owner} | {one.at for one in copies_of_it}
    domains = [domain_of[rank] for rank in at]
    return len(set(domains)), max(domains.count(domain) for domain in domains)


def by_expert(every):
    groups = {}
    for one in every:
        groups.setdefault(one.expert_of_all, []).append(one)
    return groups


def test_rounds_are_few():
    for every, domain_of, rounds in cases():
        bounds = [1]
        for places in by_expert(every).values():
            num_domains, most = of_expert(places, domain_of)
            bounds.append(math.ceil(math.log2(num_domains)) + math.ceil(math.log2(most)))
        assert len(rounds) <= max(bounds)


def test_an_expert_crosses_to_a_domain_once():
    for every, domain_of, rounds in cases(is_planned=[True]):
        crossed = [
            (hop.copy.expert_of_all, domain_of[hop.copy.at])
            for hops in rounds
            for hop in hops
            if domain_of[hop.sender] != domain_of[hop.copy.at]
        ]
        others = {
            (one.expert_of_all, domain_of[one.at])
            for one in every
            if domain_of[one.at] != domain_of[one.owner]
        }
        assert sorted(crossed) == sorted(others)


def test_a_rank_sends_an_expert_to_at_most_two_in_a_round():
    for _, _, rounds in cases(is_planned=[True]):
        for hops in rounds:
            senders = [(hop.sender, hop.copy.expert_of_all) for hop in hops]
            assert all(senders.count(one) <= 2 for one in senders)


@pytest.mark.parametrize("num_ranks", [2, 4, 8, 16, 64])
def test_a_master_alone_sends_no_more_than_there_are_rounds(num_ranks):
    every = everywhere(num_ranks, expert=3)
    rounds = relays.passed_on(every, [0] * num_ranks)
    assert len(rounds) == math.ceil(math.log2(num_ranks))
    for rank in range(num_ranks):
        sent = sum(hop.sender == rank for hops in rounds for hop in hops)
        assert sent <= len(rounds)
    assert relays.cost(rounds, [0] * num_ranks, 1) == len(rounds) + (
        relays.ROUND_BYTES["cpu"] * (len(rounds) - 1)
    )
    direct = relays.straight(every)
    assert relays.cost(direct, [0] * num_ranks, 1) == num_ranks - 1


def num_rounds(mode, num_ranks, num_domains, num_bytes, device_type="cpu"):
    domain_of = domains_of(num_ranks, num_domains)
    every = everywhere(num_ranks)
    return len(relays.rounds_of(mode, every, domain_of, num_bytes, device_type))


def test_few_replicas_go_straight():
    auto = [num_rounds("auto", num_ranks, 1, 16 * MB) for num_ranks in range(1, 10)]
    assert auto == [1, 1, 1, 1, 1, 1, 3, 3, 4]
    assert num_rounds("auto", 8, 1, MB) == 1  # a round takes longer than small copies
    assert num_rounds("auto", 4, 1, 100 * MB) == 2
    assert num_rounds("auto", 4, 2, 16 * MB) == 2  # one crosses
    assert num_rounds("auto", 2, 2, 16 * MB) == 1
    assert num_rounds("auto", 8, 1, 16 * MB, "cuda") == 1  # where a round takes longer
    assert num_rounds("auto", 8, 1, 64 * MB, "cuda") == 3
    assert num_rounds("never", 8, 2, 100 * MB) == 1
    assert num_rounds("always", 8, 1, 1) == 3
    assert relays.rounds_of("always", [], [0], 1) == relays.rounds_of("auto", [], [0], 1) == [[]]


def test_the_order_of_copies_does_not_matter():
    every = copies.copies_of(drawn(3, 8), LOCAL)
    domain_of = domains_of(8, 2)
    assert relays.passed_on(every[::-1], domain_of) == relays.passed_on(every, domain_of)


# --- on ranks ---


def weights_of(rank, seed):
    gen = torch.Generator().manual_seed(100 * seed + rank)
    return [torch.randn(LOCAL, *shape, generator=gen) for shape in SHAPES]


def pushed(rank, num_ranks, group, relays):
    """Against the definition, with masters and relays that send several experts; and gradients."""
    exchange = weft.Exchange(group, hidden=16, num_experts=num_ranks * LOCAL)
    balance = weft.Balance(
        exchange, replicas=SLOTS, shapes=SHAPES, dtypes=torch.float32, relays=relays
    )
    calls = []
    carry = balance._carry
    balance._carry = lambda *given: calls.append(len(given[1])) or carry(*given)
    want = [torch.zeros(SLOTS, *shape) for shape in SHAPES]
    most = 0
    for seed in range(8):
        placement = drawn(seed, num_ranks, is_planned=seed % 2 == 0)
        calls.clear()
        found = balance.push_weights(placement, weights_of(rank, seed))
        most = max(most, len(calls))
        for slot, expert in enumerate(placement[rank].tolist()):
            if expert >= 0:
                for part, one in enumerate(weights_of(expert // LOCAL, seed)):
                    want[part][slot] = one[expert % LOCAL]
        assert all(torch.equal(a, b) for a, b in zip(found, want, strict=True))
        grads = weights_of(rank, seed)
        grads = [torch.cat([one, one.new_ones(SLOTS, *one.shape[1:])]) for one in grads]
        calls.clear()
        balance.reduce_grads(placement, grads)
        assert len(calls) == 1  # gradients go straight
    return most


def pushed_in_two_domains(rank, num_ranks, group, relays):
    with two_domains() as group:
        return pushed(rank, num_ranks, group, relays)


@pytest.mark.parametrize("mode", relays.MODES)
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4, 8])
def test_replicas_get_the_same_bits_whoever_sends_them(ranks, num_ranks, mode):
    most = ranks(pushed, num_ranks, mode)
    assert len(set(most)) == 1
    assert (most[0] > 1) == (mode == "always" and num_ranks > 2)


@pytest.mark.parametrize("mode", relays.MODES)
def test_replicas_in_two_domains(ranks, mode):
    most = ranks(pushed_in_two_domains, NUM_RANKS, mode)
    assert len(set(most)) == 1 and (most[0] > 1) == (mode == "always")


def refused(rank, num_ranks, group):
    exchange = weft.Exchange(group, hidden=16, num_experts=num_ranks * LOCAL)
    texts = []
    for options in (
        {"relays": "often" if rank == 1 else "auto"},
        {"relays": "always" if rank == 1 else "never"},
        {"relays": "always", "on_peer_loss": "shrink"},
    ):
        with pytest.raises(weft.InvalidArgument) as told:
            weft.Balance(exchange, replicas=1, shapes=SHAPES, **options)
        texts.append(str(told.value))
    balance = weft.Balance(
        exchange, replicas=1, shapes=SHAPES, dtypes=torch.float32, relays="always"
    )
    placement = torch.tensor([[-1], [0], [0]], dtype=torch.int32)
    weights = weights_of(rank, 0)
    with pytest.raises(weft.InvalidArgument) as told:  # before the first of two rounds
        balance.push_weights(placement, weights[: 2 - (rank == 2)])
    texts.append(str(told.value))
    found = balance.push_weights(placement, weights)  # still usable
    if rank > 0:
        assert torch.equal(found[0][0], weights_of(0, 0)[0][0])
    return texts


REASONS = [
    "relays = 'often' is unknown (one of: auto, never, always)",
    "(must be equal on all ranks)",
    'relays = "always" needs all ranks (on_peer_loss = "fail")',
    "push_weights: 1 weights (expected 2)",
]


def test_all_ranks_hear_what_one_refuses(ranks):
    check_told(ranks(refused, 3), REASONS)
