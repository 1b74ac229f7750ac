# SPDX-License-Identifier: Apache-2.0
"""The interface of DeepEP, on Weft.

`weft.compat.install()` makes `import deep_ep` mean this package.
"""

import torch

from .buffer import Buffer
from .config import Config, get_low_latency_rdma_size_hint
from .elastic import ElasticBuffer, EPHandle
from .hybrid_ep import HybridEPBuffer
from .utils.envs import get_logical_domain_size, get_physical_domain_size
from .utils.event import EventHandle, EventOverlap

__version__ = "2.1.0"  # the last with all of these classes
topk_idx_t = torch.int64
is_sm90_compiled = Buffer.is_sm90_compiled

__all__ = [
    "Buffer",
    "Config",
    "EPHandle",
    "ElasticBuffer",
    "EventHandle",
    "EventOverlap",
    "HybridEPBuffer",
    "__version__",
    "get_logical_domain_size",
    "get_low_latency_rdma_size_hint",
    "get_physical_domain_size",
    "is_sm90_compiled",
    "topk_idx_t",
]
