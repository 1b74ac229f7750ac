#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Seconds of a step of Megatron-Core's pretraining, by its own all-to-all and by its flex
dispatchers over Weft, with and without its combined schedule of forward and backward.

bench/megatron_bench.py --ranks 2 --json bench/results/steps-megatron.2xh200.json --commit HASH
bench/megatron_bench.py --device cpu --steps 2 --warmup 1 --limit 120

The training is that of tests/python/megatron_lm/pretrain.py, in bf16 on made-up text. Megatron-Core
is --megatron, or the newest wheel in build/read or build/carry (tests/python/carry.py), or the
installed one, which has no ncclep. Each way runs by itself under torchrun, with a limit of time and
a log in --logs; one that fails is left out of the results, and the program then ends with 1. It
does so, too, where losses before the first step are not within 1 percent of the first way's, and
on CPUs where all steps of Weft's backends are not the same, bit for bit. --ways takes some only.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
TESTS = ROOT / "tests/python"
sys.path[:0] = [str(TESTS), str(TESTS / "megatron_lm")]

BACKENDS = ("alltoall", "deepep", "hybridep", "ncclep")
WAYS = [name + how for name in BACKENDS for how in ("", "-overlap")]
# Fields of over_weft.Shape; Run has the tokens of a text and the texts of a micro-batch.
TINY = {"layers": 2, "hidden": 32, "heads": 2, "width": 64, "experts": 4, "topk": 2}
USUAL = {"layers": 8, "hidden": 2048, "heads": 16, "width": 768, "experts": 128, "topk": 8}
VOCABULARY = {"cpu": 64, "cuda": 32768}


def train(args: argparse.Namespace) -> None:
    """Trains as a rank of one way; rank 0 writes the steps to args.json."""
    import torch
    import torch.distributed as dist
    from pretrain import Run, Trainer, on_this_machine

    from ranks import after_call
    from weft.examples.program import finish, join, leave

    backend, _, overlap = args.way.partition("-")
    device = join(args.device == "cuda")
    settings = {"bf16": True, "params_dtype": torch.bfloat16}
    settings["use_cpu_initialization"] = device.type == "cpu"
    if overlap:
        settings["overlap_moe_expert_parallel_comm"] = True
    shape = {name: getattr(args, name) for name in USUAL}
    shape["vocabulary"] = VOCABULARY[device.type]
    lengths = (args.sequence,)
    run = Run(backend, settings, False, lengths, args.sequences, args.micro_batches, shape)

    def body(rank, num_ranks, group):
        trainer = Trainer(rank, run)
        losses, seconds = [], []
        for _ in range(args.warmup + args.steps):
            finish(device)
            dist.barrier()
            start = time.perf_counter()
            losses.append(trainer.step()[0])
            finish(device)
            seconds.append(time.perf_counter() - start)
        slowest = torch.tensor(seconds, device=device, dtype=torch.float64)
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        peak = torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else 0.0
        if rank == 0:
            found = {"seconds": slowest.tolist()[args.warmup :], "losses": losses, "peak_gib": peak}
            Path(args.json).write_text(json.dumps(found))

    on_this_machine(body)(dist.get_rank(), dist.get_world_size(), dist.group.WORLD, args.megatron)
    while after_call:
        after_call.pop()()
    leave()


def command_of(args: argparse.Namespace, way: str, file: Path) -> list[str]:
    given = {"way": way, "json": file, "device": args.device, "megatron": args.megatron}
    given |= {name: getattr(args, name) for name in (*USUAL, "sequence", "sequences")}
    given |= {name: getattr(args, name) for name in ("micro_batches", "steps", "warmup")}
    options = [f"--{name.replace('_', '-')}={value}" for name, value in given.items()]
    program = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    return [*program, f"--nproc-per-node={args.ranks}", __file__, *options]


def measured(args: argparse.Namespace, way: str, logs: Path) -> dict[str, Any] | None:
    """None where the way has failed or was too long; its log says why."""
    file, log = logs / f"{way}.json", logs / f"{way}.log"
    file.unlink(missing_ok=True)
    # NVLink multicast is not everywhere allowed.
    usual = {"OMP_NUM_THREADS": "1", "NCCL_NVLS_ENABLE": "0", "CUDA_DEVICE_MAX_CONNECTIONS": "32"}
    with log.open("w") as out:
        command = command_of(args, way, file)
        streams = {"stdout": out, "stderr": subprocess.STDOUT}
        process = subprocess.Popen(
            command, env=usual | os.environ, start_new_session=True, **streams
        )
        try:
            status = process.wait(args.limit)
        except subprocess.TimeoutExpired:
            status = f"no end within {args.limit} s"
        finally:
            if process.poll() is None:
                # torchrun ends its ranks, which have sessions of their own.
                process.terminate()
                try:
                    process.wait(60)
                except subprocess.TimeoutExpired:
                    os.killpg(process.pid, signal.SIGKILL)
    if file.is_file():  # a rank that cannot leave has measured all the same
        return json.loads(file.read_text())
    lines = log.read_text(errors="replace").splitlines()
    why = next((line for line in reversed(lines) if "Error: " in line), "")
    print(f"{way:<18} FAILED ({status}, log {log}) {why.strip()[:200]}", flush=True)
    return None


