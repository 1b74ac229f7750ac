#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""A whole vLLM on two GPUs over Weft, from pieces, on a machine without a network: its tokens
and log-probabilities against those of vLLM's default all-gather, its tokens a second, and engines
that have unequal work, come late, or are killed.

Where there is a network, once (CPython 3.12's wheel of Weft is of scripts/wheel):
  scripts/wheel 90a-real
  build/venv/bin/python tests/python/carry.py --vllm dist/weft-*-cp312-abi3-*.whl
On the machine, for each file of build/carry_vllm (below 50 MB), in as many transfers as wanted:
  mkdir -p /tmp/pieces && cp build/carry_vllm/FILE /tmp/pieces
Then, again as long as it ends with 75, which says that ways are left for the next call:
  python3 tests/python/vllm_gpu/run.py --pieces /tmp/pieces --seconds 570 --commit HASH \\
    --results vllm.2xh200.json

It ends with 1 if a way failed or tokens differ otherwise than by near ties, which are named. Logs
are in one archive beside the results; what is done is kept in --work and not done again, unless
--ways names it. --dry-run prints all commands.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import shlex
import signal
import socket
import subprocess
import sys
import tarfile
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
from vllm_gpu.compare import compare  # noqa: E402

WHOLE = HERE.parent / "vllm_whole"
VOCABULARY, LAYERS, EXPERTS, TOPK, WIDTH = 32768, 6, 128, 8, 768
WAY_S = 240  # the limit of a way; its start takes most
AGAIN = 75  # ways are left
REFERENCE = "default"

GRAPHS = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}
GRAPHS |= {"cudagraph_capture_sizes": [1, 2, 4, 8, 16, 32, 64]}
EAGER = {"enforce_eager": True}
BATCHES = {"enable_dbo": True, "dbo_decode_token_threshold": 8, "dbo_prefill_token_threshold": 64}
TRITON = {"attention_backend": "TRITON_ATTN"}
DEFAULT = {"all2all_backend": "allgather_reducescatter"}
HIGH = {"all2all_backend": "deepep_high_throughput"}
LOW = {"all2all_backend": "deepep_low_latency"}
# Each with vLLM's options; those whose names begin with "invariant" have their own reference.
WAYS = {
    REFERENCE: DEFAULT | EAGER,
    "high-throughput": HIGH | EAGER,
    "low-latency": LOW | {"compilation_config": GRAPHS},
    "low-latency-two-batches": LOW | EAGER | BATCHES,
    "invariant-default": DEFAULT | EAGER | TRITON,
    "invariant-high-throughput": HIGH | EAGER | TRITON,
    "default-graphs": DEFAULT | {"compilation_config": GRAPHS},
}
OPTIONS = {"max_model_len": 2048, "max_num_seqs": 64, "max_num_batched_tokens": 512}
OPTIONS |= {"gpu_memory_utilization": 0.6, "enable_prefix_caching": False}
OPTIONS |= {"enable_expert_parallel": True}
ENVIRONMENT = """
PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1 DO_NOT_TRACK=1 VLLM_NO_USAGE_STATS=1
NCCL_NVLS_ENABLE=0 NVSHMEM_DISABLE_NVLS=1 TORCH_SYMM_MEM_DISABLE_MULTICAST=1
VLLM_ALLREDUCE_USE_SYMM_MEM=0 VLLM_USE_DEEP_GEMM=0 VLLM_USE_FLASHINFER_SAMPLER=0
VLLM_WORKER_MULTIPROC_METHOD=spawn WEFT_CALL_TIMEOUT_S=30
"""
CHECK = """
import torch, vllm, weft, transformers
import vllm._custom_ops, vllm.vllm_flash_attn.flash_attn_interface as attention
from vllm.platforms import current_platform
assert torch.cuda.device_count() >= 2, f"{torch.cuda.device_count()} GPUs"
assert vllm.__file__.startswith(SITE) and weft.__file__.startswith(SITE), (vllm, weft)
print(torch.__version__, vllm.__version__, type(current_platform).__name__)
print("FlashAttention 3:", attention.is_fa_version_supported(3))
"""


def drawn(seed: int, number: int, least: int, most: int) -> list[list[int]]:
    dice = random.Random(seed)
    return [
        [dice.randrange(3, VOCABULARY) for _ in range(dice.randint(least, most))]
        for _ in range(number)
    ]


def tasks(way: str) -> list[dict]:
    def task(name, prompts, tokens, at=None, **more):
        shared = [prompts[::2], prompts[1::2]] if at is None else [prompts[:at], prompts[at:]]
        return {"name": name, "prompts": shared, "tokens": tokens} | more

    greedy = drawn(5, 48, 3, 60)
    found = [task("greedy", greedy, 64, best=5)]
    if "invariant" in way:
        return found
    long, short = drawn(6, 64, 1000, 1000), drawn(7, 128, 16, 16)
    for i in range(3):  # the first warms up
        found += [task(f"prefill {i}", long, 1), task(f"decode {i}", short, 128)]
    if "default" not in way:
        found.append(task("uneven", greedy, 64, at=1, best=5))
        found.append(task("late", greedy, 64, best=5, pause=5))
    if way in ("high-throughput", "low-latency"):
        found.append(task("killed", greedy, 1024, kill=60))
    return found


