# SPDX-License-Identifier: Apache-2.0
"""The nodes of one layer for one micro-batch, and two layers woven into each other, in the order
that the core computes. chunk_plan.py makes them of the classes in nodes.py."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor

from weft import _core
from weft.dispatcher import MoEAlltoAllTokenDispatcher
from weft.dispatcher.config import option

from . import lanes
from .nodes import NoopScheduleNode, TransformerLayerNode
from .wgrad import delayed_modules


class FreedInputs(NamedTuple):
    """Whether a node of an MoE layer gives up its input. pre_dispatch and dense layers never do."""

    moe_dispatch: bool = False
    mlp: bool = False
    moe_combine: bool = False


def freed_inputs(dispatcher: Any, preprocess_in_graph: bool = False) -> FreedInputs:
    """The rules for a token dispatcher.

    Experts in FP8 or FP4 save a copy of their own. One expert on its own behind the all-to-all
    gets the rows as they arrived, and saves them; the other dispatchers permute them first, except
    where they say that received rows are the experts' input ("hybridep" and "ncclep" if they say
    nothing). Flex backends keep what they sent.
    preprocess_in_graph: the input of moe_dispatch is static memory of a CUDA graph.
    The experts' last operation must not save its output, which moe_combine frees.
    """
    config = dispatcher.config
    is_alltoall = isinstance(dispatcher, MoEAlltoAllTokenDispatcher)
    backend = None if is_alltoall else option(config, "moe_flex_dispatcher_backend")
    is_low_precision = bool(option(config, "fp8") or option(config, "fp4"))
    has_permute = dispatcher.num_local_experts > 1 or not is_alltoall
    by_name = backend in ("hybridep", "ncclep")
    reads_received = getattr(dispatcher, "experts_read_received_rows", by_name)
    return FreedInputs(
        # "uccl_ep" is DeepEP's interface.
        moe_dispatch=backend not in ("deepep", "uccl_ep", "hybridep", "ncclep")
        and not preprocess_in_graph,
        mlp=is_low_precision or (has_permute and not reads_received),
        moe_combine=True,
    )


@dataclass
class LayerState:
    """What the nodes hand to each other beside their outputs."""

    residual: Tensor | None = None
    shared_expert_output: Tensor | None = None
    dispatched_probs: Tensor | None = None
    tokens_per_expert: Any = None  # may live in the communication stream's memory


class PairStep(NamedTuple):
    """One step of two micro-batches, of which one runs forward and the other backward."""

    is_backward: bool  # which of the two it belongs to
    action: str  # a method of nodes, or of _Pair in chunk_plan.py
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


class TransformerLayerSchedulePlan:
    """pre_dispatch_computation, moe_dispatch, mlp, moe_combine, mtp_post_process; used once.

    layer: a `TransformerLayer`, or whatever has its methods. A dense layer exchanges nothing: its
    moe_dispatch and moe_combine do nothing. A layer that predicts several tokens has a method
    mtp_post_process(x) -> tensor; for others that node does nothing.
    """

    NODES = tuple(_core.NODE_LANES)[1:-1]  # without pre_process and post_process

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

        streams = {"compute": comp_stream, "exchange": comm_stream}

        def node(function: Any, name: str) -> TransformerLayerNode:
            # Only these two have weight gradients to leave.
            slot = {"pre_dispatch_computation": "pre_dispatch", "mlp": "mlp"}.get(name)
            return TransformerLayerNode(
                function,
                streams[_core.NODE_LANES[name]],
                event,
                name=f"L{extra.get('layer_number', 0)}.{name}",
                chunk_name=chunk_state.name,
                free_input=getattr(freed, name, False),
                bwd_dw_callables=delayed_modules(layer.slot(slot)) if slot else (),
            )

        self.moe_dispatch: Any = NoopScheduleNode()
        self.moe_combine: Any = NoopScheduleNode()
        self.mtp_post_process: Any = NoopScheduleNode()
        first: Any = lambda _, x: layer.attend(x, chunk_state.attention_mask)  # noqa: E731
        second: Any = lambda _, x: layer.dense(x)  # noqa: E731
        if layer.is_moe:
            first, second = self._pre_dispatch, self._experts
            self.moe_dispatch = node(self._dispatch, "moe_dispatch")
            self.moe_combine = node(self._combine, "moe_combine")
        self.pre_dispatch_computation = node(first, "pre_dispatch_computation")
        self.mlp = node(second, "mlp")
        if hasattr(layer, "mtp_post_process"):
            mtp = "mtp_post_process"
            self.mtp_post_process = node(lambda _, x: layer.mtp_post_process(x), mtp)

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
        early = b_layer is not None and b_layer.early_release
        layers, values = (f_layer, b_layer), [f_input, b_grad]
        for step in pair_order(*(None if layer is None else 1 for layer in layers), early):
            is_of_first = step[1:3] == ("backward_dw", "pre_dispatch_computation")
            if step.is_of_node and step.layer == 0 and not (is_last_layer_in_bwd and is_of_first):
                step.run(layers[step.is_backward], values)
        return values[0], values[1]

    def release_state(self) -> None:
        """Drops every graph and tensor of this layer."""
        for name in self.NODES:
            getattr(self, name).release()
        self.layer_state = LayerState()

    # What the nodes run.

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
