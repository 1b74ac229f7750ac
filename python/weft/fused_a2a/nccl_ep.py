# SPDX-License-Identifier: Apache-2.0
"""The names of the NCCL EP backend, which Weft does not offer: callers import before they ask."""

from typing import Any, NoReturn

HAVE_TE_EP: bool = False
alloc_ep_symm_buffer = new_nccl_ep_buffer = nccl_ep_dispatch = nccl_ep_combine = None


def ensure_nccl_ep_bootstrapped(*_args: Any, **_settings: Any) -> NoReturn:
    """RuntimeError: this backend belongs to Transformer Engine."""
    raise RuntimeError(
        "ensure_nccl_ep_bootstrapped: NCCL EP is not available (it needs Transformer Engine built "
        "with NVTE_BUILD_WITH_NCCL_EP=1; hybrid_ep_dispatch gives the same rows)"
    )


def is_nccl_ep_bootstrapped() -> bool:
    """False."""
    return False


def nccl_ep_finalize() -> None:
    """Nothing: there is nothing to end."""
