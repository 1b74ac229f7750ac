# SPDX-License-Identifier: Apache-2.0
"""Trains one mode for some steps on the bytes of a file, and measures it. qwen3_moe.py calls it for
each mode; qwen3_model.py has the model."""

import argparse
import gc
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from weft.dispatcher import DispatcherGroups
from weft.examples.program import finish
from weft.examples.qwen3_exposed import Exposure, trace_step
from weft.examples.qwen3_model import QwenMoE, Shape, build, fill, is_expert_weight
from weft.overlap import (
    TransformerModelChunkSchedulePlan,
    combined_1f1b_schedule_for_no_pipelining,
    sequential_schedule_for_no_pipelining,
)


def token_ids(path: str | None) -> Tensor:
    """int64: the bytes of a file, or of this package's own source."""
    if path is None:
        files = sorted(Path(__file__).parents[1].rglob("*.py"))
        text = b"".join(file.read_bytes() for file in files)
    else:
        text = Path(path).read_bytes()
    return torch.frombuffer(bytearray(text), dtype=torch.uint8).long()


def micro_batch(
    ids: Tensor, index: int, sequence: int, sequences: int = 1
) -> tuple[Tensor, Tensor]:
    """Returns windows of a cyclic text, from `index * sequences` on, and each token's next one, as
    [sequences, sequence]."""
    first = torch.arange(index * sequences, (index + 1) * sequences)[:, None] * sequence
    windows = ids[(first + torch.arange(sequence + 1)) % len(ids)]
    return windows[:, :-1], windows[:, 1:]


@dataclass(frozen=True)
class Mode:
    dispatcher: str
    overlap: bool = False
    delay: bool = False  # weight gradients
    budget: bool = False  # rows of a rank are so many at most, and the host waits for no count
    balance: bool = False  # popular experts have replicas


MODES = {
    "alltoall": Mode("alltoall"),
    "alltoall-overlap": Mode("alltoall", overlap=True),
    "weft": Mode("hybridep"),
    "weft-overlap": Mode("hybridep", overlap=True),
    "weft-overlap-wgrad": Mode("hybridep", overlap=True, delay=True),
    "weft-budget": Mode("hybridep", budget=True),
    "weft-budget-overlap": Mode("hybridep", overlap=True, budget=True),
    "weft-budget-overlap-wgrad": Mode("hybridep", overlap=True, delay=True, budget=True),
    "weft-balance": Mode("hybridep", balance=True),
    "weft-balance-overlap": Mode("hybridep", overlap=True, balance=True),
}


def usual_modes(replicas: int | None) -> list[str]:
    """Returns the modes that run unless others are asked for. With replicas none leaves gradients
    of weights for later: these are sums of blocks then."""
    if replicas is None:
        return [name for name, mode in MODES.items() if not mode.balance]
    return [name for name, mode in MODES.items() if not mode.delay]


@dataclass
class Result:
    """Results of one mode. Times are the slowest rank's; None where there is no GPU to ask."""

    losses: Tensor  # fp32 [steps, micro-batches] of this rank
    seconds: list[float]  # of each timed step
    exposure: Exposure | None = None  # mean over the ranks
    memory: tuple[int, int] | None = None  # see `memory`
    busiest: float | None = None  # see `busiest`
    has_dropped: bool = False  # some rank's rows were more than its budget


