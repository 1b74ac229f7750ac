# SPDX-License-Identifier: Apache-2.0
"""The nodes of one micro-batch on a layer and on a model chunk, and two micro-batches woven into
each other, in the order that the core computes. nodes.py has the nodes; pipeline.py issues pairs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import torch
from torch import Tensor

from weft import _core
from weft.config.validate import check_overlap
from weft.dispatcher import MoEAlltoAllTokenDispatcher
from weft.dispatcher.config import option
from weft.overlap_settings import overlapped

from . import lanes
from .nodes import AbstractSchedulePlan, NoopScheduleNode, TransformerLayerNode
from .wgrad import delayed_modules, drop_pending


class FreedInputs(NamedTuple):
    """Flags of an MoE layer's nodes that free their input. pre_dispatch and dense layers do
    not."""

    moe_dispatch: bool = False
    mlp: bool = False
    moe_combine: bool = False


# Flex backends, which keep what they sent: it may be the caller's own.
_KEEPING = ("deepep", "deepepv2", "uccl_ep", "hybridep", "ncclep")


def freed_inputs(dispatcher: Any, preprocess_in_graph: bool = False) -> FreedInputs:
    """Returns a dispatcher's flags.

    Experts in FP8 or FP4 save a copy of their own. A rank's single expert behind the all-to-all
    gets rows as they arrived, and saves them; other dispatchers permute them first, unless they say
    that received rows are the experts' input ("hybridep" and "ncclep" by default). Flex backends
    keep what they sent.
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
        moe_dispatch=backend not in _KEEPING and not preprocess_in_graph,
        mlp=is_low_precision or (has_permute and not reads_received),
        moe_combine=True,
    )


@dataclass
class LayerState:
    """State that the nodes of a layer hand to each other beside their outputs."""

    residual: Tensor | None = None
    shared_expert_output: Tensor | None = None
    dispatched_probs: Tensor | None = None
    tokens_per_expert: Any = None  # may live in the communication stream's memory


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
        """Runs the step's node of a chunk's or layer's plan, if it has one. values: the forward's
        result so far, and the backward's gradient."""
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
    """Returns steps; None: nothing runs that way."""
    steps = _core.pair_order(forward_layers, backward_layers, early_attention_release)
    return tuple(PairStep(*step) for step in steps)


class TransformerLayerSchedulePlan:
    """pre_dispatch_computation, moe_dispatch, mlp, moe_combine, mtp_post_process; used once.

    layer: a `TransformerLayer`, or whatever has its methods. A dense layer exchanges nothing: its
    moe_dispatch and moe_combine do nothing. A layer that predicts several tokens has a method
    mtp_post_process(x) -> tensor; for others that node does nothing. Weight gradients that it
    leaves come with those of pre_dispatch_computation.
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

    # Methods that the nodes run.

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
        """Tells the allocator that the node uses what the dispatcher keeps from the other lane."""
        dispatcher = self.layer.dispatcher
        for owner in (dispatcher, getattr(dispatcher, "_comm_manager", None)):
            lanes.known_to(getattr(owner, "__dict__", {}).values(), node.stream)


@dataclass
class ChunkState:
    """The arguments of a micro-batch, for its nodes."""

    input_ids: Any = None
    position_ids: Any = None
    attention_mask: Any = None
    decoder_input: Tensor | None = None
    labels: Any = None
    loss_mask: Any = None
    name: str = ""  # in the record of the issue order

    def drop(self) -> None:
        """Drops all but the name, in place: the nodes hold this object."""
        for field in fields(self):
            if field.name != "name":
                setattr(self, field.name, None)


class _EndNode(TransformerLayerNode):
    """Node before the layers or after them, with the weights of a module of the model."""

    NAME: str
    MODULE: str  # an attribute of the model

    def __init__(self, model: Any, state: ChunkState, event: Any, stream: Any) -> None:
        module = getattr(model, self.MODULE)
        modules = [module] if isinstance(module, torch.nn.Module) else []
        names = {"name": self.NAME, "chunk_name": state.name}
        run = type(self)._run
        super().__init__(run, stream, event, **names, bwd_dw_callables=delayed_modules(modules))
        self.model, self.state = model, state


class PreProcessNode(_EndNode):
    """No input -> the input of the first layer. A decoder_input has its gradient in `.grad`."""

    NAME, MODULE = "pre_process", "embedding"

    def _run(self) -> Tensor:
        state = self.state
        return self.model.preprocess(state.input_ids, state.position_ids, state.decoder_input)


class PostProcessNode(_EndNode):
    """The output of the last layer -> loss or logits, fp32."""

    NAME, MODULE = "post_process", "output_layer"

    def _run(self, hidden: Tensor) -> Tensor:
        return self.model.postprocess(hidden, self.state.labels, self.state.loss_mask)


def refuse_unused(**given: Any) -> None:
    """Raises NotImplementedError for arguments of Megatron-LM's that are of no use here."""
    unused = [
        name
        for name, value in given.items()
        if value is not None and value is not False and value != {}
    ]
    if unused:
        raise NotImplementedError(f"schedule plan: {', '.join(unused)} (expected None)")