def kill_session(session: int) -> None:
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if os.getsid(int(path.name)) == session:
                os.kill(int(path.name), signal.SIGKILL)


class Run:
    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.end = time.monotonic() + args.seconds
        self.work = args.work
        self.site, self.model = self.work / "site", self.work / "model"
        if not args.dry_run:
            (self.work / "logs").mkdir(parents=True, exist_ok=True)
        self.environment = os.environ | dict(one.split("=") for one in ENVIRONMENT.split())
        for name in ("TRITON_CACHE_DIR", "VLLM_CACHE_ROOT", "VLLM_CONFIG_ROOT"):
            self.environment[name] = str(self.work / name.lower())
        paths = [str(self.site), *filter(None, [os.environ.get("PYTHONPATH")])]
        self.environment["PYTHONPATH"] = os.pathsep.join(paths)

    def step(self, name: str, seconds: float, command: list, **more: str) -> bool:
        """Runs a command with a limit and a log, and ends all that it started."""
        words = [str(word) for word in command]
        seconds = min(seconds, self.end - time.monotonic())
        if self.args.dry_run:
            shown = [f"{key}={value}" for key, value in more.items()]
            print(f"{name}:", shlex.join([*shown, "timeout", f"{seconds:.0f}", *words]))
            return True
        print(f"{name:28}", end=" ", flush=True)
        start, log = time.monotonic(), self.work / "logs" / f"{name}.log"
        with log.open("w") as out:
            done = subprocess.Popen(
                words, env=self.environment | more, stdout=out, stderr=out, start_new_session=True
            )
            try:
                status = done.wait(seconds)
            except subprocess.TimeoutExpired:
                status = "its time was over"
            finally:
                kill_session(done.pid)
                done.wait()
        took = f"{time.monotonic() - start:6.1f} s"
        print(f"{took}  {'done' if status == 0 else f'FAILED ({status}), see {log}'}", flush=True)
        if status != 0:
            lines = log.read_text(errors="replace").splitlines()
            print("\n".join(f"    {line[:300]}" for line in lines[-15:]), flush=True)
        return status == 0

    def prepare(self) -> bool:
        """The packages, whether they answer, the model: each once."""
        pieces = shlex.quote(str(self.args.pieces.resolve()))
        join = "sha256sum --check --quiet SHA256SUMS; cat site.tar.xz.* | tar xJf - -C"
        put = f"for wheel in *.whl; do python3 -m zipfile -e $wheel {self.site}; done"
        assemble = f"mkdir -p {self.site}; cd {pieces}; {join} {self.site}; {put}"
        model = [sys.executable, WHOLE / "small_model.py", self.model, VOCABULARY, LAYERS]
        model += [EXPERTS, TOPK, WIDTH, "cuda"]
        steps = {
            "assemble": ["bash", "-euc", assemble],
            "check": [sys.executable, "-c", f"SITE = {str(self.site)!r}{CHECK}"],
            "model": ["bash", "-euc", f"mkdir -p {self.model}; {shlex.join(map(str, model))}"],
        }
        if self.args.dry_run:
            print("environment:", ENVIRONMENT.strip().replace("\n", " "), f"PYTHONPATH={self.site}")
        for name, command in steps.items():
            done = self.work / f"{name}.done"
            if self.args.dry_run or not done.exists():
                if not self.step(name, 300, command):
                    return False
                if not self.args.dry_run:
                    done.touch()
        return True

    def files(self, way: str) -> list[Path]:
        """plan, answers, calls, and what became of it"""
        return [self.work / f"{way}.{kind}.json" for kind in ("plan", "answers", "calls", "state")]

    def run_way(self, way: str) -> None:
        plan, answers, calls, state = self.files(way)
        options = {"model": str(self.model)} | OPTIONS | WAYS[way]
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        if not self.args.dry_run:
            for old in (answers, calls):
                old.unlink(missing_ok=True)
            plan.write_text(json.dumps({"options": options, "port": port, "tasks": tasks(way)}))
        command = [sys.executable, WHOLE / "engines.py", plan, answers]
        if "default" not in way:
            weft = [sys.executable, "-m", "weft", "run", "--as", "deep_ep", "--json", calls, "--"]
            command = weft + command
        more = {"VLLM_BATCH_INVARIANT": "1"} if "invariant" in way else {}
        good = self.step(way, WAY_S, command, **more)
        if not self.args.dry_run:
            state.write_text(json.dumps({"good": good}))

    def run_ways(self) -> list[str]:
        """Runs ways while there is time; returns those left for the next call."""
        again = self.args.ways or self.args.dry_run
        ways = self.args.ways or WAYS
        left = [way for way in ways if again or not self.files(way)[3].exists()]
        while left and (self.args.dry_run or self.end - time.monotonic() > WAY_S):
            self.run_way(left.pop(0))
        return left

    def read(self, way: str) -> tuple[dict, bool]:
        _, answers, calls, state = self.files(way)
        told = json.loads(answers.read_text()) if answers.exists() else {}
        good = state.exists() and json.loads(state.read_text())["good"]
        if good and "default" not in way:
            report = json.loads(calls.read_text()) if calls.exists() else {}
            if not any(one["calls"] for one in report.values()):
                print(f"{way}: no call of Weft was counted")
                good = False
        return told, good


