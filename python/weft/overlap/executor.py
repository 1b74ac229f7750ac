# SPDX-License-Identifier: Apache-2.0
"""Runs the nodes of two micro-batches in the order that the core computes. chunk_plan.py and
layer_plan.py hand it their nodes."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from weft import _core

from . import issue_log, lanes


class PairStep(NamedTuple):
    """One step of two micro-batches, of which one runs forward and the other backward."""

    is_backward: bool  # which of the two it belongs to
    action: str  # a method of nodes, or of _Pair
    node: str
    layer: int  # -1: of no layer

    @property
    def is_of_node(self) -> bool:
        return self.action in ("forward", "backward", "backward_dw")

    def run(self, owner: Any, values: list[Any]) -> None:
        """The node in the plan of a chunk or a layer, which may not have it. values: what the
        forward has made so far, and the gradient that the backward has."""
        node = getattr(owner, self.node)
        if node is None:
            return
        if self.action == "backward_dw":
            node.backward_dw()
        else:
            values[self.is_backward] = getattr(node, self.action)(values[self.is_backward])


@functools.cache
def pair_order(
    forward_layers: int | None, backward_layers: int | None, early_attention_release: bool
) -> tuple[PairStep, ...]:
    """None: no micro-batch runs forward, or backward."""
    steps = _core.pair_order(forward_layers, backward_layers, early_attention_release)
    return tuple(PairStep(*step) for step in steps)


def issue_pair(f: Any, b: Any, b_grad: Any, hooks: dict[str, Callable[..., Any] | None]) -> Any:
    """The forward of plan `f` and the backward of plan `b`; either may be None. Returns f's output.

    Raises AssertionError for a backward without a gradient.
    """
    pair = _Pair(f, b, b_grad, hooks)
    layers = [None if plan is None else plan.num_layers for plan in pair.plans]
    for step in pair_order(*layers, b is not None and b.early_release):
        plan = pair.plans[step.is_backward]
        owner = plan if step.layer < 0 else plan.layers[step.layer]
        if step.is_of_node:
            step.run(owner, pair.values)
        else:
            getattr(pair, step.action)(owner)
    return None if f is None else pair.values[0]


class _Pair:
    """Two plans on their way. The methods are the steps that are not of a node."""

    def __init__(self, f: Any, b: Any, b_grad: Any, hooks: dict[str, Any]) -> None:
        self.plans = (f, b)
        self.values = [(), b_grad]
        self.hooks = {name: hook for name, hook in hooks.items() if hook is not None}
        if b is not None and "pre_backward" not in self.hooks:
            self._check_grad()

    def pre_forward(self, plan: Any) -> None:
        received = self._call("pre_forward", plan)
        if isinstance(received, torch.Tensor):
            plan.receive(received)
        plan.record_current_stream()

    def post_forward(self, plan: Any) -> None:
        if "post_forward" in self.hooks:
            comm = lanes.get_comm_stream()
            with lanes.on_stream(comm):
                plan.event.wait(comm)
                lanes.known_to([self.values[0]], comm)  # a dense layer made it on the other
                self._call("post_forward", plan, self.values[0], lane="comm")

    def pre_backward(self, plan: Any) -> None:
        received = self._call("pre_backward", plan)
        if isinstance(received, torch.Tensor):
            self.values[1] = received
        self._check_grad()
        plan.record_current_stream()

    def post_backward(self, plan: Any) -> None:
        if "post_backward" in self.hooks:
            plan.wait_current_stream()
            self._call("post_backward", plan, self.values[1])

    def release_layer(self, layer: Any) -> None:
        layer.release_state()

    def join(self, plan: Any) -> None:
        plan.wait_current_stream()
        if plan is self.plans[0]:  # a combine made its output on the other lane
            lanes.known_to([self.values[0]], lanes.get_comp_stream())

    def release(self, plan: Any) -> None:
        plan.release_state()

    def _call(self, name: str, plan: Any, *value: Any, lane: str = "comp") -> Any:
        if name not in self.hooks:
            return None
        issue_log.note(issue_log.Step(plan.name, name, "", lane))
        return self.hooks[name](*value, plan.vp_stage)

    def _check_grad(self) -> None:
        if self.values[1] is None:
            raise AssertionError("run: the backward has no gradient (expected b_grad)")