def row_of(way: str, found: dict[str, Any], first: dict[str, Any], ours: dict[str, Any]) -> dict:
    seconds, base = statistics.median(found["seconds"]), statistics.median(first["seconds"])
    same = None if way.startswith("alltoall") else found["losses"] == ours["losses"]
    row: dict[str, Any] = {"op": "train_step", "mode": way, "seconds": seconds}
    row |= {"ratio": base / seconds, "all_seconds": found["seconds"]}
    # Shares of an exchange in a step are from traces, which this program does not take.
    row |= dict.fromkeys(("exposed_of_exchange", "exposed_of_step", "idle_of_step"))
    first_loss, wanted = found["losses"][0][0], first["losses"][0][0]
    row |= {"peak_gib": found["peak_gib"], "losses": [step[0] for step in found["losses"]]}
    return row | {"first_loss_off": abs(first_loss - wanted) / wanted, "same_bits": same}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--device", choices=("cuda", "cpu"), default="cuda")
    add("--ranks", type=int, default=2)
    add("--ways", nargs="+", choices=WAYS, default=WAYS)
    for name, value in USUAL.items():
        add(f"--{name}", type=int, help=f"default {value}, on CPUs {TINY[name]}")
    add("--sequence", type=int, help="tokens of a text (default 4096, on CPUs 16)")
    add("--sequences", type=int, default=1, help="texts of a micro-batch")
    add("--micro-batches", type=int, default=4)
    add("--steps", type=int, default=30, help="timed, of each way")
    add("--warmup", type=int, default=5, help="steps before them")
    add("--limit", type=float, default=240, help="seconds for each way")
    add("--megatron", help="folder or wheel to import Megatron-Core from; '' is the installed one")
    add("--logs", default=str(ROOT / "build/megatron_bench"))
    add("--json", help="results file")
    add("--commit", help="that the build is of; default: asks git")
    add("--way", choices=WAYS, help=argparse.SUPPRESS)  # for a rank of it
    args = parser.parse_args()
    for name, usual in (USUAL | {"sequence": 4096}).items():
        if getattr(args, name) is None:
            tiny = (TINY | {"sequence": 16})[name]
            setattr(args, name, usual if args.device == "cuda" else tiny)
    if args.way:
        train(args)
        return 0
    if args.megatron is None:
        folders = [ROOT / "build/read", ROOT / "build/carry"]
        wheels = [str(one) for folder in folders for one in folder.glob("megatron_core-*.whl")]
        args.megatron = max(wheels, default="")
    logs = Path(args.logs)
    logs.mkdir(parents=True, exist_ok=True)
    found, rows = {}, []
    for way in args.ways:
        one = measured(args, way, logs)
        if one is None:
            continue
        found[way] = one
        ours = next((found[name] for name in found if not name.startswith("alltoall")), one)
        rows.append(row_of(way, one, found[next(iter(found))], ours))
        row = rows[-1]
        losses = f"first loss off by {row['first_loss_off']:.1e}, same bits: {row['same_bits']}"
        print(f"{way:<18} {row['seconds']:9.4f} s {row['ratio']:6.2f} times, {losses}", flush=True)
        if args.json:  # what there is, should the next way not end
            write(args, rows)
    wrong = [row["mode"] for row in rows if row["first_loss_off"] > 1e-2]
    if args.device == "cpu":
        wrong += [row["mode"] for row in rows if row["same_bits"] is False]
    if wrong:
        print(f"losses differ: {', '.join(wrong)}")
    return int(bool(wrong) or len(rows) < len(args.ways))


def write(args: argparse.Namespace, rows: list[dict]) -> None:
    from weft.examples.program import machine

    shape = {name: getattr(args, name) for name in (*USUAL, "sequence", "sequences")}
    run = machine(args.commit) | {"ranks": args.ranks, "shape": shape}
    run |= {"micro_batches": args.micro_batches, "steps": args.steps}
    run |= {"megatron": Path(args.megatron).name, "rows": rows}
    Path(args.json).write_text(json.dumps(run, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
