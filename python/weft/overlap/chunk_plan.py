# SPDX-License-Identifier: Apache-2.0
"""One micro-batch on one model chunk, and two of them woven into each other. pipeline.py issues the
pairs."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from weft.config.validate import check_overlap
from weft.dispatcher.config import option
from weft.overlap_settings import overlapped

from . import lanes
from .layer_plan import TransformerLayerSchedulePlan, pair_order
from .nodes import AbstractSchedulePlan, TransformerLayerNode
from .wgrad import delayed_modules, drop_pending


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
    """What comes before the layers or after them, with the weights of a module of the model."""

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


class TransformerModelChunkSchedulePlan(AbstractSchedulePlan):
    """The nodes of one micro-batch on `model`, a `ModelChunk` or whatever has its attributes."""

    LAYER_SCHEDULE_PLAN_CLASS: type = TransformerLayerSchedulePlan
    PRE_PROCESS_NODE_CLASS: type = PreProcessNode
    POST_PROCESS_NODE_CLASS: type = PostProcessNode

    def __init__(self, model: Any, *texts: Any, name: str = "", **more_texts: Any) -> None:
        """texts, more_texts: input_ids and what else `ChunkState` has, by position or by name.

        name: for the record of the issue order. Raises AssertionError for settings that
        `check_overlap` refuses.
        """
        config = model.config
        check_overlap(config)
        lanes.set_streams(high_priority=option(config, "high_priority_a2a_comm_stream"))
        self.model, self.name = model, name
        self.vp_stage = getattr(model, "vp_stage", None)
        self.event = lanes.new_event()
        self.state = ChunkState(*texts, name=name, **more_texts)
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
        """`hidden` is what goes into the first layer; its gradient goes to post_backward."""
        self.state.decoder_input = hidden.detach().requires_grad_()

    def record_current_stream(self) -> None:
        """The next node waits for what the current stream was given."""
        self.event.record(lanes.get_comp_stream())

    def wait_current_stream(self) -> None:
        """The current stream waits for the last node."""
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
        """Drops what a stopped schedule left, in the model too, which then can be used again."""
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
        """Collective. The forward of f_schedule_plan and the backward of b_schedule_plan.

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
    """The forward of plan `f` and the backward of plan `b`, either of which may be None, on their
    way. The methods after `run` are the steps that are not of a node.

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
