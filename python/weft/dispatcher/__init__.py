# SPDX-License-Identifier: Apache-2.0
"""Token dispatchers with Megatron-LM's interface: tokens to experts and back inside an MoE layer.

    dispatcher = MoEFlexTokenDispatcher(El, local_expert_indices, config, groups)

`MoEAlltoAllTokenDispatcher` needs only torch.distributed; `MoEFlexTokenDispatcher` runs on Weft.
Both take any settings object with the attributes of `DispatcherConfig`. `MoETokenDispatcher` lists
the phases that a layer calls.
"""

# "as" says that a name is for others.
from .alltoall import MoEAlltoAllTokenDispatcher as MoEAlltoAllTokenDispatcher
from .base import DispatcherGroups as DispatcherGroups
from .base import MoETokenDispatcher as MoETokenDispatcher
from .capacity import get_align_size_for_quantization as get_align_size_for_quantization
from .capacity import get_capacity as get_capacity
from .capacity import pad_routing_map as pad_routing_map
from .capacity import skip_routed_expert_padding as skip_routed_expert_padding
from .config import DispatcherConfig as DispatcherConfig
from .config import TokenDispatcherConfig as TokenDispatcherConfig
from .deepep import _DeepepManager as _DeepepManager
from .flex import MoEFlexTokenDispatcher as MoEFlexTokenDispatcher
from .hybridep import _HybridEPManager as _HybridEPManager
from .hybridep import _HybridEPMetadataProcessor as _HybridEPMetadataProcessor
from .manager import _DispatchManager as _DispatchManager
from .manager import fused_indices_to_multihot as fused_indices_to_multihot
from .manager import indices_to_multihot as indices_to_multihot
from .permute import permute as permute
from .permute import sort_chunks_by_idxs as sort_chunks_by_idxs
from .permute import unpermute as unpermute