def together(name: str, told: dict) -> list | None:
    """A task's answers in the order of `drawn`."""
    first, second = told.get(name, {"answers": [None, None]})["answers"]
    if first is None or second is None:
        return None
    if name == "uneven":
        return first + second
    return [one for pair in zip(first, second, strict=True) for one in pair]


def rate(told: dict, task: str, num_tokens: int) -> float | None:
    """Tokens a second of both engines, the better of two rounds."""
    rounds = [told.get(f"{task} {i}", {"seconds": [None]})["seconds"] for i in (1, 2)]
    rounds = [max(seconds) for seconds in rounds if None not in seconds]
    return num_tokens / min(rounds) if rounds else None


def rows_of(read: dict[str, tuple[dict, bool]]) -> tuple[list[dict], bool]:
    """A row for each way and what it was asked, and whether all is as it should be."""
    rows, all_good = [], True
    for way, (told, good) in read.items():
        reference = "invariant-default" if "invariant" in way else REFERENCE
        wanted = together("greedy", read.get(reference, ({}, False))[0])
        row = {"op": "vllm", "mode": way, "against": reference, "finished": good}
        row |= {"prefill_tps": rate(told, "prefill", 64 * 1000)}
        row |= {"decode_tps": rate(told, "decode", 128 * 128)}
        row |= {"killed": told.get("killed", {}).get("first")}
        row |= {"late_s": max(filter(None, told.get("late", {}).get("seconds", [])), default=None)}
        all_good &= good
        for name in ("greedy", "uneven", "late"):
            got = together(name, told)
            if got and wanted:
                found = compare(wanted, got)
                all_good &= not found.differs
                rows.append(row | {"task": name} | found.row())
            elif name == "greedy":
                all_good = False
                rows.append(row | {"task": "no answer", "partings": []})
            row = {key: row[key] for key in ("op", "mode", "against", "finished")}
    return rows, all_good


COLUMNS = ["mode", "task", "finished", "prompts", "same_prompts", "tokens", "same_tokens"]
COLUMNS += ["same_bits", "largest", "near_ties", "differences", "prefill_tps", "decode_tps"]
COLUMNS += ["late_s", "killed"]


def show(rows: list[dict]) -> None:
    def cell(value):
        return f"{value:.4g}" if isinstance(value, float) else "-" if value is None else str(value)

    lines = [COLUMNS, *([cell(row.get(name)) for name in COLUMNS] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines)]
    for line in lines:
        print("  ".join(one.rjust(width) for one, width in zip(line, widths)))
    for row in rows:
        for one in row["partings"]:
            print(f"{row['mode']}, {row['task']}: {one}")


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pieces", type=Path, required=True)
    parser.add_argument("--results", type=Path, required=True)
    parser.add_argument("--work", type=Path, default=Path("/tmp/weft-vllm"))
    parser.add_argument("--ways", nargs="+", choices=WAYS, help="these, also if they were done")
    parser.add_argument(
        "--seconds", type=float, default=3600, help="begin no way that may end later"
    )
    parser.add_argument("--commit", help="that the build is of; git says it otherwise")
    parser.add_argument("--dry-run", action="store_true")
    run = Run(parser.parse_args(words))
    ready = run.prepare()
    left = run.run_ways() if ready else []
    if run.args.dry_run:
        return 0
    results = run.args.results
    results.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(results.with_suffix(".logs.tar.xz"), "w:xz") as logs:
        for path in (run.work / "logs", *run.work.glob("*.json")):
            logs.add(path, path.name)
    if not ready:
        return 1
    rows, good = rows_of({way: run.read(way) for way in WAYS if run.files(way)[3].exists()})
    show(rows)
    sys.path.insert(0, str(run.site))
    from weft.examples.program import machine

    results.write_text(json.dumps(machine(run.args.commit) | {"rows": rows}, indent=1))
    if left:
        print(f"left for the next call: {' '.join(left)}")
        return AGAIN
    print("all as it should be" if good else "NOT as it should be")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
