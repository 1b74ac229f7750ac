# SPDX-License-Identifier: Apache-2.0
"""Ways of an expert's weights to its replicas: from the master's rank to each, or in rounds, in
which ranks that have them pass them on. balance.py asks for rounds; copies.py carries them out.

All functions here are pure, with the same arguments on all ranks: so all find the same rounds
without communication. Only weights are passed on. Gradients go straight to their master, which
adds them by ascending rank: a relay that added some up first would make other sums of them, and one
that only passed them on would spare the master none of the bytes that come to it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from weft.copies import Copy, Hop

MODES = ("auto", "never", "always")

# These numbers decide in mode "auto".
# Copies in a domain that take as long as one between domains, in the model "h200": 350 / 50 GB/s.
CROSSING = 7
# Bytes that a link carries in the time of a further round. On GPUs as measured, 75 to 115 MB,
# with the host time of a plan and a dispatch (docs/balance.md); on CPUs what the model "h200" of
# `weft-lab simulate` has: 350 GB/s while both take 24.2 and 24.5 us beyond their bytes.
ROUND_BYTES = {"cpu": 17_000_000, "cuda": 95_000_000}

Rounds = list[list[Hop]]  # hops of a round travel at the same time, in one exchange


def rounds_of(
    mode: str,
    copies: Sequence[Copy],
    domain_of: Sequence[int],
    num_bytes: int,
    device_type: str = "cpu",
) -> Rounds:
    """Returns the rounds of all ranks, at least one, which may be empty.

    mode: "never", "always", or "auto": passed on if that costs less (`cost`). domain_of: of each
    rank. num_bytes: of an expert. device_type: of the ranks, "cpu" or "cuda"."""
    direct = straight(copies)
    if mode == "never":
        return direct
    rounds = passed_on(copies, domain_of)
    if mode == "always":
        return rounds
    of_rounds, of_direct = (
        cost(way, domain_of, num_bytes, device_type) for way in (rounds, direct)
    )
    return rounds if of_rounds < of_direct else direct


def straight(copies: Sequence[Copy]) -> Rounds:
    """Returns a round of masters' sends."""
    return [[Hop(one, one.owner) for one in copies]]


def passed_on(copies: Sequence[Copy], domain_of: Sequence[int]) -> Rounds:
    """Returns rounds in which each rank that has an expert sends it to a rank of a domain where no
    rank has it, if there is one, and to one of its own domain.

    For an expert on ranks of D domains, at most n in one of them, the master's included, these are
    at most ceil(log2 D) + ceil(log2 n) rounds. A second place of the expert on a rank, or one on
    its master's, the master sends in the first."""
    first: dict[tuple[int, int], Copy] = {}  # by expert and rank
    for one in copies:
        if one.at != one.owner:
            first.setdefault((one.expert_of_all, one.at), one)
    firsts = set(first.values())
    hops = [Hop(one, one.owner) for one in copies if one not in firsts]
    waiting: dict[tuple[int, int], list[Copy]] = {}
    for one in sorted(firsts):
        waiting.setdefault(one.expert_of_all, []).append(one)
    holders = {expert: [(expert[0], -1)] for expert in waiting}  # rank, and its slot that has it
    sent: Counter[int] = Counter()  # by rank: where there are more holders than needed, who rests
    rounds: Rounds = []
    while waiting or hops:
        for expert, left in sorted(waiting.items()):
            hops += _hops(left, holders[expert], domain_of, sent)
        waiting = {expert: left for expert, left in waiting.items() if left}
        rounds.append(hops)
        hops = []
    return rounds or [[]]


def _hops(
    waiting: list[Copy],
    holders: list[tuple[int, int]],
    domain_of: Sequence[int],
    sent: Counter[int],
) -> list[Hop]:
    """Returns one expert's hops of a round; adds the reached ranks to `holders`."""
    reached = {domain_of[rank] for rank, _ in holders}
    hops: list[Hop] = []
    for rank, held in sorted(holders, key=lambda holder: (sent[holder[0]], holder)):
        far = [one for one in waiting if domain_of[one.at] not in reached][:1]
        near = [one for one in waiting if domain_of[one.at] == domain_of[rank]]
        for one in far + near[:1]:
            waiting.remove(one)
            reached.add(domain_of[one.at])
            hops.append(Hop(one, rank, held))
            sent[rank] += 1
    holders += [(hop.copy.at, hop.copy.slot) for hop in hops]
    return hops


def cost(rounds: Rounds, domain_of: Sequence[int], num_bytes: int, device_type: str = "cpu") -> int:
    """Returns the rounds' time as bytes of a link inside a domain: each round's busiest rank, in or
    out, inside the domain or to others (`CROSSING` times as long), and `ROUND_BYTES` for each round
    after the first."""
    busiest = 0
    for hops in rounds:
        loads: Counter[tuple[int, bool, bool]] = Counter()
        for hop in hops:
            is_far = domain_of[hop.sender] != domain_of[hop.copy.at]
            for rank, is_out in ((hop.sender, True), (hop.copy.at, False)):
                loads[rank, is_out, is_far] += CROSSING if is_far else 1
        busiest += max(loads.values(), default=0)
    return num_bytes * busiest + ROUND_BYTES[device_type] * (len(rounds) - 1)
