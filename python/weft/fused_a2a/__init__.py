# SPDX-License-Identifier: Apache-2.0
"""The functions that training frameworks call around their experts: fused dispatch and combine.

A drop-in for the `fused_a2a` modules of NeMo Automodel and of Megatron-LM. Three families, each
with autograd functions, wrappers and a buffer that is made at the first call:

    fused_*, uccl_fused_*   one row per token and rank; top-k indices and probabilities go along
    deepepv2_*              the same rows, from an elastic buffer
    hybrid_ep_*             one row per route, grouped and padded by local expert

Where the two projects give the same function other arguments, the positions are NeMo Automodel's,
and Megatron-LM's further arguments go by keyword. The autograd functions, which take no keywords,
tell the two projects apart by the number of arguments.

State lives in this module, under the names that both projects and their tests assign: `_buffer`,
`_uccl_buffer`, `_hybrid_ep_buffer`, `_elastic_buffer` (the buffer used last, or None) and
`_nvshmem_available`.
"""

from typing import Any

from weft.compat.deep_ep import Buffer, ElasticBuffer, EventHandle, EventOverlap, HybridEPBuffer
from weft.compat.uccl import EventHandle as UCCLEventHandle
from weft.compat.uccl import EventOverlap as UCCLEventOverlap
from weft.compat.uccl import UCCLBuffer

# Callers ask before they use a family. Weft has all but NCCL EP.
HAVE_DEEP_EP: bool = True
HAVE_DEEP_EP_V2: bool = True
HAVE_UCCL_EP: bool = True
HAVE_HYBRIDEP: bool = True

# Callers may pad token counts to this multiple before hybrid_ep_dispatch; it does not need it.
HYBRIDEP_TOKEN_ALIGNMENT: int = 64

_buffer: Any = None
_uccl_buffer: Any = None
_hybrid_ep_buffer: Any = None
_elastic_buffer: Any = None
_nvshmem_available: bool | None = None

# They read the state above.
from .buffers import (
    _is_nvshmem_available,
    free_buffer,
    get_buffer,
    get_elastic_buffer,
    get_hidden_bytes,
    get_uccl_buffer,
    init_hybrid_ep_buffer,
    reset_hybrid_ep_buffer,
)
from .deepep import (
    FusedCombine,
    FusedDispatch,
    fused_combine,
    fused_dispatch,
    set_deepep_num_sms,
)
from .deepepv2 import (
    DeepepV2Combine,
    DeepepV2Dispatch,
    deepepv2_combine,
    deepepv2_dispatch,
)
from .hybridep import (
    HybridEPCombine,
    HybridEPDispatch,
    hybrid_ep_combine,
    hybrid_ep_dispatch,
)
from .nccl_ep import (
    HAVE_TE_EP,
    alloc_ep_symm_buffer,
    ensure_nccl_ep_bootstrapped,
    is_nccl_ep_bootstrapped,
    nccl_ep_combine,
    nccl_ep_dispatch,
    nccl_ep_finalize,
    new_nccl_ep_buffer,
)
from .uccl import (
    UCCLFusedCombine,
    UCCLFusedDispatch,
    set_uccl_num_sms,
    set_uccl_num_sms_from_environment,
    uccl_fused_combine,
    uccl_fused_dispatch,
)

set_uccl_num_sms_from_environment()

__all__ = [
    "Buffer",
    "DeepepV2Combine",
    "DeepepV2Dispatch",
    "ElasticBuffer",
    "EventHandle",
    "EventOverlap",
    "FusedCombine",
    "FusedDispatch",
    "HAVE_DEEP_EP",
    "HAVE_DEEP_EP_V2",
    "HAVE_HYBRIDEP",
    "HAVE_TE_EP",
    "HAVE_UCCL_EP",
    "HYBRIDEP_TOKEN_ALIGNMENT",
    "HybridEPBuffer",
    "HybridEPCombine",
    "HybridEPDispatch",
    "UCCLBuffer",
    "UCCLEventHandle",
    "UCCLEventOverlap",
    "UCCLFusedCombine",
    "UCCLFusedDispatch",
    "alloc_ep_symm_buffer",
    "deepepv2_combine",
    "deepepv2_dispatch",
    "ensure_nccl_ep_bootstrapped",
    "free_buffer",
    "fused_combine",
    "fused_dispatch",
    "get_buffer",
    "get_elastic_buffer",
    "get_hidden_bytes",
    "get_uccl_buffer",
    "hybrid_ep_combine",
    "hybrid_ep_dispatch",
    "init_hybrid_ep_buffer",
    "is_nccl_ep_bootstrapped",
    "nccl_ep_combine",
    "nccl_ep_dispatch",
    "nccl_ep_finalize",
    "new_nccl_ep_buffer",
    "reset_hybrid_ep_buffer",
    "set_deepep_num_sms",
    "set_uccl_num_sms",
    "uccl_fused_combine",
    "uccl_fused_dispatch",
]
