# SPDX-License-Identifier: Apache-2.0
"""All micro-batches of a step, on one stage or on one rank of a pipeline whose ranks hold several
model chunks, in the order that the core computes."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import astuple, dataclass, field
from typing import Any, NamedTuple

import torch

from weft import _core
from weft.config.validate import check_interleaved

from .plans import TransformerModelChunkSchedulePlan as Plan

Tensor = torch.Tensor
Context = AbstractContextManager[Any]


class VirtualStage(NamedTuple):
    """One micro-batch in one chunk of this rank."""

    micro_batch: int
    chunk: int


@dataclass(frozen=True)
class PipelineShape:
    """Chunk c of rank r is stage c * num_ranks + r of the model."""

    rank: int = 0
    num_ranks: int = 1
    num_chunks: int = 1  # of each rank
    num_micro_batches: int = 1  # a multiple of num_ranks

    def __post_init__(self) -> None:
        """Raises ValueError for an invalid shape."""
        pipeline_order(self)

    def is_first(self, chunk: int) -> bool:
        """Returns whether the model begins in this chunk."""
        return self.rank == 0 and chunk == 0

    def is_last(self, chunk: int) -> bool:
        """Returns whether the model ends in this chunk."""
        return self.rank == self.num_ranks - 1 and chunk == self.num_chunks - 1


@functools.cache
def pipeline_order(
    shape: PipelineShape,
) -> tuple[tuple[VirtualStage | None, VirtualStage | None], ...]:
    """Returns which forward is issued with which backward, step by step."""

    def named(stage: tuple[int, int] | None) -> VirtualStage | None:
        return None if stage is None else VirtualStage(*stage)

    return tuple((named(f), named(b)) for f, b in _core.pipeline_order(*astuple(shape)))


def forward_order(shape: PipelineShape) -> list[VirtualStage]:
    """Lists every rank's forwards: num_ranks micro-batches through a chunk, then the next."""
    return [f for f, _ in pipeline_order(shape) if f is not None]


def backward_order(shape: PipelineShape) -> list[VirtualStage]:
    """Lists every rank's backwards: like forwards, from the last chunk to the first."""
    return [b for _, b in pipeline_order(shape) if b is not None]


def num_warm_up(shape: PipelineShape) -> int:
    """Counts forwards before the first backward: one more than without overlap, so that a forward
    is independent of the backward beside it."""
    return sum(b is None for _, b in pipeline_order(shape))


@dataclass(frozen=True)
class PointToPoint:
    """Brings hidden states and their gradients to and from the neighbours.

    Each function is given which micro-batch in which chunk of this rank sends or receives. Stage s
    of the model sends forward to stage s + 1 and backward to s - 1, which may be on this rank. A
    send returns without waiting for its receive, and keeps the tensor until it has arrived.
    """

    receive_forward: Callable[[VirtualStage], Tensor]  # not for the first stage of the model
    send_forward: Callable[[VirtualStage, Tensor], None]  # on the exchange lane; not for the last
    receive_backward: Callable[[VirtualStage], Tensor]  # not for the last
    send_backward: Callable[[VirtualStage, Tensor], None]  # not for the first


def combined_1f1b_schedule_for_interleaved_pipelining(
    shape: PipelineShape,
    build_plan: Callable[[VirtualStage], Plan],
    link: PointToPoint,
    *,
    output_grad: Callable[[Tensor], Tensor] = torch.ones_like,
    no_sync_func: Callable[[int], Context] = lambda chunk: nullcontext(),
) -> list[Tensor]:
    """Collective. Runs warm-up forwards, forward-backward pairs, then the other backwards.

    build_plan(stage): the plan of a micro-batch in a chunk, called when its forward comes; the
    input of all but the model's first stage comes from `link`. output_grad: the gradient of an
    output of the model, e.g. the loss scale. no_sync_func(chunk): a context around all but the
    last backward of that chunk.
    Returns the outputs of the model by micro-batch, detached; none on a rank where it does not
    end. Raises what a node or `link` raises, after dropping every plan (see the plan's `run`), and
    AssertionError for several chunks of a model that is sharded.
    """
    with _Pipeline(shape, build_plan, output_grad, link) as pipeline:
        for f, b in pipeline_order(shape):
            is_synced = b is None or b.micro_batch == shape.num_micro_batches - 1
            pipeline.run(f, b, nullcontext() if is_synced else no_sync_func(b.chunk))
    return pipeline.outputs