class TransformerModelChunkSchedulePlan(AbstractSchedulePlan):
    """The nodes of one micro-batch on `model`, a `ModelChunk` or whatever has its attributes."""

    LAYER_SCHEDULE_PLAN_CLASS: type = TransformerLayerSchedulePlan
    PRE_PROCESS_NODE_CLASS: type = PreProcessNode
    POST_PROCESS_NODE_CLASS: type = PostProcessNode

    def __init__(
        self,
        model: Any,
        input_ids: Any = None,
        position_ids: Any = None,
        attention_mask: Any = None,
        decoder_input: Tensor | None = None,
        labels: Any = None,
        packed_seq_params: Any = None,
        extra_block_kwargs: Any = None,
        runtime_gather_output: Any = None,
        loss_mask: Any = None,
        padding_mask: Any = None,
        *,
        output_processor: Any = None,
        output_processor_context: Any = None,
        name: str = "",
    ) -> None:
        """Megatron-LM's arguments. name: for the record of the issue order.

        Raises NotImplementedError for what is of no use here, unless it is None, False or {}, and
        AssertionError for settings that `check_overlap` refuses.
        """
        refuse_unused(
            packed_seq_params=packed_seq_params,
            extra_block_kwargs=extra_block_kwargs,
            runtime_gather_output=runtime_gather_output,
            padding_mask=padding_mask,
            output_processor=output_processor,
            output_processor_context=output_processor_context,
        )
        config = model.config
        check_overlap(config)
        lanes.set_streams(high_priority=option(config, "high_priority_a2a_comm_stream"))
        self.model, self.name = model, name
        self.vp_stage = getattr(model, "vp_stage", None)
        self.event = lanes.new_event()
        texts = (input_ids, position_ids, attention_mask, decoder_input, labels, loss_mask)
        self.state = ChunkState(*texts, name=name)
        streams = (lanes.get_comp_stream, lanes.get_comm_stream)
        self.early_release = option(config, "ep_overlap_early_attn_memory_release")
        self.layers = [
            self.LAYER_SCHEDULE_PLAN_CLASS(
                layer,
                self.event,
                self.state,
                *streams,
                extra_args={"layer_number": i, "early_attn_memory_release": self.early_release},
            )
            for i, layer in enumerate(model.layers)
        ]
        node_args = (model, self.state, self.event, streams[0])
        self.pre_process = self.PRE_PROCESS_NODE_CLASS(*node_args)
        self.post_process: Any = None
        if model.output_layer is not None:
            self.post_process = self.POST_PROCESS_NODE_CLASS(*node_args)

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    def receive(self, hidden: Tensor) -> None:
        """Sets the first layer's input, whose gradient goes to post_backward."""
        self.state.decoder_input = hidden.detach().requires_grad_()

    def record_current_stream(self) -> None:
        """Makes the next node wait for the current stream."""
        self.event.record(lanes.get_comp_stream())

    def wait_current_stream(self) -> None:
        """Has the current stream wait for the last node."""
        self.event.wait(lanes.get_comp_stream())

    def release_state(self) -> None:
        """Drops every graph and tensor."""
        for layer in self.layers:
            layer.release_state()
        self.pre_process.release()
        if self.post_process is not None:
            self.post_process.release()
        self.state.drop()

    def abandon(self) -> None:
        """Drops a stopped schedule's leftovers, also in the model, which stays usable."""
        self.release_state()
        drop_pending(self.model)
        for layer in self.layers:
            manager = getattr(getattr(layer.layer, "moe", None), "dispatcher", None)
            manager = getattr(manager, "_comm_manager", None)
            if manager is not None:
                manager.token_probs = manager.dispatched_probs = manager.handle = None

    @staticmethod
    def run(
        f_schedule_plan: TransformerModelChunkSchedulePlan | None,
        b_schedule_plan: TransformerModelChunkSchedulePlan | None,
        b_grad: Any = None,
        pre_forward: Callable[..., None] | None = None,
        pre_backward: Callable[..., None] | None = None,
        post_forward: Callable[..., None] | None = None,
        post_backward: Callable[..., None] | None = None,
    ) -> Any:
        """Collective. Runs f_schedule_plan's forward and b_schedule_plan's backward.

        b_grad: the gradient of b's output. Returns f's output; a decoder_input of b has its
        gradient. Hooks, for a pipeline: pre_forward(vp_stage), pre_backward(vp_stage) on the
        compute lane, post_forward(output, vp_stage) on the exchange lane, post_backward(grad,
        vp_stage) on the compute lane. A tensor that pre_forward returns is f's decoder_input, one
        that pre_backward returns is b_grad.
        What a node or a hook throws reaches the caller: nothing more is issued, the compute
        stream waits for the other, both plans and what their forwards left in the model are
        dropped. Gradients that were finished before stay in the parameters. The process group can
        be used again if every rank stopped at the same node.
        """
        hooks = {
            "pre_forward": pre_forward,
            "pre_backward": pre_backward,
            "post_forward": post_forward,
            "post_backward": post_backward,
        }
        is_pair = f_schedule_plan is not None and b_schedule_plan is not None
        try:
            with overlapped() if is_pair else nullcontext():
                return _Pair(f_schedule_plan, b_schedule_plan, b_grad, hooks).run()
        except BaseException:
            with suppress(RuntimeError):  # a broken GPU must not hide what broke it
                lanes.join_lanes()
            for plan in (f_schedule_plan, b_schedule_plan):
                if plan is not None:
                    plan.abandon()
            raise


