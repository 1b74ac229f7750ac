# SPDX-License-Identifier: Apache-2.0
"""The layers of one pipeline stage as a module, with what comes before and after them. layer.py has
the layers, chunk_plan.py the plans."""

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn

from weft.config import OverlapModelConfig

from .chunk_plan import TransformerModelChunkSchedulePlan


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
        """What goes into the first layer: decoder_input if it is given, else the embedding."""
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
        extra_block_kwargs: dict[str, Any] | None = None,
        runtime_gather_output: bool | None = None,
        inference_params: Any = None,
        loss_mask: Any = None,
        padding_mask: Any = None,
        **options: Any,
    ) -> TransformerModelChunkSchedulePlan:
        """The plan of one micro-batch; arguments as for the plan's class, which has none for
        inference: NotImplementedError, too."""
        if inference_context is not None or inference_params is not None:
            raise NotImplementedError("schedule plan: inference_context (expected None)")
        return TransformerModelChunkSchedulePlan(
            self,
            input_ids,
            position_ids,
            attention_mask,
            decoder_input,
            labels,
            packed_seq_params,
            extra_block_kwargs,
            runtime_gather_output,
            loss_mask,
            padding_mask,
            **options,
        )
