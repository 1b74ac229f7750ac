# SPDX-License-Identifier: Apache-2.0
"""The interface of DeepEP, on Weft.

`weft.compat.install()` makes `import deep_ep` mean this package.
"""

import torch

from . import comm
from .buffer import Buffer
from .comm import destroy_all_managed_nccl_comm, get_logical_domain_size
from .config import Config, get_low_latency_rdma_size_hint
from .elastic import ElasticBuffer, EPHandle
from .elastic.base import BufferBase
from .elastic.model import ALIGNMENT
from .ep import (
    BucketBuffer,
    BucketSession,
    BufferAllocator,
    EngramBuffer,
    EPBuffer,
    PPBuffer,
)
from .hybrid_ep import HybridEPBuffer
from .utils.envs import get_physical_domain_size
from .utils.event import EventHandle, EventOverlap

__version__ = "2.5.0"  # the newest whose calls are here
topk_idx_t = torch.int64
is_sm90_compiled = Buffer.is_sm90_compiled


def get_num_allocation_alignment() -> int:
    """Returns buffers' alignment in bytes."""
    return ALIGNMENT


def get_num_rdma_alignment() -> int:
    """Returns `deep_ep`'s alignment for networks in bytes, for callers; Weft needs 16."""
    return 64


def get_num_tma_alignment() -> int:
    """Returns the alignment of a GPU's bulk copies in bytes, for callers; Weft needs 16."""
    return 32


__all__ = [
    "BucketBuffer",
    "BucketSession",
    "Buffer",
    "BufferAllocator",
    "BufferBase",
    "Config",
    "EPBuffer",
    "EPHandle",
    "ElasticBuffer",
    "EngramBuffer",
    "EventHandle",
    "EventOverlap",
    "HybridEPBuffer",
    "PPBuffer",
    "__version__",
    "comm",
    "destroy_all_managed_nccl_comm",
    "get_logical_domain_size",
    "get_low_latency_rdma_size_hint",
    "get_num_allocation_alignment",
    "get_num_rdma_alignment",
    "get_num_tma_alignment",
    "get_physical_domain_size",
    "is_sm90_compiled",
    "topk_idx_t",
]
