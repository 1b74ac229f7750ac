# SPDX-License-Identifier: Apache-2.0
"""Settings that work with the overlap but cost time: rank 0 logs a warning, nothing is refused.

The conditions are Megatron-LM's. Each function supposes that the overlap is on.
"""

from __future__ import annotations

import logging
from typing import Any

import torch

from . import rank0
from .settings import option

logger = logging.getLogger(__name__)

_OVERLAP = "overlap_moe_expert_parallel_comm"
_BLACKWELL = 10  # major number of the first GPUs whose queues do not depend on the setting


def device_connections(config: Any) -> None:
    """Tensor or context parallelism on Hopper and older GPUs, unless the parameters are sharded.

    It wants CUDA_DEVICE_MAX_CONNECTIONS=1, the overlap wants more. Silent without CUDA: the
    configuration may be made on another machine.
    """
    is_parallel = max(
        option(config, "tensor_model_parallel_size"), option(config, "context_parallel_size")
    )
    is_sharded = getattr(config, "use_megatron_fsdp", False) or getattr(
        config, "use_torch_fsdp2", False
    )
    if is_parallel <= 1 or is_sharded or not torch.cuda.is_available():
        return
    if torch.cuda.get_device_properties(0).major < _BLACKWELL:
        rank0.warn(
            logger,
            "For Hopper and before, try not to use tensor model parallelism or context parallelism "
            f"with {_OVERLAP}: the former is fastest with CUDA_DEVICE_MAX_CONNECTIONS=1, the "
            "latter with a larger number. With both, set 1 or 32, after what matters more.",
        )


def zero_copy(config: Any) -> None:
    """ncclep that receives into its own buffer: the schedule's gradients are not there yet."""
    is_ncclep = (
        option(config, "moe_token_dispatcher_type") == "flex"
        and option(config, "moe_flex_dispatcher_backend") == "ncclep"
    )
    if is_ncclep and option(config, "moe_ncclep_zero_copy"):
        rank0.warn(
            logger,
            f"moe_ncclep_zero_copy with {_OVERLAP}: each backward of a dispatch first copies its "
            "gradient into the communication buffer.",
        )
