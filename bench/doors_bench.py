#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Times what programs call: DeepEP's buffers and fused_a2a, by Weft or by the module itself.

bench/doors_bench.py --module weft --json FILE --commit HASH
torchrun --nproc-per-node 4 bench/doors_bench.py --module deep_ep

A row has the time on the GPU (us_p50), the time until the call returns less its wait for a number
of rows (host_us_p50, host_wait_us_p50; null where the module does not tell its wait), and what the
call queues on the GPU (gpu_items: kernels, copies and memsets, by the profiler, which makes calls
slower once it has been used: so when all times are taken). Modes: "eager": call after call, the
GPU behind its host. "graph1": one captured call, replayed. "graph": eight calls of different inputs
in one graph, each an eighth of the replay. "first": the host time of the first call, and the bytes
that the buffer holds after it. "profiled": means of calls of a cold host under the profiler, and
how much of that are launches, outputs of torch's allocator, and events and streams. On CPU tensors
(--device cpu) there are host times only. What these ways of timing cost by themselves is case
"none", an empty kernel instead of a call: "empty" of one thread, "empty_wide" of 512 on each
multiprocessor (whose launch from Python is not timed).
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import json
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from weft.examples.program import join, leave, machine


class Case(NamedTuple):
    tokens: int
    hidden: int
    experts: int
    topk: int


CASES = {
    "A": Case(4096, 7168, 256, 8),
    "B": Case(8192, 2048, 128, 8),
    "D": Case(128, 7168, 256, 8),
    "D16": Case(16, 7168, 256, 8),
    "D1": Case(1, 7168, 256, 8),
    "small": Case(16, 512, 8, 2),  # of tests
    "none": Case(0, 0, 0, 0),  # an empty kernel on a GPU
}
LOW_LATENCY = ("D", "D16", "D1")
IN_GRAPH = 8  # calls, each with inputs of its own
REPLAYS = 50
WARMUP = 3
PROFILED = 5  # calls on each input, for what the host's time consists of
AHEAD_CYCLES = 2_000_000  # of a GPU, about 1 ms
PEERS = Path(__file__).resolve().parent / "results/peers/peers.1xh200.json"


class Door(NamedTuple):
    """A call, ready to be made on any of the inputs."""

    op: str
    dtype: str  # of the payload
    call: Callable[[Any], Any]
    inputs: list[Any]
    buffer: Callable[[], Any]  # which the first call may have to make
    sms: int = 0
    is_static: bool = True  # can be captured
    waits: bool = False  # its host waits for a number of rows
    is_timed_on_host: bool = True


