# SPDX-License-Identifier: Apache-2.0
"""Every environment variable of the libraries that Weft stands for, in one place.

docs/compat.md says what each does here. An empty variable counts as not set.
"""

import os

from weft import InvalidArgument

HONOURED = (
    "DEEP_EP_SM_NUMS",
    "EP_NIC_NAME",
    "LOCAL_WORLD_SIZE",
    "NCCL_IB_HCA",
    "NUM_OF_HYBRID_EP_RANKS_PER_NVLINK_DOMAIN",
    "NVSHMEM_QP_DEPTH",
    "UCCL_EP_CPU_TIMEOUT_SECS",
    "UCCL_EP_SM_NUMS",
    "UCCL_EP_TRANSPORT",
    "UCCL_IB_HCA",
    "UCCL_SOCKET_IFNAME",
)
WITHOUT_EFFECT = (
    "EP_AVOID_RECORD_STREAM",
    "EP_BUFFER_DEBUG",
    "EP_NUM_MAX_LOCAL_RANKS",
    "EP_OVERRIDE_RDMA_SL",
    "EP_SUPPRESS_NCCL_CHECK",
    "HYBRID_EP_CACHE_DIR",
    "LOCAL_RANK",
    "NUM_OF_TOKENS_PER_CHUNK_COMBINE_API",
    "NUM_OF_TOKENS_PER_CHUNK_DISPATCH_API",
    "NUM_OF_TOKENS_PER_CHUNK_PREPROCESSING_API",
    "UCCL_ATOMICS_USE_HOST_MEMORY",
    "UCCL_EP_DISABLE_CPU_AFFINITY",
    "UCCL_EP_ENABLE_AGGRESSIVE_ATOMIC",
    "UCCL_IB_GID_INDEX",
    "UCCL_IB_MAX_INFLIGHT_BYTES",
    "UCCL_IB_MAX_INFLIGHT_LOW_LATENCY",
    "UCCL_IB_MAX_INFLIGHT_NORMAL",
    "UCCL_IB_SL",
    "UCCL_IB_TC",
    "UCCL_RDMA_ADAPTIVE_SLEEP",
    "UCCL_UDP_SPORT_BASE",
    "WORLD_SIZE",
)


def text(*names: str) -> str | None:
    """The value of the first of `names`, which are honoured, that is set."""
    for name in names:
        assert name in HONOURED, name
        value = os.environ.get(name)
        if value:
            return value
    return None


def number(*names: str, default: int, least: int = 1) -> int:
    """The same as a whole number of at least that. Raises InvalidArgument naming the variable."""
    value = text(*names)
    if value is None:
        return default
    if not (value.isascii() and value.isdecimal() and int(value) >= least):
        name = next(name for name in names if text(name) == value)
        raise InvalidArgument(
            f"environment: {name} = '{value}' (expected a number of at least {least})"
        )
    return int(value)
