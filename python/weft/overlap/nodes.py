# SPDX-License-Identifier: Apache-2.0
"""The unit of a schedule: a piece of a model with a graph of its own.

    node = ScheduleNode(module, get_comp_stream, event)
    y = node.forward(x)              # x is detached: the graph begins here
    grad_x = node.backward(grad_y)   # parameters have their gradients now

Nodes of one micro-batch share an event, so that they run one after another on whatever streams;
those of two micro-batches are ordered by their streams alone, and overlap.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from . import issue_log, lanes
from .memory import free_storage

Tensor = torch.Tensor


def as_tuple(values: Any) -> tuple[Any, ...]:
    return tuple(values) if isinstance(values, (tuple, list)) else (values,)


def detached(tensor: Any) -> Any:
    """A leaf with the same values, that wants a gradient if `tensor` does."""
    if not isinstance(tensor, Tensor):
        return tensor
    return tensor.detach().requires_grad_(tensor.requires_grad)


def run_backward(outputs: tuple[Any, ...], grads: tuple[Any, ...]) -> None:
    """Adds gradients to the leaves behind `outputs`. An output without a gradient counts as 0."""
    pairs = [
        (out, grad)
        for out, grad in zip(outputs, grads, strict=True)
        if isinstance(out, Tensor) and out.requires_grad and grad is not None
    ]
    if pairs:
        torch.autograd.backward(*zip(*pairs))


class ScheduleNode:
    """One forward and one backward of `forward_func`; used once."""

    def __init__(
        self,
        forward_func: Callable[..., Any],
        stream: Any,
        event: Any,
        backward_func: Callable[[tuple, tuple], None] | None = None,
        free_input: bool = False,
        name: str = "schedule_node",
        ncclep_zero_copy: bool = False,
    ) -> None:
        """forward_func(*inputs) -> a tensor or a tuple; backward_func(outputs, grads).

        stream: a stream, or a callable that gives it when the node first runs. free_input: the
        memory of the caller's inputs goes right after the forward. ncclep_zero_copy changes
        nothing: memory that is not torch's to resize is never freed.
        """
        del ncclep_zero_copy
        self.forward_func = forward_func
        self.backward_func = backward_func or run_backward
        self.event = event
        self.free_input = free_input
        self.name = name
        self.chunk_name = ""
        self.inputs: tuple[Any, ...] | None = None
        self.output: Any = None
        self._stream = stream

    @property
    def stream(self) -> Any:
        if callable(self._stream):
            self._stream = self._stream()
        return self._stream

    def forward(self, inputs: Any = ()) -> Any:
        """A tensor or a tuple of them -> what forward_func makes of detached copies."""
        given = as_tuple(inputs)
        with self._issued("fwd"):
            lanes.known_to(given, self.stream)
            self.inputs = tuple(detached(t) for t in given)
            self.output = self._call(self.inputs)
        if self.free_input:
            free_storage(given, self._outputs())
        return self.output

    def backward(self, output_grad: Any) -> Any:
        """Gradients of the outputs, as many as there are -> those of the inputs (None: has none).

        Raises AssertionError before the forward, after a backward, or for another number of
        gradients.
        """
        grads = as_tuple(output_grad)
        if self.inputs is None:
            raise AssertionError(f"{self.name}: backward without a forward (a node is used once)")
        num_outputs = len(as_tuple(self.output))
        if num_outputs != len(grads):
            raise AssertionError(f"{self.name}: {len(grads)} gradients for {num_outputs} outputs")
        with self._issued("bwd"):
            grads += self._side_grads()
            lanes.known_to(grads, self.stream)
            self.backward_func(self._outputs(), grads)
        input_grads = tuple(getattr(t, "grad", None) for t in self.inputs)
        self.release()
        return input_grads[0] if len(input_grads) == 1 else input_grads

    def release(self) -> None:
        """Drops the graph and all tensors."""
        self.inputs = self.output = None

    def _call(self, inputs: tuple[Any, ...]) -> Any:
        return self.forward_func(*inputs)

    def _outputs(self) -> tuple[Any, ...]:
        return as_tuple(self.output)

    def _side_grads(self) -> tuple[Any, ...]:
        return ()

    @contextmanager
    def _issued(self, what: str) -> Iterator[None]:
        """On this node's stream, after the micro-batch's last step."""
        self._note(what)
        self.event.wait(self.stream)
        with lanes.on_stream(self.stream):
            yield
        self.event.record(self.stream)

    def _note(self, what: str) -> None:
        lane = lanes.lane_of(self.stream)
        issue_log.note(issue_log.Step(self.chunk_name, self.name, what, lane))


class NoopScheduleNode:
    """Where a layer has no such node."""

    def forward(self, inputs: Any) -> Any:
        return inputs

    def backward(self, output_grad: Any) -> Any:
        return output_grad

    def backward_dw(self) -> None:
        pass

    def release(self) -> None:
        pass


class AbstractSchedulePlan:
    """What a training loop may ask a plan for."""

    @staticmethod
    def run(
        f_schedule_plan: Any,
        b_schedule_plan: Any,
        b_grad: Any = None,
        pre_forward: Callable[..., None] | None = None,
        pre_backward: Callable[..., None] | None = None,
        post_forward: Callable[..., None] | None = None,
        post_backward: Callable[..., None] | None = None,
    ) -> Any:
        """The forward of one plan woven into the backward of another; either may be None."""
        raise NotImplementedError