class Bench:
    def __init__(self, module: str, case: str, device: torch.device, shrinks: bool) -> None:
        self.case_name, self.case, self.device = case, CASES[case], device
        self.shrinks = shrinks
        self.is_weft = module == "weft"
        self.ep = importlib.import_module("weft.compat.deep_ep" if self.is_weft else module)
        self.world = dist.get_world_size()
        self.gen = torch.Generator(device=device).manual_seed(dist.get_rank())

    # Inputs

    def tokens(self) -> torch.Tensor:
        shape = (self.case.tokens, self.case.hidden)
        return torch.randn(shape, device=self.device, generator=self.gen).to(torch.bfloat16)

    def routing(self) -> tuple[torch.Tensor, torch.Tensor]:
        shape = (self.case.tokens, self.case.experts)
        scores = torch.rand(shape, device=self.device, generator=self.gen)
        weights, idx = scores.topk(self.case.topk)
        return idx, weights

    def eight(self, make: Callable[[], Any]) -> list[Any]:
        return [make() for _ in range(IN_GRAPH)]

    # Doors

    def doors(self) -> Iterator[Door]:
        if self.case_name == "none":
            yield from self.empty()
            return
        if self.case_name in (*LOW_LATENCY, "small"):
            yield from self.low_latency()
        yield from self.normal()
        yield from self.hybrid()
        if self.is_weft:
            yield from self.fused()

    def empty(self) -> Iterator[Door]:
        nothing = self.eight(lambda: None)
        yield Door("empty", "", lambda _: torch.cuda._sleep(0), nothing, lambda: None)
        sms = torch.cuda.get_device_properties(self.device).multi_processor_count
        kernel = torch.cuda._compile_kernel('extern "C" __global__ void empty() {}', "empty")
        yield Door(
            "empty_wide",
            "",
            lambda _: kernel(grid=(sms, 1, 1), block=(512, 1, 1)),
            nothing,
            lambda: None,
            sms,
            is_timed_on_host=False,
        )

    def low_latency(self) -> Iterator[Door]:
        case = self.case
        hint = self.ep.Buffer.get_low_latency_rdma_size_hint(
            case.tokens, case.hidden, self.world, case.experts
        )
        buffer = self.ep.Buffer(
            dist.group.WORLD,
            num_rdma_bytes=hint,
            low_latency_mode=True,
            num_qps_per_rank=max(1, case.experts // self.world),
            **({"enable_shrink": True} if self.shrinks else {}),
        )
        formats = {"bfloat16": {"use_fp8": False}, "fp8": {"use_fp8": True}}
        formats["ue8m0"] = {"use_fp8": True, "round_scale": True, "use_ue8m0": True}
        scale = torch.full((1,), 448 * 6 / 8.0, device=self.device)  # for numbers of at most 8
        formats["mxfp8"] = {"use_fp8": False, "use_mxfp8": True}
        formats["nvfp4"] = {"use_fp8": False, "use_nvfp4": True, "x_global_scale": scale}
        known = inspect.signature(buffer.low_latency_dispatch).parameters

        def dispatch(given, **options):
            x, idx, _ = given
            return buffer.low_latency_dispatch(x, idx, case.tokens, case.experts, **options)

        def combine(given):
            _, idx, weights, rows, handle = given
            return buffer.low_latency_combine(rows, idx, weights, handle)

        def both(given):
            rows, _, handle, *_ = dispatch(given, use_fp8=False)
            return combine((*given, rows, handle))

        def sent():
            given = (self.tokens(), *self.routing())
            rows, _, handle, *_ = dispatch(given, use_fp8=False)
            return *given, rows, handle

        inputs = self.eight(lambda: (self.tokens(), *self.routing()))
        for dtype, options in formats.items():
            if not options.keys() <= known.keys():
                continue  # not every module has every format
            yield Door(
                "ll_dispatch",
                dtype,
                lambda given, options=options: dispatch(given, **options),
                inputs,
                lambda: buffer,
            )
        yield Door("ll_dispatch+combine", "bfloat16", both, inputs, lambda: buffer)
        yield Door("ll_combine", "bfloat16", combine, self.eight(sent), lambda: buffer)

    def normal(self) -> Iterator[Door]:
        buffer = self.ep.Buffer(dist.group.WORLD, num_nvl_bytes=1 << 30)
        sms = self.ep.Buffer.num_sms

        def dispatch(given):
            x, idx, weights = given
            to_rank, to_host, to_expert, is_in, _ = buffer.get_dispatch_layout(
                idx, self.case.experts
            )
            return buffer.dispatch(
                x,
                num_tokens_per_rank=to_rank,
                num_tokens_per_rdma_rank=to_host,
                is_token_in_rank=is_in,
                num_tokens_per_expert=to_expert,
                topk_idx=idx,
                topk_weights=weights,
            )

        def sent():
            x, *routing = (self.tokens(), *self.routing())
            rows, _, weights, _, handle, _ = dispatch((x, *routing))
            return x, rows, weights, handle

        inputs = self.eight(lambda: (self.tokens(), *self.routing()))
        yield Door("v1_dispatch", "bfloat16", dispatch, inputs, lambda: buffer, sms, False, True)
        done = self.eight(sent)
        yield Door(
            "v1_dispatch_cached",
            "bfloat16",
            lambda given: buffer.dispatch(given[0], handle=given[3]),
            done,
            lambda: buffer,
            sms,
        )
        yield Door(
            "v1_combine",
            "bfloat16",
            lambda given: buffer.combine(given[1], given[3], topk_weights=given[2]),
            done,
            lambda: buffer,
            sms,
        )

    def hybrid(self) -> Iterator[Door]:
        buffer = self.ep.HybridEPBuffer(
            group=dist.group.WORLD,
            hidden_dim=self.case.hidden,
            max_num_of_tokens_per_rank=self.case.tokens,
            num_local_experts=self.case.experts // self.world,
        )

        def dispatch(given):
            x, idx, weights = given
            return buffer.dispatch_with_permute(
                hidden=x, topk_idx=idx, topk_weights=weights, num_of_experts=self.case.experts
            )

        def sent():
            rows, probs, *_, handle = dispatch((self.tokens(), *self.routing()))
            return rows, probs, handle

        inputs = self.eight(lambda: (self.tokens(), *self.routing()))
        yield Door("hybrid_dispatch", "bfloat16", dispatch, inputs, lambda: buffer, 0, False, True)
        yield Door(
            "hybrid_combine",
            "bfloat16",
            lambda given: buffer.combine_with_unpermute(
                hidden=given[0], probs=given[1], handle=given[2]
            ),
            self.eight(sent),
            lambda: buffer,
        )

    def fused(self) -> Iterator[Door]:
        from weft import fused_a2a

        group, case = dist.group.WORLD, self.case

        def leaf():
            idx, weights = self.routing()
            return self.tokens().requires_grad_(), idx, weights.requires_grad_()

        def dense(idx, weights):
            probs = torch.zeros((case.tokens, case.experts), device=self.device)
            probs = probs.scatter(1, idx, weights.detach())
            return (probs > 0), probs.requires_grad_()

        def dispatch(given):
            return fused_a2a.fused_dispatch(*given, case.experts, group)

        def sent():
            rows, *_, handle = dispatch(leaf())
            return rows.detach().requires_grad_(), handle

        def hybrid_dispatch(given):
            x, routing_map, probs = given
            local = case.experts // self.world
            return fused_a2a.hybrid_ep_dispatch(x, routing_map, probs, group, local)

        def mapped():
            x, idx, weights = leaf()
            return x, *dense(idx, weights)

        def hybrid_sent():
            rows, *_, handle = hybrid_dispatch(mapped())
            return rows.detach().requires_grad_(), handle

        def deep_ep_buffer():
            return fused_a2a.get_buffer(group, fused_a2a.get_hidden_bytes(inputs[0][0]))

        hybrid_ep_buffer = fused_a2a.buffers.current_hybrid_ep_buffer
        inputs = self.eight(leaf)
        yield Door("fused_dispatch", "bfloat16", dispatch, inputs, deep_ep_buffer, 0, False, True)
        yield Door(
            "fused_combine",
            "bfloat16",
            lambda given: fused_a2a.fused_combine(given[0], group, given[1]),
            self.eight(sent),
            deep_ep_buffer,
        )
        inputs = self.eight(mapped)
        yield Door(
            "hybrid_ep_dispatch",
            "bfloat16",
            hybrid_dispatch,
            inputs,
            hybrid_ep_buffer,
            0,
            False,
            True,
        )
        yield Door(
            "hybrid_ep_combine",
            "bfloat16",
            lambda given: fused_a2a.hybrid_ep_combine(*given),
            self.eight(hybrid_sent),
            hybrid_ep_buffer,
        )


def pool_of(buffer: Any) -> Any:
    """The exchanges of a buffer of Weft's; None for another module's."""
    runtime = getattr(buffer, "runtime", None)
    pool = getattr(runtime, "exchanges", runtime)
    return pool if hasattr(pool, "footprint") else None


def host_wait(buffer: Any) -> float | None:
    """us that the host has waited for numbers of rows, ever; None if the module does not tell."""
    pool = pool_of(buffer)
    return None if pool is None else 1e6 * pool.last.core.stats()["host_wait_seconds"]


def held(buffer: Any) -> int | None:
    pool = pool_of(buffer)
    return None if pool is None else sum(pool.footprint().values())


def slowest(values: list[float], device: torch.device) -> list[float]:
    """Return the slowest rank's value of each sample."""
    times = torch.tensor(values, device=device, dtype=torch.float64)
    dist.all_reduce(times, dist.ReduceOp.MAX)
    return times.tolist()


def settle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    dist.barrier()


def host_timed(door: Door, rounds: int, device: torch.device) -> tuple[list[float], float | None]:
    """us of each round's call until it returns, and the mean wait within; the GPU is behind."""
    times: list[float] = []
    for i in range(rounds + WARMUP):
        if i == WARMUP:
            settle(device)
            before = host_wait(door.buffer())
        if i < WARMUP or door.waits or i % IN_GRAPH == 0:
            settle(device)  # else the queue of the GPU fills
        start = time.perf_counter()
        door.call(door.inputs[i % IN_GRAPH])
        times.append(1e6 * (time.perf_counter() - start))
    settle(device)
    wait = None if before is None else (host_wait(door.buffer()) - before) / rounds
    return slowest(times[WARMUP:], device), wait


def eager_timed(door: Door, rounds: int, device: torch.device) -> list[float]:
    times = []
    flag = torch.zeros(1, device=device)
    for i in range(rounds + WARMUP):
        torch.cuda._sleep(AHEAD_CYCLES)
        dist.all_reduce(flag)  # the GPUs start together
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        kept = door.call(door.inputs[i % IN_GRAPH])
        end.record()
        torch.cuda.synchronize()
        del kept
        times.append(1e3 * begin.elapsed_time(end))
    return slowest(times[WARMUP:], device)


def graph_timed(door: Door, calls: int, rounds: int, device: torch.device) -> list[float]:
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        door.call(door.inputs[0])
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        kept = [door.call(given) for given in door.inputs[:calls]]
    times = []
    for _ in range(max(3, rounds // 10)):
        settle(device)
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(REPLAYS):
            graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(1e3 * begin.elapsed_time(end) / (REPLAYS * calls))
    del kept
    return slowest(times, device)


def gpu_items(door: Door) -> int:
    """Return how many items one call queues, on any stream."""
    activities = [torch.profiler.ProfilerActivity.CUDA]
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=activities) as profile:
        kept = door.call(door.inputs[0])
        torch.cuda.synchronize()
    del kept
    events = profile.profiler.kineto_results.events()
    return sum(event.device_type() == torch.autograd.DeviceType.CUDA for event in events)


def host_parts(door: Door) -> dict[str, float]:
    """us of a call's host on this rank, and what it consists of; its waits are in no part."""
    given = PROFILED * door.inputs

    def round_us() -> float:
        spent, before = 0.0, host_wait(door.buffer()) or 0.0
        for one in given:
            torch.cuda.synchronize()
            start = time.perf_counter()
            kept = door.call(one)
            spent += 1e6 * (time.perf_counter() - start)
            del kept
        torch.cuda.synchronize()
        return spent - ((host_wait(door.buffer()) or 0.0) - before)

    # The profiler's own first steps are in the round that is thrown away.
    steps = torch.profiler.schedule(wait=0, warmup=1, active=1, repeat=1)
    with torch.profiler.profile(schedule=steps) as profile:
        round_us()
        profile.step()
        spent = round_us()
    averages = profile.key_averages()

    def mean_of(*names: str) -> float:
        found = sum(one.self_cpu_time_total for one in averages if one.key.startswith(names))
        return round(found / len(given), 1)

    parts = {"host_us": round(spent / len(given), 1)}
    parts["launches_us"] = mean_of("cudaLaunch", "cuLaunch", "cudaMemcpy", "cudaMemset")
    parts["outputs_us"] = mean_of("aten::empty", "aten::new_empty", "aten::zeros", "aten::zero_")
    parts["events_us"] = mean_of("cudaEvent", "cudaStream")
    return parts


def rival_of(row: dict, peers: list[dict]) -> dict:
    key = ("op", "dtype", "ranks", "tokens", "hidden", "experts", "topk")
    for peer in peers:
        is_same_mode = ("graph" in peer["mode"]) == (row["mode"] == "graph1")
        if is_same_mode and all(peer[one] == row[one] for one in key):
            return {"rival": {"name": peer["executor"], "us_p50": peer["us_p50"]}}
    return {}


def head_of(bench: Bench, door: Door) -> dict:
    case = bench.case
    row = {"op": door.op, "case": bench.case_name, "executor": bench.device.type}
    row |= {"transport": "peer", "layout": "shrink" if bench.shrinks else ""}
    row |= {"dtype": door.dtype, "ranks": bench.world}
    row |= {"tokens": case.tokens, "hidden": case.hidden, "experts": case.experts}
    row |= {"topk": case.topk, "pad": 1, "sms": door.sms, "wire_bytes": 0, "logical_bytes": 0}
    return row | {"checked": False}


def measure(bench: Bench, door: Door, rounds: int, first_us: float) -> Iterator[dict]:
    row, device = head_of(bench, door), bench.device

    def done(mode: str, times: list[float], **more: Any) -> dict:
        ordered = sorted(times)
        p99 = ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))] if ordered else None
        p50 = round(statistics.median(ordered), 3) if ordered else None
        return row | {"mode": mode, "us_p50": p50, "us_p99": p99} | more

    host, wait = host_timed(door, rounds, device)
    more = {"host_wait_us_p50": None if wait is None else round(wait, 3)}
    more["host_us_p50"] = None
    if door.is_timed_on_host and (wait is not None or not door.waits):
        more["host_us_p50"] = round(statistics.median(host) - (wait or 0), 3)
    if device.type == "cuda":
        yield done("eager", eager_timed(door, rounds, device), **more)
        for calls, mode in (1, "graph1"), (IN_GRAPH, "graph"):
            if door.is_static:
                yield done(mode, graph_timed(door, calls, rounds, device))
    else:
        yield done("eager", [], **more)
    if "dispatch" in door.op and door.op != "v1_dispatch_cached":
        yield done("first", [], host_us_p50=round(first_us, 3), held_bytes=held(door.buffer()))