def combined_1f1b_schedule_for_no_pipelining(
    build_plan: Callable[[int], Plan],
    num_micro_batches: int,
    *,
    output_grad: Callable[[Tensor], Tensor] = torch.ones_like,
    no_sync_func: Callable[[], Context] = nullcontext,
) -> list[Tensor]:
    """Collective. Runs F0; each backward with the next forward; the last.

    build_plan(i): the plan of micro-batch i, called when its forward comes. output_grad: the
    gradient of an output, e.g. the loss scale. no_sync_func: a context around all but the last
    backward, in which data parallelism only adds up gradients.
    Returns the outputs, detached. Raises what a node raises (see the plan's `run`).
    """
    with _one_stage(build_plan, num_micro_batches, output_grad) as pipeline:
        *pairs, last = pipeline_order(pipeline.shape)
        with no_sync_func():
            for f, b in pairs:
                pipeline.run(f, b)
        pipeline.run(*last)
    return pipeline.outputs


def sequential_schedule_for_no_pipelining(
    build_plan: Callable[[int], Plan],
    num_micro_batches: int,
    *,
    output_grad: Callable[[Tensor], Tensor] = torch.ones_like,
    no_sync_func: Callable[[], Context] = nullcontext,
) -> list[Tensor]:
    """Collective. Runs the same nodes in turn: F0, B0, F1, B1, ..."""
    with _one_stage(build_plan, num_micro_batches, output_grad) as pipeline:
        for stage in forward_order(pipeline.shape):
            is_last = stage.micro_batch == num_micro_batches - 1
            with nullcontext() if is_last else no_sync_func():
                pipeline.run(stage, None)
                pipeline.run(None, stage)
    return pipeline.outputs


@dataclass
class _Pipeline:
    """Micro-batches in progress on this rank. An error in the context drops them all."""

    shape: PipelineShape
    build_plan: Callable[[VirtualStage], Plan]
    output_grad: Callable[[Tensor], Tensor]
    link: PointToPoint | None = None  # None: the shape is one stage
    plans: dict[VirtualStage, Plan] = field(default_factory=dict)  # waiting for their backward
    outputs: list[Tensor] = field(default_factory=list)  # of the model, by micro-batch
    checked: set[int] = field(default_factory=set)  # chunks

    def __enter__(self) -> _Pipeline:
        return self

    def __exit__(self, error: type[BaseException] | None, *_: Any) -> None:
        if error is not None:
            for plan in self.plans.values():
                plan.abandon()
            self.plans.clear()

    def run(
        self, f: VirtualStage | None, b: VirtualStage | None, sync: Context | None = None
    ) -> None:
        f_plan = b_plan = b_grad = None
        if f is not None:
            f_plan = self.plans[f] = self.build_plan(f)
            if f.chunk not in self.checked:
                check_interleaved(f_plan.model, self.shape.num_chunks)
                self.checked.add(f.chunk)
        if b is not None:
            b_plan = self.plans[b]
            if self.shape.is_last(b.chunk):
                b_grad = self.output_grad(self.outputs[b.micro_batch])
        with sync or nullcontext():
            output = Plan.run(f_plan, b_plan, b_grad, **self._hooks(f, b))
        if f is not None and self.shape.is_last(f.chunk):
            self.outputs.append(output.detach())
        if b is not None:
            del self.plans[b]

    def _hooks(
        self, f: VirtualStage | None, b: VirtualStage | None
    ) -> dict[str, Callable[..., Any]]:
        shape, link = self.shape, self.link
        hooks: dict[str, Callable[..., Any]] = {}
        if f is not None and not shape.is_first(f.chunk):
            hooks["pre_forward"] = lambda _vp_stage: link.receive_forward(f)
        if f is not None and not shape.is_last(f.chunk):
            hooks["post_forward"] = lambda out, _vp_stage: link.send_forward(f, out.detach())
        if b is not None and not shape.is_last(b.chunk):
            hooks["pre_backward"] = lambda _vp_stage: link.receive_backward(b)
        if b is not None and not shape.is_first(b.chunk):
            hooks["post_backward"] = lambda grad, _vp_stage: link.send_backward(b, grad)
        return hooks


def _one_stage(
    build_plan: Callable[[int], Plan],
    num_micro_batches: int,
    output_grad: Callable[[Tensor], Tensor],
) -> _Pipeline:
    shape = PipelineShape(num_micro_batches=num_micro_batches)
    return _Pipeline(shape, lambda stage: build_plan(stage.micro_batch), output_grad)
