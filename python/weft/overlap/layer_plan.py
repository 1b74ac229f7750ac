# SPDX-License-Identifier: Apache-2.0
"""The nodes of one layer for one micro-batch, and two layers woven into each other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from . import lanes
from .layer_node import TransformerLayerNode
from .memory import FreedInputs, freed_inputs
from .nodes import NoopScheduleNode
from .wgrad import delayed_modules

Tensor = torch.Tensor


@dataclass
class LayerState:
    """What the nodes hand to each other beside their outputs."""

    residual: Tensor | None = None
    shared_expert_output: Tensor | None = None
    dispatched_probs: Tensor | None = None
    tokens_per_expert: Any = None  # may live in the communication stream's memory


class TransformerLayerSchedulePlan:
    """pre_dispatch_computation, moe_dispatch, mlp, moe_combine, mtp_post_process; used once.

    layer: a `TransformerLayer`, or whatever has its methods. A dense layer exchanges nothing: its
    moe_dispatch and moe_combine do nothing. A layer that predicts several tokens has a method
    mtp_post_process(x) -> tensor; for others that node does nothing.
    """

    NODES = ("pre_dispatch_computation", "moe_dispatch", "mlp", "moe_combine", "mtp_post_process")

    def __init__(
        self,
        layer: Any,
        event: Any,
        chunk_state: Any,
        comp_stream: Any,
        comm_stream: Any,
        extra_args: dict[str, Any] | None = None,
    ) -> None:
        """chunk_state: has name and attention_mask. Streams may be callables that give them.

        extra_args: "layer_number" for the nodes' names; "early_attn_memory_release";
        "preprocess_in_graph" (see `freed_inputs`).
        """
        extra = extra_args or {}
        self.layer = layer
        self.layer_state = LayerState()
        self.chunk_state = chunk_state
        self.early_release: bool = extra.get("early_attn_memory_release", False)
        freed = FreedInputs()
        if layer.is_moe:
            freed = freed_inputs(layer.dispatcher, extra.get("preprocess_in_graph", False))

        def node(function: Any, name: str, stream: Any) -> TransformerLayerNode:
            # Only these two have weight gradients to leave.
            slot = {"pre_dispatch_computation": "pre_dispatch", "mlp": "mlp"}.get(name)
            return TransformerLayerNode(
                function,
                stream,
                event,
                name=f"L{extra.get('layer_number', 0)}.{name}",
                chunk_name=chunk_state.name,
                free_input=getattr(freed, name, False),
                bwd_dw_callables=delayed_modules(layer.slot(slot)) if slot else (),
            )

        self.moe_dispatch: Any = NoopScheduleNode()
        self.moe_combine: Any = NoopScheduleNode()
        self.mtp_post_process: Any = NoopScheduleNode()
        first, second = (self._attend, self._dense)
        if layer.is_moe:
            first, second = (self._pre_dispatch, self._experts)
            self.moe_dispatch = node(self._dispatch, "moe_dispatch", comm_stream)
            self.moe_combine = node(self._combine, "moe_combine", comm_stream)
        self.pre_dispatch_computation = node(first, "pre_dispatch_computation", comp_stream)
        self.mlp = node(second, "mlp", comp_stream)
        if hasattr(layer, "mtp_post_process"):
            self.mtp_post_process = node(self._mtp, "mtp_post_process", comp_stream)

    @staticmethod
    def run(
        f_layer: TransformerLayerSchedulePlan | None,
        b_layer: TransformerLayerSchedulePlan | None,
        f_input: Any = None,
        b_grad: Any = None,
        is_last_layer_in_bwd: bool = False,
    ) -> tuple[Any, Any]:
        """Issues the forward of one layer and the backward of another; either may be None.

        f_input -> the output of f_layer; b_grad -> the gradient of b_layer's input.
        Every rank sees the exchanges in the order combine-backward, dispatch-forward,
        dispatch-backward, combine-forward. The last layer of a backward leaves the weight
        gradients of its first node to the caller.
        """
        f, b = f_layer, b_layer
        early = b is not None and b.early_release
        if b is not None:
            b_grad = b.mtp_post_process.backward(b_grad)
            b_grad = b.moe_combine.backward(b_grad)
        if f is not None:
            f_input = f.pre_dispatch_computation.forward(f_input)
        if b is not None:
            b_grad = b.mlp.backward(b_grad)
        if f is not None:
            f_input = f.moe_dispatch.forward(f_input)
        if b is not None:
            b.mlp.backward_dw()
            b_grad = b.moe_dispatch.backward(b_grad)
        if early:
            b_grad = b.pre_dispatch_computation.backward(b_grad)
        if f is not None:
            f_input = f.mlp.forward(f_input)
            f_input = f.moe_combine.forward(f_input)
        if b is not None and not early:
            b_grad = b.pre_dispatch_computation.backward(b_grad)
        if f is not None:
            f_input = f.mtp_post_process.forward(f_input)
        if b is not None and not is_last_layer_in_bwd:
            b.pre_dispatch_computation.backward_dw()
        return f_input, b_grad

    def release_state(self) -> None:
        """Drops every graph and tensor of this layer."""
        for name in self.NODES:
            getattr(self, name).release()
        self.layer_state = LayerState()

    # What the nodes run.

    def _attend(self, node: TransformerLayerNode, x: Tensor) -> Tensor:
        return self.layer.attend(x, self.chunk_state.attention_mask)

    def _dense(self, node: TransformerLayerNode, x: Tensor) -> Tensor:
        return self.layer.dense(x)

    def _pre_dispatch(self, node: TransformerLayerNode, x: Tensor) -> tuple[Tensor, Tensor]:
        mask = self.chunk_state.attention_mask
        hidden, probs, residual, shared_output = self.layer.pre_dispatch(x, mask)
        state = self.layer_state
        state.residual = node.detach(residual)
        if shared_output is not None:
            state.shared_expert_output = node.detach(shared_output)
        return hidden, probs

    def _dispatch(self, node: TransformerLayerNode, hidden: Tensor, probs: Tensor) -> Tensor:
        self._share_routing(node)
        rows, row_probs = self.layer.dispatch(hidden, probs)
        self.layer_state.dispatched_probs = node.detach(row_probs)
        manager = getattr(self.layer.dispatcher, "_comm_manager", None)
        self.layer_state.tokens_per_expert = getattr(manager, "tokens_per_expert", None)
        return rows

    def _experts(self, node: TransformerLayerNode, rows: Tensor) -> Tensor:
        self._share_routing(node)
        probs, self.layer_state.dispatched_probs = self.layer_state.dispatched_probs, None
        return self.layer.compute(rows, node.use(probs))

    def _combine(self, node: TransformerLayerNode, rows: Tensor) -> Tensor:
        self._share_routing(node)
        state, self.layer_state = self.layer_state, LayerState()
        shared_output = state.shared_expert_output
        if shared_output is not None:
            shared_output = node.use(shared_output)
        return self.layer.combine(rows, node.use(state.residual), shared_output)

    def _share_routing(self, node: TransformerLayerNode) -> None:
        """What the dispatcher keeps between phases was made on the other lane, too."""
        dispatcher = self.layer.dispatcher
        for owner in (dispatcher, getattr(dispatcher, "_comm_manager", None)):
            lanes.known_to(getattr(owner, "__dict__", {}).values(), node.stream)

    def _mtp(self, node: TransformerLayerNode, x: Tensor) -> Tensor:
        return self.layer.mtp_post_process(x)