def run(args: argparse.Namespace, device: torch.device) -> list[dict]:
    peers = json.loads(PEERS.read_text())["rows"] if args.module == "weft" else []
    rows = []
    for bench, door in doors(args, device):
        start = time.perf_counter()
        door.call(door.inputs[0])
        settle(device)
        first_us = 1e6 * (time.perf_counter() - start)
        for row in measure(bench, door, args.rounds, first_us):
            rows.append(row | (rival_of(row, peers) if device.type == "cuda" else {}))
            say(rows[-1])
    if device.type == "cuda":
        eager = {
            (row["case"], row["op"], row["dtype"]): row for row in rows if row["mode"] == "eager"
        }
        for bench, door in doors(args, device):
            for _ in range(WARMUP):
                door.call(door.inputs[0])  # its buffer is a new one, whose first calls do more
            settle(device)
            row = eager[bench.case_name, door.op, door.dtype]
            row["gpu_items"] = gpu_items(door)
            rows.append(head_of(bench, door) | {"mode": "profiled"} | host_parts(door))
            parts = " ".join(f"{key} {value}" for key, value in rows[-1].items() if "_us" in key)
            say(row, f"{row['gpu_items']} items on the GPU, {parts}")
    return rows


def doors(args: argparse.Namespace, device: torch.device) -> Iterator[tuple[Bench, Door]]:
    for case in args.cases:
        bench = Bench(args.module, case, device, args.shrink)
        for door in bench.doors():
            if not args.ops or door.op in args.ops:
                yield bench, door


