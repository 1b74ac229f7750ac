# SPDX-License-Identifier: Apache-2.0
"""Settings of the overlap of expert-parallel communication, and their rules.

overlap = CommOverlapConfig(tp_comm_overlap=False, overlap_moe_expert_parallel_comm=True)
apply_flex_dispatcher_backend(model_config, "hybridep")
overlap.setup(model_config, optimizer_config, ddp_config)
validate_model_overlap(model_config)

All configurations are plain objects with the attributes of Megatron-LM.
"""

from weft.dispatcher.config import DispatcherConfig

from .comm_overlap import CommOverlapConfig, _set_moe_a2a_overlap_overrides
from .flex_backend import apply_flex_dispatcher_backend, validate_flex_dispatcher_backend
from .validate import (
    validate_delayed_linear,
    validate_graph_replay,
    validate_model_overlap,
    validate_overlap_arguments,
    validate_overlap_schedule,
    validate_sharded_overlap,
    validate_user_overlap,
)

OverlapModelConfig = DispatcherConfig  # which has the settings of both

__all__ = [
    "CommOverlapConfig",
    "OverlapModelConfig",
    "_set_moe_a2a_overlap_overrides",
    "apply_flex_dispatcher_backend",
    "validate_delayed_linear",
    "validate_flex_dispatcher_backend",
    "validate_graph_replay",
    "validate_model_overlap",
    "validate_overlap_arguments",
    "validate_overlap_schedule",
    "validate_sharded_overlap",
    "validate_user_overlap",
]
