# SPDX-License-Identifier: Apache-2.0
"""The options of the benchmark, its processes, and the sizes that fit."""

from __future__ import annotations

import argparse
import os
import socket
import traceback
from collections.abc import Callable
from dataclasses import fields, replace

import torch
import torch.distributed as dist
from torch import multiprocessing

from weft.examples.leave import leave
from weft.examples.qwen3_attention import Shape

TINY = Shape(2, 32, 4, 2, 8, 8, 2, 16, vocabulary=128, sequence=32, sequences=1)  # for CPUs


def options(description: str, modes: list[str]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description)
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
    add("--modes", nargs="+", default=modes, choices=modes)
    add("--tokens", metavar="FILE", help="its bytes are the tokens (default: this package)")
    add("--capacity", type=float, default=1.25, help="of the modes with a budget (default 1.25)")
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


def start(args: argparse.Namespace, work: Callable[[argparse.Namespace], int]) -> int:
    """Runs `work` in as many processes as asked for; under torchrun in this one. -> exit status."""
    if args.device == "auto":
        args.device = "cuda" if torch.cuda.is_available() else "cpu"
    if "RANK" in os.environ:
        return _join(args, work)
    num = args.gpus or (torch.cuda.device_count() if args.device == "cuda" else 2)
    if args.device == "cuda" and num > torch.cuda.device_count():
        raise SystemExit(f"--gpus {num}: there are {torch.cuda.device_count()}")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    try:
        multiprocessing.spawn(_process, (num, port, args, work), nprocs=num)
    except multiprocessing.ProcessExitedException as error:
        return error.exit_code
    return 0


def _process(rank: int, num: int, port: int, args: argparse.Namespace, work: Callable) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(num)}
    status = _join(args, work)
    if status:
        raise SystemExit(status)


def _join(args: argparse.Namespace, work: Callable[[argparse.Namespace], int]) -> int:
    if args.exchange_copies:
        os.environ["WEFT_COPY_ENGINES"] = args.exchange_copies
    if args.device == "cuda":
        # Sums inside NVSwitch have no order of ours; rings have, and runs must agree in all bits.
        os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("cpu:gloo,cuda:nccl")
    else:
        torch.set_num_threads(1)  # the processes share the cores
        dist.init_process_group("gloo")
    try:
        return work(args)
    except Exception:
        traceback.print_exc()  # now: to leave the group may take as long as the others need
        raise
    finally:
        leave()


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
