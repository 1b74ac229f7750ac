# SPDX-License-Identifier: Apache-2.0
"""Measures the gain of hiding the exchange in Qwen3-30B-A3B layers: seconds a step, share exposed.

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
--balance R adds modes in which popular experts have up to R replicas on each rank. All
modes of "weft" then add in the order of a token's choices, and experts multiply blocks of 128 rows,
so that the losses are still the same, bit for bit.
"peak" is torch's memory, "others" what else is taken on the GPU after the mode: CUDA, NCCL, Weft,
what earlier modes left.
"""

import argparse
import json
import logging
import os
import sys
import traceback
from dataclasses import asdict, fields, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import run as torchrun
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from weft.examples.program import join, leave, machine
from weft.examples.qwen3_exposed import Exposure
from weft.examples.qwen3_model import Shape
from weft.examples.qwen3_run import MODES, Result, run_mode, usual_modes

TINY = Shape(2, 32, 4, 2, 8, 8, 2, 16, vocabulary=128, sequence=32, sequences=1)  # for CPUs


def options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--gpus", type=int, help="processes to start (default: one for each GPU, or 2)")
    add("--device", choices=("auto", "cuda", "cpu"), default="auto")
    for field in fields(Shape):  # None stands for the default of the device
        tiny = getattr(TINY, field.name)
        usual = "48 or what fits" if field.name == "layers" else field.default
        name = "--" + field.name.replace("_", "-")
        add(name, type=int, help=f"default {usual}, on CPU {tiny}")
    add("--micro-batches", type=int, help="in a step (default 8, on CPU 2)")
    add("--steps", type=int, default=5, help="timed, in each mode (default 5)")
    add("--warmup", type=int, default=2, help="steps before them, not timed (default 2)")
    add("--modes", nargs="+", choices=list(MODES), help="default: all that go with the options")
    add("--balance", dest="replicas", type=int, metavar="R", help="replicas on each rank")
    add("--tokens", metavar="FILE", help="its bytes are the tokens (default: this package)")
    budgets = "of the modes with a budget (default 1.25, on CPU the number of ranks: all rows fit)"
    add("--capacity", type=float, help=budgets)
    add("--balanced", action="store_true", help="experts at random instead of by the router")
    add("--lr", type=float, help="default 4 / hidden: about the largest that is stable")
    add("--seed", type=int, default=1, help="of the weights")
    add("--exchange-sms", type=int, help="of Weft's exchanges beside computation (default: table)")
    add("--exchange-copies", choices=("auto", "never", "always"), help="by copy engines (auto)")
    add("--high-priority", action="store_true", help="free SMs go to the exchange lane first")
    add("--json", metavar="FILE", help="the results, for programs")
    add("--commit", help="of the build, for --json (default: asks git)")
    add("--trace", metavar="FOLDER", help="Chrome traces of one step of rank 0, one for each mode")
    return parser


def launch(args: argparse.Namespace) -> None:
    """Runs this program under torchrun, in as many processes as asked for. SystemExit with the
    status of the first that failed; it has said why, and torchrun's own report is left out."""
    num = args.gpus or (torch.cuda.device_count() if args.device == "cuda" else 2)
    if args.device == "cuda" and num > torch.cuda.device_count():
        raise SystemExit(f"--gpus {num}: there are {torch.cuda.device_count()}")
    options = ("--standalone", f"--nproc-per-node={num}", "-m", "weft.examples.qwen3_moe")
    logging.disable(logging.ERROR)
    try:
        torchrun.run(torchrun.parse_args([*options, *sys.argv[1:]]))
    except ChildFailedError as error:
        raise SystemExit(error.get_first_failure()[1].exitcode) from None


def sizes(args: argparse.Namespace) -> Shape:
    """Collective. The options over the defaults; as many layers as fit a GPU's free memory."""
    given = {f.name: getattr(args, f.name) for f in fields(Shape)}
    given = {name: value for name, value in given.items() if value is not None}
    shape = replace(Shape() if args.device == "cuda" else TINY, **given)
    if shape.experts % dist.get_world_size():
        raise SystemExit(f"--experts {shape.experts}: not a multiple of {dist.get_world_size()}")
    if args.device == "cuda" and args.layers is None:
        free = torch.tensor(torch.cuda.mem_get_info()[0])
        dist.all_reduce(free, dist.ReduceOp.MIN)
        shape = replace(shape, layers=layers_that_fit(shape, dist.get_world_size(), int(free)))
    return shape


def layers_that_fit(shape: Shape, ranks: int, free_bytes: int) -> int:
    """A rough estimate, 1 at least and all of them at most, that leaves a fifth of the memory.

    Weights and gradients are bf16. Activations are those of one micro-batch and a half: while one
    grows, the other shrinks.
    """
    s, tokens = shape, shape.sequences * shape.sequence
    projections = s.head_dim * (2 * s.heads + 2 * s.kv_heads)
    weights = s.hidden * (projections + s.experts) + 3 * s.hidden * s.width * s.experts // ranks
    attention = 8 * s.hidden + 3 * projections
    experts = s.topk * (4 * s.hidden + 6 * s.width)
    # Half as many rows again as a balanced router would send here.
    layer = 4 * weights + 1.5 * 2 * tokens * (attention + 1.5 * experts)
    ends = 2 * 4 * s.vocabulary * s.hidden + 16 * tokens * s.vocabulary
    return max(1, min(Shape.layers, int((0.8 * free_bytes - ends) / layer)))