class _Pair:
    """A running forward of plan `f` and backward of plan `b`; either may be None. The methods after
    `run` are steps without a node.

    Raises AssertionError for a backward without a gradient.
    """

    def __init__(self, f: Any, b: Any, b_grad: Any, hooks: dict[str, Any]) -> None:
        self.plans = (f, b)
        self.values = [(), b_grad]
        self.hooks = {name: hook for name, hook in hooks.items() if hook is not None}
        if b is not None and "pre_backward" not in self.hooks:
            self._check_grad()

    def run(self) -> Any:
        """Returns the output of `f`."""
        f, b = self.plans
        layers = [None if plan is None else plan.num_layers for plan in self.plans]
        for step in pair_order(*layers, b is not None and b.early_release):
            plan = self.plans[step.is_backward]
            owner = plan if step.layer < 0 else plan.layers[step.layer]
            if step.is_of_node:
                step.run(owner, self.values)
            else:
                getattr(self, step.action)(owner)
        return None if f is None else self.values[0]

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

    def join(self, plan: Any) -> None:
        plan.wait_current_stream()
        if plan is self.plans[0]:  # a combine made its output on the other lane
            lanes.known_to([self.values[0]], lanes.get_comp_stream())

    def release(self, plan_or_layer: Any) -> None:
        plan_or_layer.release_state()

    release_layer = release

    def _call(self, name: str, plan: Any, *value: Any, lane: str = "comp") -> Any:
        if name not in self.hooks:
            return None
        lanes.note(lanes.Step(plan.name, name, "", lane))
        return self.hooks[name](*value, plan.vp_stage)

    def _check_grad(self) -> None:
        if self.values[1] is None:
            raise AssertionError("run: the backward has no gradient (expected b_grad)")
