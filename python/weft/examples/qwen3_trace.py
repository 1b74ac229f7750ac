# SPDX-License-Identifier: Apache-2.0
"""One step under torch's profiler."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from weft.examples.qwen3_exposed import Exposure, Kernel, exchange_times, exposure


def trace_step(
    step: Callable[[], None], name: str, folder: str | None, device: torch.device
) -> Exposure | None:
    """Collective. One more step under the profiler; rank 0's trace stays in `folder`, if given."""
    is_gpu = device.type == "cuda"
    # Kernels alone on a GPU: to note every operator would slow the host, and so change the step.
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
    """Collective. The sum over all exchanges of the time of the rank that had to wait least.

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
    """The kernels of a Chrome trace of torch.profiler, in microseconds."""
    events = json.loads(path.read_text(errors="replace"))["traceEvents"]
    return [
        Kernel(e["ts"], e["ts"] + e["dur"], e["name"], e["args"].get("stream", e["tid"]))
        for e in events
        if e.get("cat") == "kernel" and e.get("ph") == "X"
    ]


def finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()