def say(row: dict, what: str = "") -> None:
    def text(key: str) -> str:
        value = row.get(key)
        return "-" if value is None else f"{value:,.1f}"

    if dist.get_rank() == 0:
        name = f"{row['case']:<5} {row['op']:<19} {row['dtype']:<8} {row['mode']:<6}"
        host = f"host {text('host_us_p50'):>9} + {text('host_wait_us_p50'):>8} us"
        print(name, what or f"{text('us_p50'):>9} us, {host}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--module", choices=("weft", "deep_ep"), default="weft")
    usual = ["D", "D16", "D1", "A", "B", "none"]
    parser.add_argument("--cases", nargs="+", choices=CASES, help=f"default: {' '.join(usual)}")
    parser.add_argument("--ops", nargs="+", help="only these")
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--shrink", action="store_true", help="low latency with enable_shrink")
    parser.add_argument("--json", help="results file")
    parser.add_argument("--commit", help="that the build is of; default: asks git")
    args = parser.parse_args()
    args.cases = args.cases or usual[: 6 if args.device == "cuda" else 5]
    device = join(args.device == "cuda")
    try:
        rows = run(args, device)
        if args.json and dist.get_rank() == 0:
            text = json.dumps({**machine(args.commit), "rows": rows}, indent=1)
            Path(args.json).write_text(text + "\n")
    finally:
        with suppress(Exception):
            leave()


if __name__ == "__main__":
    main()
