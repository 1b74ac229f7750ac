# SPDX-License-Identifier: Apache-2.0
"""Every environment variable of the libraries that Weft stands for and honours, in one place.

docs/compat.md says what each does here, and lists those without effect. An empty variable counts as
not set.
"""

import os

from weft.errors import BadCall

HONOURED = (
    "DEEP_EP_SM_NUMS",
    "EP_NIC_NAME",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "NCCL_IB_HCA",
    "NUM_OF_HYBRID_EP_RANKS_PER_NVLINK_DOMAIN",
    "NUM_OF_TOKENS_PER_CHUNK_COMBINE_API",
    "NVSHMEM_QP_DEPTH",
    "NVTE_CUTEDSL_FUSED_GROUPED_MLP",
    "RANK",
    "UCCL_EP_CPU_TIMEOUT_SECS",
    "UCCL_EP_SM_NUMS",
    "UCCL_EP_TRANSPORT",
    "UCCL_IB_HCA",
    "UCCL_SOCKET_IFNAME",
    "ULTRA_EP_QUOTA_MIN_TOKENS_PER_REPLICA",
    "WORLD_SIZE",
)


def text(*names: str) -> str | None:
    """Returns the value of the first of `names` (all HONOURED) that is set."""
    for name in names:
        assert name in HONOURED, name
        value = os.environ.get(name)
        if value:
            return value
    return None


def number(*names: str, default: int, least: int = 1) -> int:
    """Returns the value that `text` finds as a whole number, `default` if it finds none. Raises
    InvalidArgument naming the variable if the value is no number of at least `least`."""
    value = text(*names)
    if value is None:
        return default
    if not (value.isascii() and value.isdecimal() and int(value) >= least):
        name = next(name for name in names if text(name) == value)
        raise BadCall(f"environment: {name} = '{value}' (expected a number of at least {least})")
    return int(value)
