# SPDX-License-Identifier: Apache-2.0
"""What hiding the exchange is worth in layers of Qwen3-30B-A3B: seconds a step, share exposed.

python -m weft.examples.qwen3_moe --gpus 4
python -m weft.examples.qwen3_moe --gpus 2 --device cpu
torchrun --nproc-per-node 4 -m weft.examples.qwen3_moe --tokens book.txt --trace traces

Synthetic bf16 weights (fp32 on CPUs), the bytes of a file as tokens, plain SGD. "weft" is the flex
dispatcher's "hybridep"; with "budget" a rank has a fixed number of rows, and no host waits to know
how many it gets. Each mode trains from the same weights on the same tokens. The program fails
unless all losses of a dispatcher are the same, bit for bit, or if a budget did not suffice.

"exchange": the share of the step in which some exchange runs. "moving": the same without the waits
for other ranks: of each exchange the time of the rank that waited least. "exposed": the time in
which tokens travel and nothing else runs, as a share of all the time in which they travel, and of
the step. "idle": the share of the step in which the GPU waits for the host. These are from a trace
of one more step, mean over the ranks. "busiest": routes to the rank that gets most, of the mean, on
the average of that step's calls: the others wait for it.
--balanced chooses experts at random, as a training with a loss that balances them would end.
"peak" is torch's memory, "others" what else is taken on the GPU after the mode: CUDA, NCCL, Weft,
what earlier modes left.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from weft.examples.measured import machine
from weft.examples.qwen3_attention import Shape
from weft.examples.qwen3_run import MODES, Result, run_mode
from weft.examples.qwen3_start import options, sizes, start

Row = dict[str, Any]

SHARES = ("exchange_of_step", "moving_of_step", "exposed_of_exchange", "exposed_of_step")
SHARES += ("idle_of_step",)


def rows_of(results: dict[str, Result]) -> list[Row]:
    """What the table and the JSON file show, None where a device has no such number."""
    first = median(next(iter(results.values())).seconds)
    rows = []
    for name, result in results.items():
        seconds, seen = median(result.seconds), result.exposure
        peak, others = result.memory or (None, None)
        span = seen.span if seen else None
        row = {
            "op": "train_step",
            "mode": name,
            "seconds": seconds,
            "ratio": first / seconds,
            "exchange_of_step": part(seen and seen.exchange, span),
            "moving_of_step": part(seen and seen.moving, span),
            "exposed_of_exchange": part(seen and seen.exposed, seen and seen.exchange),
            "exposed_of_step": part(seen and seen.exposed, span),
            "idle_of_step": part(seen and seen.idle, span),
            "busiest_of_mean": result.busiest,
            "peak_gib": None if peak is None else peak / 2**30,
            "others_gib": None if others is None else others / 2**30,
            "losses": result.losses.mean(dim=1).tolist(),
        }
        rows.append(row)
    return rows


def part(time: float | None, whole: float | None) -> float | None:
    return None if time is None or not whole else time / whole


def table(rows: list[Row]) -> str:
    """A Markdown table."""

    def share(value: float | None) -> str:
        return "-" if value is None else f"{100 * value:.1f} %"

    def gib(value: float | None) -> str:
        return "-" if value is None else f"{value:.1f}"

    shown = ("exchange/step", "moving/step", "exposed/exchange", "exposed/step", "idle/step")
    shown += ("busiest", "peak GiB", "others GiB")
    lines = [("mode", "s/step", "ratio", *shown), ("---",) + ("---:",) * 10]
    for row in rows:
        times = (f"{row['seconds']:.4f}", f"{row['ratio']:.2f}")
        shares = [share(row[key]) for key in (*SHARES, "busiest_of_mean")]
        lines.append((row["mode"], *times, *shares, gib(row["peak_gib"]), gib(row["others_gib"])))
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def complaints(results: dict[str, Result]) -> list[str]:
    """Collective. A line for each mode whose losses are not those of its dispatcher's first.

    Also one where they are no numbers, since then it says little that they are the same.
    """
    firsts: dict[str, str] = {}
    lines = []
    for name, result in results.items():
        first = firsts.setdefault(MODES[name].dispatcher, name)
        bits, expected = (results[n].losses.view(torch.int32) for n in (name, first))
        counts = torch.stack([(bits != expected).sum(), (~result.losses.isfinite()).sum()])
        dist.all_reduce(counts)
        different, infinite = counts.tolist()
        of = f"of {bits.numel() * dist.get_world_size()} losses"
        if different:
            lines.append(f"{name}: {different} {of} are not those of {first}")
        if result.has_dropped:
            lines.append(f"{name}: tokens were dropped (try a larger --capacity)")
        if infinite:
            lines.append(f"{name}: {infinite} {of} are not finite (try a smaller --lr)")
    return lines


def work(args: argparse.Namespace) -> int:
    """Collective. -> the exit status."""
    say = print if dist.get_rank() == 0 else (lambda *_, **__: None)
    shape = sizes(args)
    args.micro_batches = args.micro_batches or (8 if args.device == "cuda" else 2)
    device = torch.device("cpu")
    if args.device == "cuda":
        device = torch.device("cuda", torch.cuda.current_device())
    say(heading(args, shape), flush=True)
    results = {name: run_mode(name, args, shape, device, say) for name in args.modes}
    lines = complaints(results)
    rows = rows_of(results)
    say(table(rows))
    say("the losses are wrong:\n  " + "\n  ".join(lines) if lines else "losses equal bit for bit")
    if args.json and dist.get_rank() == 0:
        found = machine(args.commit) | {"ranks": dist.get_world_size(), "shape": asdict(shape)}
        found |= {"micro_batches": args.micro_batches, "steps": args.steps, "rows": rows}
        found |= {"losses_equal": not lines, "balanced": args.balanced, "capacity": args.capacity}
        found |= {"exchange_sms": args.exchange_sms, "high_priority": args.high_priority}
        copies = os.environ.get("WEFT_COPY_ENGINES", "auto")
        found |= {"exchange_copies": copies, "exposed_has_copies": True}
        Path(args.json).write_text(json.dumps(found, indent=2) + "\n")
    return 1 if lines else 0


def heading(args: argparse.Namespace, shape: Shape) -> str:
    return (
        f"{dist.get_world_size()} x {device_name(args)}: {shape.layers} layers, H {shape.hidden}, "
        f"{shape.experts} experts, top {shape.topk}, width {shape.width}, "
        f"{args.micro_batches} x {shape.sequences} x {shape.sequence} tokens a step and rank"
    )


def device_name(args: argparse.Namespace) -> str:
    return torch.cuda.get_device_name() if args.device == "cuda" else "CPU"


def main() -> int:
    return start(options(__doc__.splitlines()[0], list(MODES)).parse_args(), work)


if __name__ == "__main__":
    sys.exit(main())
