# SPDX-License-Identifier: Apache-2.0
"""Exchanges of one micro-batch hidden under the computation of another, for ordinary modules.

    model = ModelChunk([TransformerLayer(attention, moe=moe), ...], embedding=..., output_layer=...)
    plans = lambda i: model.build_schedule_plan(ids[i], labels=labels[i])
    losses = combined_1f1b_schedule_for_no_pipelining(plans, num_micro_batches)

The forward of one micro-batch is woven into the backward of the one before it, on the current
stream and one communication stream. Results are those of `model(...)` and `backward()`, bit for
bit. Names are Megatron-LM's.
"""

# "as" says that a name is for others.
from weft.config.validate import check_overlap as check_overlap

from .experts import DelayedExperts as DelayedExperts
from .lanes import Step as Step
from .lanes import get_comm_stream as get_comm_stream
from .lanes import get_comp_stream as get_comp_stream
from .lanes import record_issue_order as record_issue_order
from .lanes import set_streams as set_streams
from .layer import ModelChunk as ModelChunk
from .layer import TransformerLayer as TransformerLayer
from .nodes import AbstractSchedulePlan as AbstractSchedulePlan
from .nodes import NoopScheduleNode as NoopScheduleNode
from .nodes import ScheduleNode as ScheduleNode
from .nodes import TransformerLayerNode as TransformerLayerNode
from .pipeline import PipelineShape as PipelineShape
from .pipeline import PointToPoint as PointToPoint
from .pipeline import VirtualStage as VirtualStage
from .pipeline import backward_order as backward_order
from .pipeline import (
    combined_1f1b_schedule_for_interleaved_pipelining as combined_1f1b_schedule_for_interleaved_pipelining,  # noqa: E501
)
from .pipeline import (
    combined_1f1b_schedule_for_no_pipelining as combined_1f1b_schedule_for_no_pipelining,
)
from .pipeline import forward_order as forward_order
from .pipeline import num_warm_up as num_warm_up
from .pipeline import sequential_schedule_for_no_pipelining as sequential_schedule_for_no_pipelining
from .plans import ChunkState as ChunkState
from .plans import FreedInputs as FreedInputs
from .plans import PostProcessNode as PostProcessNode
from .plans import PreProcessNode as PreProcessNode
from .plans import TransformerLayerSchedulePlan as TransformerLayerSchedulePlan
from .plans import TransformerModelChunkSchedulePlan as TransformerModelChunkSchedulePlan
from .plans import freed_inputs as freed_inputs
from .wgrad import DelayedLinear as DelayedLinear
from .wgrad import WeightGradientQueue as WeightGradientQueue
