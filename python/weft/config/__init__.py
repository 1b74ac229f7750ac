# SPDX-License-Identifier: Apache-2.0
"""Settings of the overlap of expert-parallel communication, and the rules that hold for them.

overlap = CommOverlapConfig(tp_comm_overlap=False, overlap_moe_expert_parallel_comm=True)
apply_flex_dispatcher_backend(model_config, "hybridep")
overlap.setup(model_config, optimizer_config, ddp_config)
validate_model_overlap(model_config)

All configurations are plain objects with the attributes of Megatron-LM.
"""

# "as" says that a name is for others.
from weft.dispatcher.config import DispatcherConfig

from .comm_overlap import CommOverlapConfig as CommOverlapConfig
from .comm_overlap import _set_moe_a2a_overlap_overrides as _set_moe_a2a_overlap_overrides
from .flex_backend import apply_flex_dispatcher_backend as apply_flex_dispatcher_backend
from .flex_backend import validate_flex_dispatcher_backend as validate_flex_dispatcher_backend
from .validate import validate_delayed_linear as validate_delayed_linear
from .validate import validate_graph_replay as validate_graph_replay
from .validate import validate_model_overlap as validate_model_overlap
from .validate import validate_overlap_arguments as validate_overlap_arguments
from .validate import validate_overlap_schedule as validate_overlap_schedule
from .validate import validate_sharded_overlap as validate_sharded_overlap
from .validate import validate_user_overlap as validate_user_overlap

OverlapModelConfig = DispatcherConfig  # which has the settings of both
