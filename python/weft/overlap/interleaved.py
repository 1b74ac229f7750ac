# SPDX-License-Identifier: Apache-2.0
"""All micro-batches of a step on one rank of a pipeline whose ranks hold several model chunks."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from .chunk_plan import TransformerModelChunkSchedulePlan
from .interleaved_order import (
    PipelineShape,
    VirtualStage,
    backward_order,
    forward_order,
    num_warm_up,
)
from .rules import check_interleaved

Tensor = torch.Tensor
Plan = TransformerModelChunkSchedulePlan


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
    no_sync_func: Callable[[int], AbstractContextManager[Any]] = lambda chunk: nullcontext(),
) -> list[Tensor]:
    """Collective. Warm-up forwards, pairs of a forward and a backward, the backwards left over.

    build_plan(stage): the plan of a micro-batch in a chunk, called when its forward comes; the
    input of all but the model's first stage comes from `link`. output_grad: the gradient of an
    output of the model, e.g. the loss scale. no_sync_func(chunk): a context around all but the
    last backward of that chunk.
    Returns the outputs of the model by micro-batch, detached; none on a rank where it does not
    end. Raises what a node or `link` raises, after dropping every plan (see the plan's `run`), and
    AssertionError for several chunks of a model that is sharded.
    """
    pipeline = _Pipeline(shape, build_plan, link, output_grad, no_sync_func)
    forwards, backwards = forward_order(shape), backward_order(shape)
    warm_up = num_warm_up(shape)
    num_pairs = len(forwards) - warm_up
    try:
        for f in forwards[:warm_up]:
            pipeline.run(f, None)
        for f, b in zip(forwards[warm_up:], backwards[:num_pairs]):
            pipeline.run(f, b)
        for b in backwards[num_pairs:]:
            pipeline.run(None, b)
    except BaseException:
        pipeline.abandon()
        raise
    return [pipeline.outputs[i] for i in sorted(pipeline.outputs)]


class _Pipeline:
    """The micro-batches that are under way on this rank."""

    def __init__(
        self,
        shape: PipelineShape,
        build_plan: Callable[[VirtualStage], Plan],
        link: PointToPoint,
        output_grad: Callable[[Tensor], Tensor],
        no_sync_func: Callable[[int], AbstractContextManager[Any]],
    ) -> None:
        self.shape = shape
        self.build_plan = build_plan
        self.link = link
        self.output_grad = output_grad
        self.no_sync_func = no_sync_func
        self.plans: dict[VirtualStage, Plan] = {}  # waiting for their backward
        self.outputs: dict[int, Tensor] = {}  # of the model, by micro-batch
        self.checked: set[int] = set()  # chunks

    def run(self, f: VirtualStage | None, b: VirtualStage | None) -> None:
        f_plan = b_plan = b_grad = None
        hooks: dict[str, Callable[..., Any]] = {}
        if f is not None:
            f_plan = self.plans[f] = self.build_plan(f)
            if f.chunk not in self.checked:
                check_interleaved(f_plan.model, self.shape.num_chunks)
                self.checked.add(f.chunk)
            hooks |= self._forward_hooks(f)
        if b is not None:
            b_plan = self.plans[b]
            hooks |= self._backward_hooks(b)
            if self.shape.is_last(b.chunk):
                b_grad = self.output_grad(self.outputs[b.micro_batch])
        with self._sync(b):
            output = Plan.run(f_plan, b_plan, b_grad, **hooks)
        if f is not None and self.shape.is_last(f.chunk):
            self.outputs[f.micro_batch] = output.detach()
        if b is not None:
            del self.plans[b]

    def abandon(self) -> None:
        """Drops what a stopped schedule left."""
        for plan in self.plans.values():
            plan.abandon()
        self.plans.clear()

    def _sync(self, b: VirtualStage | None) -> AbstractContextManager[Any]:
        if b is None or b.micro_batch == self.shape.num_micro_batches - 1:
            return nullcontext()
        return self.no_sync_func(b.chunk)

    def _forward_hooks(self, f: VirtualStage) -> dict[str, Callable[..., Any]]:
        hooks: dict[str, Callable[..., Any]] = {}
        if not self.shape.is_first(f.chunk):
            hooks["pre_forward"] = lambda _vp_stage: self.link.receive_forward(f)
        if not self.shape.is_last(f.chunk):
            hooks["post_forward"] = lambda output, _vp_stage: self.link.send_forward(
                f, output.detach()
            )
        return hooks

    def _backward_hooks(self, b: VirtualStage) -> dict[str, Callable[..., Any]]:
        hooks: dict[str, Callable[..., Any]] = {}
        if not self.shape.is_last(b.chunk):
            hooks["pre_backward"] = lambda _vp_stage: self.link.receive_backward(b)
        if not self.shape.is_first(b.chunk):
            hooks["post_backward"] = lambda grad, _vp_stage: self.link.send_backward(b, grad)
        return hooks
