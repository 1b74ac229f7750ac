#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Time and memory of a training step of a Hugging Face model whose experts are spread over ranks:
Transformers' own all-to-all beside Weft.

torchrun --nproc-per-node 2 bench/transformers_bench.py --json FILE --commit HASH
torchrun --nproc-per-node 2 bench/transformers_bench.py --device cpu --steps 2

The model is a Qwen3-MoE of random weights, FSDP2 around it, on made-up text. Both ways load the
same weights and take turns, a round of steps each, so that a clock that drifts meets both. Seconds
are those of the slowest rank; memory is torch's most of the first rank. It ends with 1 where losses
of the first step differ by more than 1 percent.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import weft.transformers
from weft.examples.program import finish, join, leave, machine

WAYS = ("all_to_all", "weft")
TINY = {"layers": 2, "hidden": 64, "heads": 4, "width": 32, "experts": 8, "topk": 2}
USUAL = {"layers": 8, "hidden": 2048, "heads": 16, "width": 768, "experts": 128, "topk": 8}
VOCABULARY = 1000


def save_model(args: argparse.Namespace, folder: str) -> None:
    from transformers import AutoModelForCausalLM, Qwen3MoeConfig

    torch.manual_seed(1)
    config = Qwen3MoeConfig(
        vocab_size=VOCABULARY,
        hidden_size=args.hidden,
        moe_intermediate_size=args.width,
        num_hidden_layers=args.layers,
        num_attention_heads=args.heads,
        num_key_value_heads=args.heads,
        head_dim=args.hidden // args.heads,
        num_experts=args.experts,
        num_experts_per_tok=args.topk,
        dtype=torch.bfloat16,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)


class Way:
    """A model that is trained by one implementation."""

    def __init__(self, name: str, folder: str, device: torch.device) -> None:
        from transformers import AutoModelForCausalLM
        from transformers.distributed import DistributedConfig

        size = dist.get_world_size()
        spread = DistributedConfig(fsdp_size=size, ep_size=size, ep_implementation=name)
        self.name, self.device = name, device
        self.model = AutoModelForCausalLM.from_pretrained(folder, distributed_config=spread)
        self.model.train()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3)
        self.seconds: list[float] = []
        self.losses: list[float] = []
        self.peak_gib = 0.0

    def step(self, ids: torch.Tensor) -> None:
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        finish(self.device)
        dist.barrier()
        start = time.perf_counter()
        loss = self.model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        finish(self.device)
        spent = torch.tensor([time.perf_counter() - start], device=self.device)
        dist.all_reduce(spent, dist.ReduceOp.MAX)
        self.seconds.append(spent.item())
        self.losses.append(loss.item())
        if self.device.type == "cuda":
            self.peak_gib = max(self.peak_gib, torch.cuda.max_memory_allocated() / 2**30)

    def row(self, first: Way, warmup: int) -> dict[str, Any]:
        middle, base = (statistics.median(one.seconds[warmup:]) for one in (self, first))
        row = {"op": "train_step", "mode": self.name, "seconds": middle, "ratio": base / middle}
        # Shares of an exchange in a step are from traces, which this program does not take.
        row |= dict.fromkeys(("exposed_of_exchange", "exposed_of_step", "idle_of_step"))
        row |= {"peak_gib": self.peak_gib, "all_seconds": self.seconds[warmup:]}
        return row | {"losses": self.losses}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--device", choices=("cuda", "cpu"), default="cuda")
    for name, value in USUAL.items():
        add(f"--{name}", type=int, help=f"default {value}, on CPUs {TINY[name]}")
    add("--sequence", type=int, help="tokens of a text (default 4096, on CPUs 16)")
    add("--sequences", type=int, default=1, help="texts of a rank and step")
    add("--steps", type=int, default=20, help="timed, of each way")
    add("--warmup", type=int, default=3, help="steps before them")
    add("--json", help="results file")
    add("--commit", help="that the build is of; default: asks git")
    args = parser.parse_args()
    for name, usual in (USUAL | {"sequence": 4096}).items():
        if getattr(args, name) is None:
            tiny = (TINY | {"sequence": 16})[name]
            setattr(args, name, usual if args.device == "cuda" else tiny)
    device = join(args.device == "cuda")
    rank = dist.get_rank()
    weft.transformers.register()
    folder = [tempfile.mkdtemp() if rank == 0 else ""]
    dist.broadcast_object_list(folder)
    if rank == 0:
        save_model(args, folder[0])
    dist.barrier()
    ways = [Way(name, folder[0], device) for name in WAYS]
    generator = torch.Generator().manual_seed(rank)
    for number in range(args.warmup + args.steps):
        shape = (args.sequences, args.sequence)
        ids = torch.randint(1, VOCABULARY, shape, generator=generator).to(device)
        for way in ways:
            way.step(ids)
            if rank == 0:
                print(f"step {number} {way.name:<10} {way.seconds[-1]:.4f} s", flush=True)
    rows = [way.row(ways[0], args.warmup) for way in ways]
    if rank == 0:
        for row in rows:
            print(
                f"{row['mode']:<10} {row['seconds']:.4f} s, {row['peak_gib']:.1f} GiB", flush=True
            )
        if args.json:
            shape = {name: getattr(args, name) for name in (*USUAL, "sequence", "sequences")}
            run = machine(args.commit) | {"ranks": dist.get_world_size(), "shape": shape}
            run |= {"micro_batches": 1, "steps": args.steps, "rows": rows}
            Path(args.json).write_text(json.dumps(run, indent=1) + "\n")
    wanted, got = (way.losses[0] for way in ways)
    is_off = abs(got - wanted) > 1e-2 * wanted
    if is_off:
        print(f"rank {rank}: first loss {got} by weft, {wanted} by all_to_all", flush=True)
    leave()
    return int(is_off)


if __name__ == "__main__":
    sys.exit(main())
