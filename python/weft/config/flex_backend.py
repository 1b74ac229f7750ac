# SPDX-License-Identifier: Apache-2.0
"""Chooses the backend of the flex dispatcher, and checks that the GPU of this process can run it.

The rules are those of Megatron-Bridge 0.7.0. Until 0.6.1 the choice asked the GPU, and fell back to
alltoall with a warning; now a backend is never replaced by another dispatcher.
"""

import logging
from typing import Any

import torch

from .process import warn_on_rank_0

logger = logging.getLogger(__name__)

_BACKENDS = ("deepep", "hybridep", "ncclep")
_GPUS = {
    "deepep": "DeepEP is supported for Ampere, Hopper, and Blackwell (B200/B300) GPUs",
    "hybridep": "HybridEP is supported for GB200, GB300 with NVL72 and for Ampere, Hopper, B200 "
    "and B300 GPUs",
    "ncclep": "NCCL EP is supported for Hopper and Blackwell GPUs",
}
_DEEPEP_NAMES = ("NVIDIA B200", "NVIDIA B300")
_ALLTOALL = "moe_token_dispatcher_type='alltoall' and moe_flex_dispatcher_backend=None"


def apply_flex_dispatcher_backend(
    model_config: Any, moe_flex_dispatcher_backend: str | None = None
) -> None:
    """Turns on the flex dispatcher with "deepep", "hybridep" or "ncclep"; None: alltoall.

    No GPU is asked: the configuration may be made on another machine. A model without experts stays
    as it is unless the backend is None, and rank 0 logs a warning.

    Raises ValueError for another backend, which changes nothing.
    """
    backend = moe_flex_dispatcher_backend
    if backend is None:
        # alltoall overlaps shared experts as well: that setting stays.
        model_config.moe_token_dispatcher_type = "alltoall"
        model_config.moe_flex_dispatcher_backend = None
        return
    if backend not in _BACKENDS:
        raise ValueError(
            f"moe_flex_dispatcher_backend = {backend!r} "
            f"(expected one of {', '.join(_BACKENDS)}, or None for alltoall)"
        )
    if not getattr(model_config, "num_moe_experts", None):
        warn_on_rank_0(
            logger,
            "Flex dispatcher backends are only applicable to MoE models. num_moe_experts is not "
            "set or is 0, and the dispatcher stays as it is.",
        )
        return
    model_config.moe_token_dispatcher_type = "flex"
    model_config.moe_flex_dispatcher_backend = backend
    model_config.moe_shared_expert_overlap = False


def validate_flex_dispatcher_backend(model_config: Any) -> None:
    """Checks that the GPU of this process can run the backend of the flex dispatcher; changes
    nothing. Other dispatchers are not checked.

    Raises ValueError where the GPU cannot, and for a backend that is not one of those of
    `apply_flex_dispatcher_backend`; what torch raises where the GPU cannot be asked.
    """
    if model_config.moe_token_dispatcher_type != "flex":
        return
    backend = model_config.moe_flex_dispatcher_backend
    if backend not in _BACKENDS:
        raise ValueError(
            f"moe_flex_dispatcher_backend = {backend!r} with moe_token_dispatcher_type = 'flex' "
            f"(expected one of {', '.join(_BACKENDS)}; for alltoall, {_ALLTOALL})"
        )
    gpu = torch.cuda.get_device_properties(0)
    if not _can_run(backend, gpu):
        raise ValueError(
            f"{_GPUS[backend]}. Current GPU: {gpu.name}. Another backend, or {_ALLTOALL}, has to "
            "be set: none is chosen instead."
        )


def _can_run(backend: str, gpu: Any) -> bool:
    if backend == "hybridep":
        return gpu.major in (8, 9, 10)
    if backend == "ncclep":
        return gpu.major in (9, 10)
    # GB200 and GB300 share the major number of B200 and B300: only the name tells them apart.
    return gpu.major in (8, 9) or gpu.name.startswith(_DEEPEP_NAMES)
