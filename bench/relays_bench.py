#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Times `weft.Balance.push_weights` of one expert to many ranks, with relays and without, in turns.

torchrun --nproc-per-node 8 bench/relays_bench.py --replicas 3 7 --json FILE
WEFT_RANKS_PER_DOMAIN=4 torchrun --nproc-per-node 8 bench/relays_bench.py --json FILE
torchrun --nproc-per-node 8 bench/relays_bench.py --device cuda

FILE keeps the rows that it has. Rank 0 has the expert; replicas are on as many other ranks, of all
domains in turns. A row has the time of the slowest rank (us_p50, us_p99), the exchanges one after
the other (rounds), and the bytes of whoever sends or gets most in each of them, all rounds together
(busiest_bytes; busiest_crossing_bytes: of those that cross to other domains).
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

import torch
import torch.distributed as dist

import weft
from weft.examples.program import finish, join, leave, machine
from weft.relays import MODES, Rounds

WARMUP = 2  # calls, of each mode
ITEM = 2  # bytes of bfloat16


def placed(replicas: int, domains: list[list[int]]) -> torch.Tensor:
    """int32 [ranks, 1]: expert 0, on one rank of each domain after the other."""
    most = max(map(len, domains))
    by_turns = [ranks[at] for at in range(most) for ranks in domains if at < len(ranks)]
    placement = torch.full((len(by_turns), 1), -1, dtype=torch.int32)
    placement[[rank for rank in by_turns if rank != 0][:replicas]] = 0
    return placement


def busiest(rounds: Rounds, domain_of: list[int], is_crossing: bool) -> int:
    """Copies, all rounds together."""
    total = 0
    for hops in rounds:
        counts: Counter[tuple[int, bool]] = Counter()
        for hop in hops:
            if not is_crossing or domain_of[hop.sender] != domain_of[hop.copy.at]:
                counts.update([(hop.sender, True), (hop.copy.at, False)])
        total += max(counts.values(), default=0)
    return total


def measure(
    replicas: int, elements: int, modes: list[str], rounds: int, device: torch.device
) -> list[dict]:
    num_ranks, rank = dist.get_world_size(), dist.get_rank()
    exchange = weft.Exchange(hidden=64, num_experts=num_ranks, device=device)
    placement = placed(replicas, exchange.group.domains)
    weight = torch.full((1, elements), rank + 1, dtype=torch.bfloat16, device=device)
    balances = {
        mode: weft.Balance(exchange, replicas=1, shapes=[(elements,)], relays=mode)
        for mode in modes
    }
    times: dict[str, list[float]] = {mode: [] for mode in modes}
    for _ in range(WARMUP + rounds):
        for mode, balance in balances.items():
            finish(device)
            dist.barrier()
            start = time.perf_counter()
            (found,) = balance.push_weights(placement, [weight])
            finish(device)
            times[mode].append(1e6 * (time.perf_counter() - start))
            assert placement[rank, 0] < 0 or bool((found == 1).all())
    rows = []
    for mode, balance in balances.items():
        slowest = torch.tensor(times[mode][WARMUP:], dtype=torch.float64)
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        ordered = sorted(slowest.tolist())
        made = balance._rounds(placement)
        crossing = busiest(made, balance._domain_of, is_crossing=True)
        row = {"op": "push_weights", "executor": device.type}
        row |= {"transport": balance._carrier.core.transport, "ranks": num_ranks}
        row |= {"domains": len(exchange.group.domains), "replicas": replicas}
        row |= {"expert_bytes": ITEM * elements, "mode": mode, "rounds": len(made)}
        row |= {"busiest_bytes": ITEM * elements * busiest(made, balance._domain_of, False)}
        row |= {"busiest_crossing_bytes": ITEM * elements * crossing, "checked": True}
        row["us_p50"] = round(statistics.median(ordered), 1)
        row["us_p99"] = round(ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))], 1)
        rows.append(row)
    return rows


def say(row: dict) -> None:
    if dist.get_rank() == 0:
        case = f"{row['replicas']} replicas, {row['domains']} domains, relays {row['mode']:<6}"
        moved = f"{row['rounds']} rounds, busiest {row['busiest_bytes'] / 1e6:,.0f} MB"
        print(f"{case} {moved}: {row['us_p50']:,.0f} us, p99 {row['us_p99']:,.0f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--replicas", nargs="+", type=int, default=[3, 7])
    parser.add_argument("--expert-mb", type=float, default=16.0)
    parser.add_argument("--modes", nargs="+", choices=MODES, default=["never", "always"])
    parser.add_argument("--rounds", type=int, default=30, help="calls of each mode")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cpu")
    parser.add_argument("--json", help="results file, to add to")
    parser.add_argument("--commit", help="that the build is of; default: asks git")
    args = parser.parse_args()
    device = join(args.device == "cuda")
    torch.set_num_threads(1)
    try:
        rows = []
        for replicas in args.replicas:
            if replicas >= dist.get_world_size():
                continue
            elements = int(1e6 * args.expert_mb) // ITEM
            rows += measure(replicas, elements, args.modes, args.rounds, device)
            for row in rows[-len(args.modes) :]:
                say(row)
        if args.json and dist.get_rank() == 0:
            file = Path(args.json)
            before = json.loads(file.read_text())["rows"] if file.exists() else []
            text = json.dumps({**machine(args.commit), "rows": before + rows}, indent=1)
            file.write_text(text + "\n")
    finally:
        with suppress(Exception):
            leave()


if __name__ == "__main__":
    main()