def check_balance(args: argparse.Namespace) -> None:
    """Raises SystemExit where --balance and the modes do not go together."""
    wanted = [name for name in args.modes if MODES[name].balance]
    if wanted and args.replicas is None:
        raise SystemExit(f"--modes {wanted[0]}: how many replicas? (give --balance R)")
    if args.replicas is None:
        return
    if args.replicas < 0:
        raise SystemExit(f"--balance {args.replicas}: expected at least 0")
    delayed = [name for name in args.modes if MODES[name].delay]
    if delayed:
        raise SystemExit(f"--balance with --modes {delayed[0]}: its gradients are not of blocks")


Row = dict[str, Any]

UNSEEN = Exposure(None, None, None, None)  # where there is no trace

SHARES = {  # of the table: key in a row, heading
    "exchange_of_step": "exchange/step",
    "moving_of_step": "moving/step",
    "exposed_of_exchange": "exposed/exchange",
    "exposed_of_step": "exposed/step",
    "idle_of_step": "idle/step",
    "busiest_of_mean": "busiest",
}


def rows_of(results: dict[str, Result]) -> list[Row]:
    """Returns the rows of the table and the JSON file, None where a device has no such number."""
    first = median(next(iter(results.values())).seconds)
    rows = []
    for name, result in results.items():
        seconds, seen = median(result.seconds), result.exposure or UNSEEN
        peak, others = result.memory or (None, None)
        row = {
            "op": "train_step",
            "mode": name,
            "seconds": seconds,
            "ratio": first / seconds,
            "exchange_of_step": part(seen.exchange, seen.span),
            "moving_of_step": part(seen.moving, seen.span),
            "exposed_of_exchange": part(seen.exposed, seen.exchange),
            "exposed_of_step": part(seen.exposed, seen.span),
            "idle_of_step": part(seen.idle, seen.span),
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

    shown = (*SHARES.values(), "peak GiB", "others GiB")
    lines = [("mode", "s/step", "ratio", *shown), ("---",) + ("---:",) * 10]
    for row in rows:
        times = (f"{row['seconds']:.4f}", f"{row['ratio']:.2f}")
        shares = [share(row[key]) for key in SHARES]
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
    if args.capacity is None:
        args.capacity = 1.25 if args.device == "cuda" else float(dist.get_world_size())
    device, name = torch.device("cpu"), "CPU"
    if args.device == "cuda":
        device = torch.device("cuda", torch.cuda.current_device())
        name = torch.cuda.get_device_name()
    say(
        f"{dist.get_world_size()} x {name}: {shape.layers} layers, H {shape.hidden}, "
        f"{shape.experts} experts, top {shape.topk}, width {shape.width}, {args.micro_batches} x "
        f"{shape.sequences} x {shape.sequence} tokens a step and rank",
        flush=True,
    )
    results = {name: run_mode(name, args, shape, device, say) for name in args.modes}
    lines = complaints(results)
    rows = rows_of(results)
    say(table(rows))
    say("the losses are wrong:\n  " + "\n  ".join(lines) if lines else "losses equal bit for bit")
    if args.json and dist.get_rank() == 0:
        found = machine(args.commit) | {"ranks": dist.get_world_size(), "shape": asdict(shape)}
        found |= {"micro_batches": args.micro_batches, "steps": args.steps, "rows": rows}
        found |= {"losses_equal": not lines, "balanced": args.balanced, "capacity": args.capacity}
        found |= {"replicas": args.replicas}
        found |= {"exchange_sms": args.exchange_sms, "high_priority": args.high_priority}
        copies = os.environ.get("WEFT_COPY_ENGINES", "auto")
        found |= {"exchange_copies": copies, "exposed_has_copies": True}
        Path(args.json).write_text(json.dumps(found, indent=2) + "\n")
    return 1 if lines else 0


def main() -> int:
    args = options().parse_args()
    if args.device == "auto":
        args.device = "cuda" if torch.cuda.is_available() else "cpu"
    args.modes = args.modes or usual_modes(args.replicas)
    check_balance(args)
    if "RANK" not in os.environ:
        launch(args)
        return 0
    if args.exchange_copies:
        os.environ["WEFT_COPY_ENGINES"] = args.exchange_copies
    if args.device == "cuda":
        # Sums inside NVSwitch have no order of ours; rings have, and runs must agree in all bits.
        os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    else:
        torch.set_num_threads(1)  # the processes share the cores
    join(args.device == "cuda")
    try:
        return work(args)
    except Exception:
        traceback.print_exc()  # now: to leave the group may take as long as the others need
        raise
    finally:
        leave()


if __name__ == "__main__":
    sys.exit(main())
