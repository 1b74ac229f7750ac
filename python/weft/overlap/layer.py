# SPDX-License-Identifier: Apache-2.0
"""A transformer layer of ordinary modules, cut where a schedule cuts it, and the layers of one
pipeline stage with what comes before and after them.

Called as modules they run their pieces one after another, in one graph: what a schedule's results
are compared with. plans.py has the plans.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from weft.config import OverlapModelConfig
from weft.config.validate import check_recompute

from .plans import TransformerModelChunkSchedulePlan, refuse_unused


class TransformerLayer(nn.Module):
    """x [..., H] -> [..., H]: attention and a dense or an MoE part, both beside a residual."""

    def __init__(
        self,
        attention: nn.Module,
        *,
        mlp: nn.Module | None = None,
        moe: Any = None,
        pre_mlp_norm: nn.Module | None = None,
        shared_experts: nn.Module | None = None,
        recompute_modules: Sequence[str] = (),
    ) -> None:
        """attention(x) or attention(x, mask) -> the branch beside the residual, its norm included.

        Either `mlp`, or `moe` with dispatcher, route and experts as in `weft.examples.layer`.
        shared_experts: every token's experts, beside the routed ones.
        recompute_modules: "core_attn" (all of `attention`), "layernorm", "mlp" and
        "shared_experts" are done again in the backward; others are for the modules themselves.
        final_norm: set on the last layer of a model.
        Raises ValueError for both or none of mlp and moe, and see `check_recompute`.
        """
        super().__init__()
        if (mlp is None) == (moe is None) or (moe is None and shared_experts is not None):
            raise ValueError("layer: expected mlp, or moe with or without shared_experts")
        check_recompute(recompute_modules)
        self.attention = attention
        self.mlp = mlp
        self.moe = moe
        self.pre_mlp_norm = nn.Identity() if pre_mlp_norm is None else pre_mlp_norm
        self.shared_experts = shared_experts
        self.final_norm: nn.Module | None = None
        self.recompute_modules = tuple(recompute_modules)

    @property
    def is_moe(self) -> bool:
        return self.moe is not None

    @property
    def dispatcher(self) -> Any:
        return self.moe.dispatcher

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        if not self.is_moe:
            return self.dense(self.attend(x, mask))
        hidden, probs, residual, shared_output = self.pre_dispatch(x, mask)
        rows = self.compute(*self.dispatch(hidden, probs))
        return self.combine(rows, residual, shared_output)

    # The content of the nodes. `slot` says whose weight gradients belong to which.

    def attend(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        given = (x,) if mask is None else (x, mask)
        return x + self._run("core_attn", self.attention, *given)

    def pre_dispatch(
        self, x: Tensor, mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Returns rows to send, their probs, the residual, the shared experts' output."""
        residual = self.attend(x, mask)
        y = self._run("layernorm", self.pre_mlp_norm, residual)
        shared_output = None
        if self.shared_experts is not None:
            shared_output = self._run("shared_experts", self.shared_experts, y)
        routing = self.moe.route(y.reshape(-1, y.shape[-1]))
        hidden, probs = self.dispatcher.dispatch_preprocess(y, *routing)
        return hidden, probs, residual, shared_output

    def dispatch(self, hidden: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        """Collective. Returns rows as they arrive, and their probs."""
        return self.dispatcher.token_dispatch(hidden, probs)

    def compute(self, rows: Tensor, row_probs: Tensor) -> Tensor:
        """Runs routed experts."""
        rows, counts, row_probs = self.dispatcher.dispatch_postprocess(rows, row_probs)
        return self.dispatcher.combine_preprocess(self.moe.experts(rows, counts, row_probs))

    def combine(self, rows: Tensor, residual: Tensor, shared_output: Tensor | None) -> Tensor:
        """Collective. Makes the output."""
        y = self.dispatcher.combine_postprocess(self.dispatcher.token_combine(rows))
        if shared_output is not None:
            y = y + shared_output
        return self._finish(residual + y)

    def dense(self, x: Tensor) -> Tensor:
        y = self._run("layernorm", self.pre_mlp_norm, x)
        return self._finish(x + self._run("mlp", self.mlp, y))

    def slot(self, node: str) -> list[nn.Module]:
        """Returns modules whose weight gradients come with "pre_dispatch" or "mlp".

        A subclass's own modules come with "pre_dispatch", whose turn is after all backwards of the
        layer: mtp_post_process has no turn of its own. A subclass adds modules that it uses of
        other owners, such as an output layer.
        """
        experts = [self.moe.experts] if self.is_moe else [self.pre_mlp_norm, self.mlp]
        if node == "mlp":
            return experts
        routers = list(self.moe.children()) if self.is_moe else []
        elsewhere = [*experts, self.moe]
        parts = [*self.children(), *routers]
        return [part for part in parts if not any(part is other for other in elsewhere)]

    def _finish(self, x: Tensor) -> Tensor:
        return x if self.final_norm is None else self.final_norm(x)

    def _run(self, name: str, piece: Callable[..., Tensor], *args: Tensor) -> Tensor:
        if name in self.recompute_modules and torch.is_grad_enabled():
            return checkpoint(piece, *args, use_reentrant=False)
        return piece(*args)


class ModelChunk(nn.Module):
    """Called as a module it is the sequential model; `build_schedule_plan` is the same in nodes."""

    def __init__(
        self,
        layers: Sequence[nn.Module],
        *,
        embedding: nn.Module | None = None,
        output_layer: Callable[..., Tensor] | None = None,
        final_norm: nn.Module | None = None,
        config: Any = None,
        vp_stage: int | None = None,
    ) -> None:
        """embedding(input_ids, position_ids) -> [..., H]; only on the first stage.

        output_layer(hidden, labels, loss_mask) -> the loss, or logits without labels; only on the
        last stage. final_norm runs inside the last layer. config: a
        `weft.config.OverlapModelConfig`, or any object with (some of) its attributes.
        """
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.embedding = embedding
        self.output_layer = output_layer
        self.config = OverlapModelConfig() if config is None else config
        self.vp_stage = vp_stage
        if final_norm is not None:
            self.layers[-1].final_norm = final_norm

    def preprocess(
        self, input_ids: Any, position_ids: Any, decoder_input: Tensor | None = None
    ) -> Tensor:
        """Returns the first layer's input: decoder_input if it is given, else the embedding."""
        if decoder_input is not None:
            return decoder_input
        if self.embedding is None:
            raise ValueError("preprocess: no decoder_input (expected one: there is no embedding)")
        return self.embedding(input_ids, position_ids)

    def postprocess(self, hidden: Tensor, labels: Any = None, loss_mask: Any = None) -> Tensor:
        return self.output_layer(hidden, labels, loss_mask).float()

    def forward(
        self,
        input_ids: Any,
        position_ids: Any = None,
        attention_mask: Any = None,
        decoder_input: Tensor | None = None,
        labels: Any = None,
        loss_mask: Any = None,
    ) -> Tensor:
        x = self.preprocess(input_ids, position_ids, decoder_input)
        for layer in self.layers:
            x = layer(x, attention_mask)
        return x if self.output_layer is None else self.postprocess(x, labels, loss_mask)

    def build_schedule_plan(
        self,
        input_ids: Any,
        position_ids: Any = None,
        attention_mask: Any = None,
        decoder_input: Tensor | None = None,
        labels: Any = None,
        inference_context: Any = None,
        packed_seq_params: Any = None,
        extra_block_kwargs: Any = None,
        runtime_gather_output: Any = None,
        inference_params: Any = None,
        loss_mask: Any = None,
        padding_mask: Any = None,
        **others: Any,
    ) -> TransformerModelChunkSchedulePlan:
        """Makes a micro-batch's plan, by Megatron-LM's arguments. others: the plan's keyword
        arguments.

        Raises NotImplementedError for what is of no use here, unless it is None, False or {}, and
        AssertionError for settings that `check_overlap` refuses.
        """
        refuse_unused(inference_context=inference_context, inference_params=inference_params)
        first = (input_ids, position_ids, attention_mask, decoder_input, labels)
        unused = (packed_seq_params, extra_block_kwargs, runtime_gather_output)
        masks = (loss_mask, padding_mask)
        return TransformerModelChunkSchedulePlan(self, *first, *unused, *masks, **others)
