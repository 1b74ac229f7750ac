# SPDX-License-Identifier: Apache-2.0
"""The unit of a schedule: a piece of a model with a graph of its own.

    node = ScheduleNode(module, get_comp_stream, event)
    y = node.forward(x)              # x is detached: the graph begins here
    grad_x = node.backward(grad_y)   # parameters have their gradients now

Nodes of one micro-batch share an event, so that they run one after another on whatever streams;
those of two micro-batches are ordered by their streams alone, and overlap.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from . import lanes


def as_tuple(values: Any) -> tuple[Any, ...]:
    return tuple(values) if isinstance(values, (tuple, list)) else (values,)


def detached(tensor: Any) -> Any:
    """Returns a leaf of the same values that wants a gradient if `tensor` does."""
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


def free_storage(inputs: Iterable[Any], kept: Iterable[Any]) -> None:
    """Frees the memory of the tensors in `inputs`; shapes and gradient functions stay.

    Memory that a tensor in `kept` lives in stays: an exchange of one rank hands its input on. So
    does memory that is not torch's to resize: rows that Weft received on a CPU, for one.
    """
    needed = {t.untyped_storage().data_ptr() for t in kept if isinstance(t, Tensor)}
    for tensor in inputs:
        if not isinstance(tensor, Tensor):
            continue
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in needed and storage.resizable():
            storage.resize_(0)


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
        self._handed: list[Tensor] = []  # to later nodes, beside the outputs
        self._copies: list[Tensor] = []

    @property
    def stream(self) -> Any:
        if callable(self._stream):
            self._stream = self._stream()
        return self._stream

    def forward(self, inputs: Any = ()) -> Any:
        """Returns forward_func of detached copies of one or several inputs."""
        given = as_tuple(inputs)
        with self._issued("fwd"):
            lanes.known_to(given, self.stream)
            self.inputs = tuple(detached(t) for t in given)
            self.output = self._call(self.inputs)
        if self.free_input:
            free_storage(given, self._outputs())
        return self.output

    def backward(self, output_grad: Any) -> Any:
        """Returns the inputs' gradients (None: has none) by those of all outputs.

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
            grads += tuple(copy.grad for copy in self._copies)
            lanes.known_to(grads, self.stream)
            self.backward_func(self._outputs(), grads)
        input_grads = tuple(getattr(t, "grad", None) for t in self.inputs)
        self.release()
        return input_grads[0] if len(input_grads) == 1 else input_grads

    def release(self) -> None:
        """Drops the graph and all tensors."""
        self.inputs = self.output = None
        self._handed, self._copies = [], []

    def _call(self, inputs: tuple[Any, ...]) -> Any:
        return self.forward_func(*inputs)

    def _outputs(self) -> tuple[Any, ...]:
        return (*as_tuple(self.output), *self._handed)

    @contextmanager
    def _issued(self, what: str) -> Iterator[None]:
        """Runs on this node's stream, after the micro-batch's last step."""
        self._note(what)
        self.event.wait(self.stream)
        with lanes.on_stream(self.stream):
            yield
        self.event.record(self.stream)

    def _note(self, what: str) -> None:
        lane = lanes.lane_of(self.stream)
        lanes.note(lanes.Step(self.chunk_name, self.name, what, lane))


class TransformerLayerNode(ScheduleNode):
    """Calls forward_func(node, *inputs), which may call `detach` and `use`."""

    def __init__(
        self,
        forward_func: Callable[..., Any],
        stream: Any,
        event: Any,
        *,
        name: str,
        chunk_name: str = "",
        free_input: bool = False,
        bwd_dw_callables: Iterable[Any] = (),
    ) -> None:
        """bwd_dw_callables: modules with a `backward_dw`, in the order to call them."""
        super().__init__(forward_func, stream, event, free_input=free_input, name=name)
        self.chunk_name = chunk_name
        self.bwd_dw_callables = list(bwd_dw_callables)
        self.post_forward_hooks: list[Callable[[], None]] = []  # parameters may be resharded
        self.post_backward_hooks: list[Callable[[], None]] = []

    def detach(self, tensor: Tensor) -> Tensor:
        """Returns a detached copy of `tensor` for a later node.

        This node's backward takes the copy's gradient, complete by then.
        """
        copy = detached(tensor)
        self._handed.append(tensor)
        self._copies.append(copy)
        return copy

    def use(self, tensor: Tensor) -> Tensor:
        """Marks `tensor`, detached by an earlier node, as used on this node's stream."""
        lanes.known_to([tensor], self.stream)
        return tensor

    def forward(self, inputs: Any = ()) -> Any:
        output = super().forward(inputs)
        for hook in self.post_forward_hooks:
            hook()
        return output

    def backward(self, output_grad: Any) -> Any:
        input_grads = super().backward(output_grad)
        for hook in self.post_backward_hooks:
            hook()
        return input_grads

    def backward_dw(self) -> None:
        """Computes weight gradients that backward left, on its stream.

        Leaves the micro-batch's event: the next exchange need not wait for the gradients.
        """
        if not self.bwd_dw_callables:
            return
        self._note("backward_dw")
        with lanes.on_stream(self.stream):
            for module in self.bwd_dw_callables:
                module.backward_dw()
        self.bwd_dw_callables = []

    def _call(self, inputs: tuple[Any, ...]) -> Any:
        return self.forward_func(self, *inputs)


class NoopScheduleNode:
    """Node that does nothing, where a layer has no such node."""

    def forward(self, inputs: Any) -> Any:
        return inputs

    def backward(self, output_grad: Any) -> Any:
        return output_grad

    def backward_dw(self) -> None:
        pass

    def release(self) -> None:
        pass


class AbstractSchedulePlan:
    """Calls of a training loop on a plan."""

    @staticmethod
    def run(f_schedule_plan: Any, b_schedule_plan: Any, b_grad: Any = None, **hooks: Any) -> Any:
        """Weaves one plan's forward into another's backward; either may be None."""
        raise NotImplementedError
