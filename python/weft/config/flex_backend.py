# SPDX-License-Identifier: Apache-2.0
"""Chooses the backend of the flex dispatcher that the GPU of this process can run."""

import logging
from typing import Any

import torch

from .process import warn_on_rank_0

logger = logging.getLogger(__name__)

_BACKENDS = ("deepep", "hybridep", "ncclep")
_DEEPEP_GPUS = "Ampere, Hopper, and Blackwell (B200/B300) GPUs"
_NCCLEP_GPUS = "Hopper and Blackwell GPUs"
_HYBRIDEP_GPUS = "GB200, GB300 with NVL72 and for Ampere, Hopper, B200 and B300 GPUs"
_DEEPEP_NAMES = ("NVIDIA B200", "NVIDIA B300")


def apply_flex_dispatcher_backend(
    model_config: Any, moe_flex_dispatcher_backend: str | None = None
) -> None:
    """Turns on the flex dispatcher with "deepep", "hybridep" or "ncclep", where the GPU can run it.

    Where it cannot, the dispatcher becomes "alltoall". A model without experts and another
    backend change nothing. Rank 0 logs a warning in all three cases. Without CUDA any GPU is
    supposed to be good: the configuration may be made on another machine.

    Raises what torch raises where the GPU cannot be asked, for another backend as well.
    """
    backend = moe_flex_dispatcher_backend
    if not getattr(model_config, "num_moe_experts", None):
        warn_on_rank_0(
            logger,
            "DeepEP and HybridEP are only applicable to MoE models. num_moe_experts is not set "
            "or is 0, and the dispatcher stays as it is.",
        )
        return
    has_gpu = torch.cuda.is_available() or backend not in _BACKENDS
    gpu = torch.cuda.get_device_properties(0) if has_gpu else None
    if backend not in _BACKENDS:
        text = (
            "Not a valid flex dispatcher backend. Skipping flex dispatcher backend configuration."
        )
        warn_on_rank_0(logger, text)
    elif gpu is None or _can_run(backend, gpu):
        model_config.moe_token_dispatcher_type = "flex"
        model_config.moe_flex_dispatcher_backend = backend
        model_config.moe_shared_expert_overlap = False
    else:
        text = f"DeepEP is only applicable to {_DEEPEP_GPUS}"
        if backend == "hybridep":
            text = f"HybridEP is only applicable for {_HYBRIDEP_GPUS}"
        elif backend == "ncclep":
            text = f"NCCL EP is only applicable to {_NCCLEP_GPUS}"
        text = f"{text}. Current GPU: {gpu.name}. Falling back to alltoall."
        warn_on_rank_0(logger, text)
        _fall_back(model_config)


def validate_flex_dispatcher_backend(model_config: Any) -> None:
    """Checks that the GPU can run the backend of the flex dispatcher.

    The flex dispatcher without a backend becomes "alltoall". Other dispatchers and backends are
    not checked.

    Raises ValueError where the GPU cannot run it; what torch raises where it cannot be asked.
    """
    if model_config.moe_token_dispatcher_type != "flex":
        return
    backend = model_config.moe_flex_dispatcher_backend
    if backend is None:
        _fall_back(model_config)
    if backend not in _BACKENDS:
        return
    gpu = torch.cuda.get_device_properties(0)
    if not _can_run(backend, gpu):
        texts = {
            "deepep": f"DeepEP is supported for {_DEEPEP_GPUS}. Current GPU: {gpu.name}",
            "hybridep": f"HybridEP is supported for {_HYBRIDEP_GPUS}",
            "ncclep": f"NCCL EP is supported for {_NCCLEP_GPUS}. Current GPU: {gpu.name}",
        }
        raise ValueError(texts[backend])


def _can_run(backend: str, gpu: Any) -> bool:
    if backend == "hybridep":
        return gpu.major in (8, 9, 10)
    if backend == "ncclep":
        return gpu.major in (9, 10)
    # GB200 and GB300 share the major number of B200 and B300: only the name tells them apart.
    return gpu.major in (8, 9) or gpu.name.startswith(_DEEPEP_NAMES)


def _fall_back(model_config: Any) -> None:
    # alltoall overlaps shared experts as well: that setting stays.
    model_config.moe_token_dispatcher_type = "alltoall"
    model_config.moe_flex_dispatcher_backend = None
