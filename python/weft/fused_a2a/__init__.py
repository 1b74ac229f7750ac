# SPDX-License-Identifier: Apache-2.0
"""The functions that training frameworks call around their experts: fused dispatch and combine.

A drop-in for the `fused_a2a` modules of NeMo Automodel and of Megatron-LM. Families, each with
gradients:

    fused_*, uccl_fused_*   one row per token and rank; top-k indices and probabilities go along
    deepepv2_*              the same rows, from an elastic buffer
    hybrid_ep_*, nccl_ep_*  one row per route, grouped and padded by local expert

Where the two projects give the same function other arguments, the positions are NeMo Automodel's,
and Megatron-LM's further arguments go by keyword. The autograd functions, which take no keywords,
tell the two projects apart by the number of arguments.

State lives in this module, under the names that both projects and their tests assign: `_buffer`,
`_uccl_buffer`, `_hybrid_ep_buffer`, `_elastic_buffer` (the buffer used last, or None),
`_nvshmem_available`, and what was published of `_hybrid_ep_buffer`: its
`_hybrid_ep_initialized_capacity` and `_hybrid_ep_runtime_signature`.
"""

from types import ModuleType
from typing import Any

from weft.compat.deep_ep import Buffer, ElasticBuffer, EventHandle, EventOverlap, HybridEPBuffer
from weft.compat.uccl import EventHandle as UCCLEventHandle
from weft.compat.uccl import EventOverlap as UCCLEventOverlap
from weft.compat.uccl import UCCLBuffer

# Callers ask before they use a family.
HAVE_DEEP_EP: bool = True
HAVE_DEEP_EP_V2: bool = True
HAVE_UCCL_EP: bool = True
HAVE_HYBRIDEP: bool = True
HAVE_TE_EP: bool = True

# Callers may pad token counts to this multiple before hybrid_ep_dispatch, which needs none.
HYBRIDEP_TOKEN_ALIGNMENT: int = 64

_buffer: Any = None
_uccl_buffer: Any = None
_hybrid_ep_buffer: Any = None
_elastic_buffer: Any = None
_nccl_ep_ranks: Any = None
_hybrid_ep_runtime_signature: tuple[Any, ...] | None = None
_hybrid_ep_initialized_capacity: int = 0
_nvshmem_available: bool | None = None
# State of compiled kernels, which Weft does not have.
_JIT_CACHE_ROOT: str | None = None
_jit_proc_dir: str | None = None
_jit_shared_dir: str | None = None
_jit_stored: bool = False

# Imported last: they read the state.
from .buffers import (
    _deep_ep_version,
    _hybrid_ep_jit_dirs,
    _is_nvshmem_available,
    _warm_start_hybrid_ep_jit,
    free_buffer,
    get_buffer,
    get_elastic_buffer,
    get_hidden_bytes,
    get_hybrid_ep_initialized_capacity,
    get_uccl_buffer,
    init_hybrid_ep_buffer,
    publish_hybrid_ep_initialized_capacity,
    reset_hybrid_ep_buffer,
    store_hybrid_ep_jit_cache,
)
from .hybridep import (
    HybridEPCombine,
    HybridEPDispatch,
    _has_parameter,
    hybrid_ep_combine,
    hybrid_ep_dispatch,
)
from .nccl_ep import (
    alloc_ep_symm_buffer,
    ensure_nccl_ep_bootstrapped,
    is_nccl_ep_bootstrapped,
    nccl_ep_combine,
    nccl_ep_dispatch,
    nccl_ep_finalize,
    new_nccl_ep_buffer,
)
from .rank_rows import (
    DeepepV2Combine,
    DeepepV2Dispatch,
    FusedCombine,
    FusedDispatch,
    UCCLFusedCombine,
    UCCLFusedDispatch,
    deepepv2_combine,
    deepepv2_dispatch,
    fused_combine,
    fused_dispatch,
    set_deepep_num_sms,
    set_uccl_num_sms,
    set_uccl_num_sms_from_environment,
    uccl_fused_combine,
    uccl_fused_dispatch,
)
from .replay import (
    DispatchReplayRecorder,
    HybridEPDispatchReplayRecorder,
    _active_recorder,
    _dispatch_replay_state,
    _hybridep_dispatch_replay_state,
    _replay_mode,
    dispatch_replay_scope,
    hybridep_dispatch_replay_scope,
)

set_uccl_num_sms_from_environment()

__all__ = [
    name
    for name, value in globals().items()
    if not name.startswith("_") and not isinstance(value, ModuleType)
]
for _name in ("Any", "ModuleType", "set_uccl_num_sms_from_environment"):
    __all__.remove(_name)