class Trainer:
    """The model of one mode, its schedule and its text."""

    def __init__(
        self, name: str, args: argparse.Namespace, shape: Shape, device: torch.device
    ) -> None:
        mode, group = MODES[name], dist.group.WORLD
        self.has_replicas = mode.balance
        usual = torch.get_default_dtype()
        torch.set_default_dtype(torch.bfloat16 if device.type == "cuda" else torch.float32)
        try:
            with device:
                groups = DispatcherGroups(ep=group, expt_tp=None, tp_ep=group)
                options = {"delay": mode.delay, "high_priority": args.high_priority}
                if mode.overlap:
                    options["num_sms"] = args.exchange_sms
                if mode.budget:
                    options["capacity"] = args.capacity
                if args.replicas is not None:
                    options["replicas"] = args.replicas if mode.balance else 0
                if args.balanced:  # other experts on every rank and in every layer
                    options["balance"] = (args.seed + 7919 * (1 + group.rank())) * 1009
                self.model = build(shape, mode.dispatcher, groups, **options)
        finally:
            torch.set_default_dtype(usual)
        fill(self.model, args.seed)
        # The last layer's input has the square H, which bounds the rate from above.
        rate = 4 / shape.hidden if args.lr is None else args.lr
        self.optimiser = torch.optim.SGD(self.model.parameters(), lr=rate)
        # The vocabulary may be smaller than the tokens are.
        self.ids = token_ids(args.tokens) % shape.vocabulary
        self.shape, self.num, self.device = shape, args.micro_batches, device
        self.schedule = sequential_schedule_for_no_pipelining
        if mode.overlap:
            self.schedule = combined_1f1b_schedule_for_no_pipelining
        self.losses: list[Tensor] = []  # fp32 [micro-batches] of each step
        self.texts: tuple[Tensor, Tensor] | None = None  # of the running step, see `_load`

    def step(self) -> None:
        """Collective. Runs a step's micro-batches; updates weights."""
        self.texts = self._load()
        self.optimiser.zero_grad()
        scale = 1.0 / (self.num * dist.get_world_size())
        losses = self.schedule(
            self._plan, self.num, output_grad=lambda out: torch.full_like(out, scale)
        )
        add_over_ranks(self.model)
        self.optimiser.step()
        self.losses.append(torch.stack(losses))

    def has_dropped(self) -> bool:
        """Collective. Returns whether any rank's call exceeded its row budget."""
        dropped = torch.zeros(1, dtype=torch.int32, device=self.device)
        for layer in self.model.modules():
            flag = layer.dispatcher.check_over_budget() if isinstance(layer, QwenMoE) else None
            if flag is not None:
                dropped |= flag
        dist.all_reduce(dropped)
        return bool(dropped.item())

    def count_loads(self) -> list[Tensor]:
        """A list that gets the routes of each later call to each expert, call by call; with
        replicas those that came to each rank, of which this one knows its own."""
        loads: list[Tensor] = []

        def note_rows(_: torch.nn.Module, given: tuple[Tensor, ...]) -> None:
            here = torch.zeros(dist.get_world_size(), dtype=torch.int64)
            here[dist.get_rank()] = given[1].sum()
            loads.append(here)

        for layer in self.model.modules():
            if isinstance(layer, QwenMoE) and self.has_replicas:
                layer.experts.register_forward_pre_hook(note_rows)
            elif isinstance(layer, QwenMoE):
                layer.loads = loads
        return loads

    def _load(self) -> tuple[Tensor, Tensor]:
        """Inputs and labels of a step, int64 [micro-batches, sequences, sequence].

        Before the step, as a loader of data does: to pin memory waits for all that a GPU has to do.
        """
        first = len(self.losses) * self.num
        world, rank = dist.get_world_size(), dist.get_rank()
        shape = (self.shape.sequence, self.shape.sequences)
        parts = [micro_batch(self.ids, (first + i) * world + rank, *shape) for i in range(self.num)]
        inputs, labels = (torch.stack(part) for part in zip(*parts))
        if self.device.type == "cuda":
            inputs, labels = inputs.pin_memory(), labels.pin_memory()
        return tuple(t.to(self.device, non_blocking=True) for t in (inputs, labels))

    def _plan(self, i: int) -> TransformerModelChunkSchedulePlan:
        inputs, labels = (texts[i] for texts in self.texts)
        return self.model.build_schedule_plan(inputs, labels=labels, name=f"m{i}")


def run_mode(
    name: str,
    args: argparse.Namespace,
    shape: Shape,
    device: torch.device,
    say: Callable[..., None],
) -> Result:
    """Collective. Every mode begins with the same weights and sees the same tokens."""
    trainer = Trainer(name, args, shape, device)
    is_gpu = device.type == "cuda"
    seconds = []
    for i in range(args.warmup + args.steps):
        if i == args.warmup:
            gc.collect()
            gc.freeze()  # what lives by now is not looked at again: a look takes milliseconds
            if is_gpu:
                torch.cuda.reset_peak_memory_stats()
        dist.barrier()
        begin = time.perf_counter()
        trainer.step()
        finish(device)
        seconds.append(time.perf_counter() - begin)
        loss = trainer.losses[-1].mean()
        say(f"{name}: step {i}, loss {loss:.4f}, {seconds[-1]:.3f} s", flush=True)
    slowest = torch.tensor(seconds[args.warmup :], dtype=torch.float64)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    held = memory(device)
    traced = None
    loads = trainer.count_loads()
    if is_gpu or args.trace:
        traced = trace_step(trainer.step, name, args.trace, device)
    result = Result(
        torch.stack(trainer.losses).cpu(),
        slowest.tolist(),
        traced,
        held,
        busiest(loads),
        MODES[name].budget and trainer.has_dropped(),
    )
    del trainer, loads
    gc.unfreeze()
    gc.collect()  # nodes refer to each other: the next mode's peak would have these, too
    if is_gpu:
        torch.cuda.empty_cache()
    return result


def busiest(loads: list[Tensor]) -> float | None:
    """Collective. Returns the busiest rank's routes over the mean, averaged over calls.

    loads: [experts] routes from this rank in each call, or [ranks] that came to it; None without a
    call.
    """
    if not loads:
        return None
    routes = torch.stack(loads)
    dist.all_reduce(routes)
    of_ranks = routes.view(len(loads), dist.get_world_size(), -1).sum(dim=2).double()
    return (of_ranks.amax(dim=1) / of_ranks.mean(dim=1)).mean().item()


def add_over_ranks(model: torch.nn.Module) -> None:
    """Sums gradients of weights that every rank has; an expert's are whole already."""
    grads = [w.grad for name, w in model.named_parameters() if not is_expert_weight(name)]
    for work in [dist.all_reduce(grad, async_op=True) for grad in grads]:
        work.wait()


def memory(device: torch.device) -> tuple[int, int] | None:
    """Returns the largest rank's bytes: torch's peak, and what others hold on this GPU."""
    if device.type != "cuda":
        return None
    free, total = torch.cuda.mem_get_info()
    others = total - free - torch.cuda.memory_reserved()
    most = torch.tensor([torch.cuda.max_memory_allocated(), others])
    dist.all_reduce(most, dist.ReduceOp.MAX)
    return tuple(most.tolist())
