# SPDX-License-Identifier: Apache-2.0
"""Token dispatchers with Megatron-LM's interface: tokens to experts and back inside an MoE layer.

    dispatcher = MoEFlexTokenDispatcher(El, local_expert_indices, config, groups)

`MoEAlltoAllTokenDispatcher` needs only torch.distributed; `MoEFlexTokenDispatcher` runs on Weft.
Both take any settings object with the attributes of `DispatcherConfig`. `MoETokenDispatcher` lists
the phases that a layer calls.
"""

from typing import Any

from .alltoall import MoEAlltoAllTokenDispatcher
from .base import DispatcherGroups, MoETokenDispatcher
from .capacity import (
    get_align_size_for_quantization,
    get_capacity,
    pad_routing_map,
    skip_routed_expert_padding,
)
from .config import DispatcherConfig, TokenDispatcherConfig
from .deepep import _DeepepManager
from .deepepv2 import _DeepepV2Manager
from .flex import MoEFlexTokenDispatcher
from .hybridep import _HybridEPManager, _HybridEPMetadataProcessor
from .initializer import HybridEPPipelineRuntimeInitializer
from .manager import (
    FUNCTIONS,
    _DispatchManager,
    fused_indices_to_multihot,
    indices_to_multihot,
)
from .ncclep import _NCCLEPManager, nccl_ep_release_context
from .permute import permute, sort_chunks_by_idxs, unpermute

__all__ = [
    "DispatcherConfig",
    "DispatcherGroups",
    "HybridEPPipelineRuntimeInitializer",
    "MoEAlltoAllTokenDispatcher",
    "MoEFlexTokenDispatcher",
    "MoETokenDispatcher",
    "TokenDispatcherConfig",
    "_DeepepManager",
    "_DeepepV2Manager",
    "_DispatchManager",
    "_HybridEPManager",
    "_HybridEPMetadataProcessor",
    "_NCCLEPManager",
    "fused_indices_to_multihot",
    "get_align_size_for_quantization",
    "get_capacity",
    "indices_to_multihot",
    "nccl_ep_release_context",
    "pad_routing_map",
    "permute",
    "skip_routed_expert_padding",
    "sort_chunks_by_idxs",
    "unpermute",
]


def __getattr__(name: str) -> Any:
    """Finds the backends' functions of `weft.fused_a2a` here too, as the reference's modules do;
    a name that a caller sets here goes first."""
    if not any(name in names for names in FUNCTIONS.values()):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from weft import fused_a2a

    return getattr(fused_a2a, name)
