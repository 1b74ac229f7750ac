# SPDX-License-Identifier: Apache-2.0
"""How much of the exchange nothing hides, from a trace of one step under torch's profiler.

An exchange kernel is known by its name, in every mode alike, and not by its stream: NCCL has
streams of its own, and the lane of exchanges also adds up residuals and puts rows in order. Where
copy engines carry rows, no kernel runs between the one that packs them and the one that takes what
has arrived; this time belongs to the exchange, whether the trace has the copies or not.
"""

import itertools
import json
import re
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from weft.examples.program import finish

_PACKS = re.compile(r"weft::.*\bpack_(rows|vector|bulk)\b")
_TAKES = re.compile(r"weft::.*\b(fan_out_rows|sum_vector|sum_bulk)\b")


class Kernel(NamedTuple):
    """One kernel of a trace, in whatever unit of time the trace has."""

    begin: float
    end: float
    name: str
    stream: int


@dataclass(frozen=True)
class Exposure:
    """Times in the unit of the trace."""

    span: float | None  # from the first kernel's begin to the last one's end
    exchange: float | None  # some exchange runs, copies included
    exposed: float | None  # some exchange runs, and no kernel of another kind on another stream
    idle: float | None  # nothing runs: the GPU waits for the host
    moving: float | None = None  # of `exchange`, without the waits for other ranks; None: not known


def is_exchange(name: str) -> bool:
    """Tells whether a kernel moves tokens or counts (NCCL or Weft), not gradient sums."""
    if "nccl" in name.lower():
        return "Reduce" not in name
    return "weft::" in name  # the library has no other kernels


def copies(kernels: Iterable[Kernel]) -> list[Kernel]:
    """Returns a kernel for each time that copy engines run between two kernels of a stream."""
    found = []
    last: dict[int, Kernel] = {}
    for kernel in sorted(kernels):
        before = last.get(kernel.stream)
        if before is not None and _PACKS.search(before.name) and _TAKES.search(kernel.name):
            found.append(Kernel(before.end, kernel.begin, "weft::copies", kernel.stream))
        last[kernel.stream] = kernel
    return found


def exchange_times(kernels: Iterable[Kernel]) -> list[float]:
    """Returns the time of each exchange kernel, copies included, by begin."""
    kernels = sorted(kernels)
    return [k.end - k.begin for k in sorted(kernels + copies(kernels)) if is_exchange(k.name)]


def exposure(
    kernels: Iterable[Kernel], is_exchange: Callable[[str], bool] = is_exchange
) -> Exposure:
    """Measures exposure: exchanges hide only under other streams' other kernels."""
    kernels = list(kernels)
    kernels = [k for k in kernels + copies(kernels) if k.end > k.begin]
    if not kernels:
        return Exposure(0.0, 0.0, 0.0, 0.0)
    edges = [(k.begin, 1, k) for k in kernels] + [(k.end, -1, k) for k in kernels]
    edges.sort()
    running: Counter[tuple[bool, int]] = Counter()  # kernels by kind and stream
    exchange = exposed = idle = 0.0
    for (begin, change, kernel), (end, _, _) in itertools.pairwise(edges):
        running[is_exchange(kernel.name), kernel.stream] += change
        exchanging, others = (
            {stream for (kind, stream), count in running.items() if kind == wanted and count}
            for wanted in (True, False)
        )
        exchange += (end - begin) * bool(exchanging)
        exposed += (end - begin) * any(not others - {stream} for stream in exchanging)
        idle += (end - begin) * (not exchanging and not others)
    return Exposure(edges[-1][0] - edges[0][0], exchange, exposed, idle)


def trace_step(
    step: Callable[[], None], name: str, folder: str | None, device: torch.device
) -> Exposure | None:
    """Collective. Profiles one more step; rank 0's trace stays in `folder`, if given."""
    is_gpu = device.type == "cuda"
    # Only kernels on a GPU: to note every operator would slow the host, and so change the step.
    kinds = [ProfilerActivity.CUDA if is_gpu else ProfilerActivity.CPU]
    with profile(activities=kinds) as profiler:
        # Profilers take their time to start, and exchanges would wait for the last of them. This
        # sum is on CPUs, so that it is no kernel.
        dist.all_reduce(torch.zeros(1))
        step()
        finish(device)
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / "trace.json"
        if folder and dist.get_rank() == 0:
            Path(folder).mkdir(parents=True, exist_ok=True)
            path = Path(folder) / f"{name}.json"
        profiler.export_chrome_trace(str(path))
        if not is_gpu:
            return None
        kernels = read_trace(path)
    seen = exposure(kernels)
    times = torch.tensor([seen.span, seen.exchange, seen.exposed, seen.idle], dtype=torch.float64)
    dist.all_reduce(times)
    mean = (times / dist.get_world_size()).tolist()
    return Exposure(*mean, moving=without_waits(exchange_times(kernels)))


def without_waits(times: list[float]) -> float | None:
    """Collective. Sums, over all exchanges, the time of the rank that waited least.

    times: of this rank's exchanges, in the order in which all ranks have them. None if ranks saw
    different numbers of them.
    """
    counts = torch.tensor([len(times), -len(times)])
    dist.all_reduce(counts, dist.ReduceOp.MIN)
    if counts[0] != -counts[1]:
        return None
    least = torch.tensor(times, dtype=torch.float64)
    dist.all_reduce(least, dist.ReduceOp.MIN)
    return least.sum().item()


def read_trace(path: Path) -> list[Kernel]:
    """Reads a torch.profiler Chrome trace's kernels, in microseconds."""
    events = json.loads(path.read_text(errors="replace"))["traceEvents"]
    return [
        Kernel(e["ts"], e["ts"] + e["dur"], e["name"], e["args"].get("stream", e["tid"]))
        for e in events
        if e.get("cat") == "kernel" and e.get("ph") == "X"
    ]
