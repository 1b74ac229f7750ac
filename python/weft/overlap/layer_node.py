# SPDX-License-Identifier: Apache-2.0
"""A node of a layer: hands tensors to later nodes beside its outputs, and has weight gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from . import lanes
from .nodes import ScheduleNode, detached

Tensor = torch.Tensor


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
        self._handed: list[Tensor] = []
        self._copies: list[Tensor] = []

    def detach(self, tensor: Tensor) -> Tensor:
        """A detached copy of `tensor` for a later node of this layer.

        Its gradient is there when this node's backward comes, which feeds it back.
        """
        copy = detached(tensor)
        self._handed.append(tensor)
        self._copies.append(copy)
        return copy

    def use(self, tensor: Tensor) -> Tensor:
        """`tensor`, which an earlier node detached, now also used on this node's stream."""
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
        """The weight gradients that the backward left, on the same stream.

        Does not touch the micro-batch's event: the next exchange need not wait for them.
        """
        if not self.bwd_dw_callables:
            return
        self._note("backward_dw")
        with lanes.on_stream(self.stream):
            for module in self.bwd_dw_callables:
                module.backward_dw()
        self.bwd_dw_callables = []

    def release(self) -> None:
        super().release()
        self._handed, self._copies = [], []

    def _call(self, inputs: tuple[Any, ...]) -> Any:
        return self.forward_func(self, *inputs)

    def _outputs(self) -> tuple[Any, ...]:
        return (*super()._outputs(), *self._handed)

    def _side_grads(self) -> tuple[Any, ...]:
        return tuple(copy.grad for copy in self._copies)
