# SPDX-License-Identifier: Apache-2.0
"""Exchanges of one micro-batch hidden under the computation of another, for ordinary modules.

    model = ModelChunk([TransformerLayer(attention, moe=moe), ...], embedding=..., output_layer=...)
    plans = lambda i: model.build_schedule_plan(ids[i], labels=labels[i])
    losses = combined_1f1b_schedule_for_no_pipelining(plans, num_micro_batches)

The forward of one micro-batch is woven into the backward of the one before it, on the current
stream and one communication stream. Results are those of `model(...)` and `backward()`, bit for
bit. Names are Megatron-LM's.
"""

from .chunk_plan import (
    ChunkState,
    PostProcessNode,
    PreProcessNode,
    TransformerModelChunkSchedulePlan,
)
from .experts import DelayedExperts
from .issue_log import Step, record_issue_order
from .lanes import get_comm_stream, get_comp_stream, set_streams
from .layer import TransformerLayer
from .layer_plan import FreedInputs, TransformerLayerSchedulePlan, freed_inputs
from .model import ModelChunk
from .nodes import (
    AbstractSchedulePlan,
    NoopScheduleNode,
    ScheduleNode,
    TransformerLayerNode,
)
from .pipeline import (
    PipelineShape,
    PointToPoint,
    VirtualStage,
    backward_order,
    combined_1f1b_schedule_for_interleaved_pipelining,
    combined_1f1b_schedule_for_no_pipelining,
    forward_order,
    num_warm_up,
    sequential_schedule_for_no_pipelining,
)
from .rules import check_overlap
from .wgrad import DelayedLinear, WeightGradientQueue

__all__ = [
    "AbstractSchedulePlan",
    "ChunkState",
    "DelayedExperts",
    "DelayedLinear",
    "FreedInputs",
    "ModelChunk",
    "NoopScheduleNode",
    "PipelineShape",
    "PointToPoint",
    "PostProcessNode",
    "PreProcessNode",
    "ScheduleNode",
    "Step",
    "TransformerLayer",
    "TransformerLayerNode",
    "TransformerLayerSchedulePlan",
    "TransformerModelChunkSchedulePlan",
    "VirtualStage",
    "WeightGradientQueue",
    "backward_order",
    "check_overlap",
    "combined_1f1b_schedule_for_interleaved_pipelining",
    "combined_1f1b_schedule_for_no_pipelining",
    "forward_order",
    "freed_inputs",
    "get_comm_stream",
    "get_comp_stream",
    "num_warm_up",
    "record_issue_order",
    "sequential_schedule_for_no_pipelining",
    "set_streams",
]
