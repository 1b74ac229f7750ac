# SPDX-License-Identifier: Apache-2.0
"""Token dispatchers with Megatron-LM's interface: tokens to experts and back inside an MoE layer.

    dispatcher = MoEFlexTokenDispatcher(El, local_expert_indices, config, groups)

`MoEAlltoAllTokenDispatcher` needs only torch.distributed; `MoEFlexTokenDispatcher` runs on Weft.
Both take any settings object with the attributes of `DispatcherConfig`. `MoETokenDispatcher` lists
the phases that a layer calls.
"""

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
from .flex import MoEFlexTokenDispatcher
from .hybridep import _HybridEPManager, _HybridEPMetadataProcessor
from .manager import _DispatchManager, fused_indices_to_multihot, indices_to_multihot
from .permute import permute, sort_chunks_by_idxs, unpermute

__all__ = [
    "DispatcherConfig",
    "DispatcherGroups",
    "MoEAlltoAllTokenDispatcher",
    "MoEFlexTokenDispatcher",
    "MoETokenDispatcher",
    "TokenDispatcherConfig",
    "_DeepepManager",
    "_DispatchManager",
    "_HybridEPManager",
    "_HybridEPMetadataProcessor",
    "fused_indices_to_multihot",
    "get_align_size_for_quantization",
    "get_capacity",
    "indices_to_multihot",
    "pad_routing_map",
    "permute",
    "skip_routed_expert_padding",
    "sort_chunks_by_idxs",
    "unpermute",
]
