#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Times Weft from Python on GPUs: its calls, and a whole MoE layer against alltoall over NCCL.

torchrun --nproc-per-node 4 bench/torch_bench.py exchange --json FILE --commit HASH
torchrun --nproc-per-node 4 bench/torch_bench.py layer --json FILE --commit HASH
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from dataclasses import dataclass

import torch
import torch.distributed as dist

import weft
from weft import fused_a2a
from weft.dispatcher import DispatcherGroups
from weft.examples.layer import DISPATCHERS, MoELayer, make_dispatcher
from weft.examples.program import machine


@dataclass
class Case:
    tokens: int
    hidden: int
    experts: int
    topk: int
    width: int  # of an expert


CASES = {
    "A": Case(4096, 7168, 256, 8, 2048),
    "B": Case(8192, 2048, 128, 8, 768),
    "C": Case(4096, 4096, 8, 2, 14336),
    "D": Case(128, 7168, 256, 8, 2048),
}


WARMUP = 5
HOST_CALLS = 20  # one after the other, before anybody waits
AHEAD_CYCLES = 1_000_000  # of a GPU, about 0.5 ms


def slowest(microseconds: list[float]) -> list[float]:
    """Return the slowest rank's value of each iteration, sorted."""
    times = torch.tensor(microseconds, device="cuda")
    dist.all_reduce(times, dist.ReduceOp.MAX)
    return sorted(times.tolist())


def timed(parts, prepare, rounds: int) -> list[list[float]]:
    """us on the GPU of the parts together, then of each. The first takes what prepare() gives, each
    other what the one before returned. Nobody waits between the rounds but the parts themselves;
    the GPU begins a round later than its host, as in a model, where attention is before them.

    The peak of torch's memory afterwards is that of the rounds that count.
    """
    flag = torch.zeros(1, device="cuda")
    rows = []
    for i in range(rounds + WARMUP):
        if i == WARMUP:
            torch.cuda.reset_peak_memory_stats()
        kept = [prepare()]
        torch.cuda._sleep(AHEAD_CYCLES)
        dist.all_reduce(flag)  # the GPUs start together
        events = [torch.cuda.Event(enable_timing=True) for _ in range(len(parts) + 1)]
        events[0].record()
        for part, event in zip(parts, events[1:], strict=True):
            kept.append(part(kept[-1]))
            event.record()
        del kept
        rows.append(events)
    torch.cuda.synchronize()
    spans = [(0, -1), *((i, i + 1) for i in range(len(parts)))]
    return [
        slowest([1e3 * events[a].elapsed_time(events[b]) for events in rows[WARMUP:]])
        for a, b in spans
    ]


def host_timed(run, given, rounds: int) -> list[float]:
    """us until a call returns, of calls that follow each other; the GPU is behind."""
    times = []
    for _ in range(rounds + WARMUP):
        torch.cuda.synchronize()
        dist.barrier()
        start = time.perf_counter()
        for _ in range(HOST_CALLS):
            run(given)
        times.append(1e6 * (time.perf_counter() - start) / HOST_CALLS)
    torch.cuda.synchronize()
    return slowest(times[WARMUP:])


def row_of(op: str, name: str, mode: str, times: list[float], layout: str) -> dict:
    case = CASES[name]
    return {
        "op": op,
        "case": name,
        "executor": "cuda",
        "transport": "peer",
        "layout": layout,
        "dtype": "bfloat16",
        "ranks": dist.get_world_size(),
        "tokens": case.tokens,
        "hidden": case.hidden,
        "experts": case.experts,
        "topk": case.topk,
        "pad": 128,
        "sms": 0,
        "mode": mode,
        "us_p50": round(statistics.median(times), 3),
        "us_p99": round(times[min(len(times) - 1, int(0.99 * len(times)))], 3),
        "wire_bytes": 0,
        "logical_bytes": 0,
        "limit_us": 0.0,
        "percent_of_limit": 0.0,
        "checked": False,
    }


