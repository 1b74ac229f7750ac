# SPDX-License-Identifier: Apache-2.0
"""The communication settings that follow from the parallel layout, before the user's values."""

from __future__ import annotations

import logging
from dataclasses import asdict, is_dataclass
from importlib.util import find_spec
from typing import Any

from .settings import option

logger = logging.getLogger(__name__)

_BUCKET_SIZE = 128 * 1024 * 1024  # parameters


def tensor_parallel(user: Any, model: Any) -> dict[str, Any]:
    """The overlap of tensor-parallel communication: off, with a warning, where it cannot work."""
    is_on = bool(user.tp_comm_overlap)
    obstacle = _tensor_parallel_obstacle(model) if is_on else None
    if obstacle:
        logger.warning("Disabling tensor parallel communication overlap due to %s.", obstacle)
        is_on = False
    if is_on and user.tp_comm_overlap_cfg is None:
        logger.warning("tp_comm_overlap: no configuration is given, Transformer Engine's is used.")
    return {
        "tp_comm_overlap": is_on,
        "tp_comm_overlap_cfg": _as_dict(user.tp_comm_overlap_cfg) if is_on else None,
        "tp_comm_bootstrap_backend": user.tp_comm_bootstrap_backend,
    }


def _tensor_parallel_obstacle(model: Any) -> str | None:
    if option(model, "tensor_model_parallel_size") < 2:
        return "TP size < 2"
    if not option(model, "sequence_parallel"):
        return "sequence_parallel=False"
    if find_spec("transformer_engine") is None:
        return "TE not detected"
    return None


def _as_dict(config: Any) -> Any:
    """Transformer Engine takes a dict without the entries that are None."""
    if not is_dataclass(config):
        return config
    return {name: value for name, value in asdict(config).items() if value is not None}


def pipeline_parallel(model: Any) -> dict[str, Any]:
    """Messages between stages overlap where chunks interleave, and are batched elsewhere."""
    has_pipeline = option(model, "pipeline_model_parallel_size") > 1
    is_interleaved = _num_chunks(model) > 1
    return {
        "overlap_p2p_comm": has_pipeline and is_interleaved,
        "batch_p2p_comm": has_pipeline and not is_interleaved,
    }


def data_parallel(data_parallel_size: int, model: Any) -> dict[str, Any]:
    """Gradients and parameters travel in buckets while the backward runs, given several ranks."""
    is_parallel = data_parallel_size > 1
    has_chunks = option(model, "pipeline_model_parallel_size") > 1 and _num_chunks(model) > 1
    return {
        "bucket_size": _BUCKET_SIZE if is_parallel else None,
        "overlap_grad_reduce": is_parallel,
        "overlap_param_gather": is_parallel,
        "overlap_param_gather_with_optimizer_step": False,
        "align_param_gather": is_parallel and has_chunks,
    }


def _num_chunks(model: Any) -> int:
    return option(model, "virtual_pipeline_model_parallel_size") or 1