def exchange_rows(name: str, case: Case, rounds: int) -> list[dict]:
    device = torch.device("cuda", torch.cuda.current_device())
    exchange = weft.Exchange(
        hidden=case.hidden,
        num_experts=case.experts,
        max_tokens=case.tokens,
        max_topk=case.topk,
        device=device,
    )
    x = torch.randn(case.tokens, case.hidden, device=device).to(torch.bfloat16)
    budget = 2 * case.tokens * case.topk

    def routing():
        scores = torch.rand(case.tokens, case.experts, device=device)
        return scores.topk(case.topk).indices

    def both(idx, **options):
        return weft.plan_and_dispatch(exchange, idx, x, pad_multiple=128, **options)

    def two_calls(idx):
        plan = exchange.plan(idx, pad_multiple=128)
        return plan, weft.dispatch(plan, x)

    def planned():
        plan, out = both(routing())
        return plan, out.rows

    idx = routing()
    plan, sent = both(idx, row_budget=budget)
    kinds = [
        ("plan+dispatch", "exact", both, routing),
        ("plan+dispatch", "exact, two calls", two_calls, routing),
        ("plan+dispatch", "budget", lambda idx: both(idx, row_budget=budget), routing),
        ("combine", "exact", lambda given: weft.combine(*given), planned),
    ]
    host_kinds = [
        ("plan", lambda idx: exchange.plan(idx, pad_multiple=128, row_budget=budget), idx),
        ("dispatch", lambda plan: weft.dispatch(plan, x), plan),
        ("combine", lambda rows: weft.combine(plan, rows), sent.rows),
    ]
    rows = []

    def note(op: str, mode: str, times: list[float]) -> None:
        rows.append(row_of(op, name, f"python {mode}", times, "expert_major"))
        say(f"{name} {op:<14} {mode:<16} {rows[-1]['us_p50']:9.1f} us")

    for op, mode, run, prepare in kinds:
        note(op, mode, timed([run], prepare, rounds)[0])
    for op, run, given in host_kinds:
        note(op, "budget, host", host_timed(run, given, max(rounds // 4, 5)))
    return rows


def layer_rows(name: str, case: Case, rounds: int) -> list[dict]:
    group = dist.group.WORLD
    groups = DispatcherGroups(ep=group, expt_tp=None, tp_ep=group)
    x = torch.randn(case.tokens, case.hidden, device="cuda").to(torch.bfloat16)
    rows = []
    for kind in DISPATCHERS:
        dispatcher = make_dispatcher(kind, groups, case.experts, case.topk)
        with torch.device("cuda"):  # drawing the weights takes a CPU half a minute
            layer = MoELayer(dispatcher, case.hidden, case.width, case.experts, case.topk)
        layer.to(torch.bfloat16)
        for weights in layer.parameters():
            torch.nn.init.normal_(weights, std=0.02)

        def leaf(layer=layer):
            layer.zero_grad()
            return x.clone().requires_grad_()

        def forward(leaf, layer=layer):
            return layer(leaf)

        def backward(out):
            out.backward(x)

        both, first, second = timed([forward, backward], leaf, rounds)
        row = row_of("moe_layer", name, f"{kind}, forward + backward", both, "expert_major")
        row["forward_us_p50"] = round(statistics.median(first), 3)
        row["backward_us_p50"] = round(statistics.median(second), 3)
        row |= memory_of(kind, layer)
        if rows:
            row["rival"] = {"name": "alltoall over NCCL", "us_p50": rows[0]["us_p50"]}
        else:
            row["executor"] = row["transport"] = "nccl"
        rows.append(row)
        say(
            f"{name} {kind:<9} {row['us_p50']:9.1f} us ({row['forward_us_p50']:.1f} + "
            f"{row['backward_us_p50']:.1f}) {rows[0]['us_p50'] / row['us_p50']:5.2f} x "
            f"{row['peak_bytes'] / 2**30:6.2f} GiB, without parameters and gradients "
            f"{(row['peak_bytes'] - row['parameter_bytes']) / 2**30:.2f}, exchange "
            f"{row['exchange_bytes'] / 2**20:.0f} MiB"
        )
        del layer, dispatcher, leaf, forward
        torch.cuda.empty_cache()
    return rows


def memory_of(kind: str, layer: MoELayer) -> dict[str, int]:
    """Bytes, those of the rank that has the most: torch's peak, what of it no dispatcher changes,
    and what the exchange has beside torch."""
    buffers = {"deepep": "_buffer", "uccl_ep": "_uccl_buffer", "hybridep": "_hybrid_ep_buffer"}
    beside = 0
    if kind in buffers:
        runtime = getattr(fused_a2a, buffers[kind]).runtime
        held = getattr(runtime, "exchanges", runtime).footprint()
        beside = sum(held.values()) - held["buffer_bytes"]  # output rows, which torch has counted
    weights = sum(tensor.numel() * tensor.element_size() for tensor in layer.parameters())
    found = torch.tensor(
        [torch.cuda.max_memory_allocated(), 2 * weights, beside], dtype=torch.int64, device="cuda"
    )
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return dict(zip(("peak_bytes", "parameter_bytes", "exchange_bytes"), found.tolist()))


def say(text: str) -> None:
    if dist.get_rank() == 0:
        print(text, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("exchange", "layer"))
    parser.add_argument("--cases", nargs="+", choices=CASES, default=["A", "B"])
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--json", help="results file")
    parser.add_argument("--commit", help="that the build is of; default: asks git")
    args = parser.parse_args()
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")  # not everywhere allowed
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("cpu:gloo,cuda:nccl")
    rows = []
    for name in args.cases:
        measure = exchange_rows if args.what == "exchange" else layer_rows
        rows += measure(name, CASES[name], args.rounds)
    if args.json and dist.get_rank() == 0:
        with open(args.json, "w") as file:
            json.dump({**machine(args.commit), "rows": rows}, file, indent=1)
            file.write("\n")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
