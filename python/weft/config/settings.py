# SPDX-License-Identifier: Apache-2.0
"""The model settings that the overlap rules read, under Megatron-LM's names.

The rules take any object that has (some of) these attributes, Megatron's own configuration
included: what it lacks has the default that is written here.
"""

import logging
import os
from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Any

import torch

from weft.dispatcher.config import Settings


@dataclass
class OverlapModelConfig:
    """Names and defaults of Megatron-LM, for use without Megatron-LM."""

    # Communication overlap.
    overlap_moe_expert_parallel_comm: bool = False
    delay_wgrad_compute: bool = False
    overlap_dispatch_backward_with_experts_wgrad: bool = False
    ep_overlap_early_attn_memory_release: bool = False
    high_priority_a2a_comm_stream: bool = False
    overlap_grad_reduce: bool = False  # among Megatron's arguments; DDP's setting otherwise
    tp_comm_overlap: bool = False
    tp_comm_overlap_cfg: dict | None = None
    tp_comm_bootstrap_backend: str = "nccl"
    overlap_p2p_comm: bool = False
    batch_p2p_comm: bool = True
    defer_embedding_wgrad_compute: bool = False
    wgrad_deferral_limit: int = 0

    # Parallelism.
    tensor_model_parallel_size: int = 1
    pipeline_model_parallel_size: int = 1
    virtual_pipeline_model_parallel_size: int | None = None
    context_parallel_size: int = 1
    expert_model_parallel_size: int = 1
    sequence_parallel: bool = False

    # Experts.
    num_moe_experts: int | None = None
    moe_token_dispatcher_type: str = "allgather"
    moe_flex_dispatcher_backend: str | None = "deepep"
    moe_ncclep_zero_copy: bool = False
    moe_shared_expert_overlap: bool = False
    moe_shared_expert_intermediate_size: int | None = None

    # What else the overlap has to live with.
    bf16: bool = False
    fp16: bool = False
    recompute_granularity: str | None = None
    recompute_method: str | None = None
    recompute_num_layers: int | None = None
    recompute_modules: list[str] | None = None
    mtp_num_layers: int | None = None
    offload_modules: list[str] | None = None
    transformer_impl: str = "transformer_engine"
    gradient_accumulation_fusion: bool = False
    add_bias_linear: bool = True
    add_qkv_bias: bool = False
    cuda_graph_impl: str = "none"
    cuda_graph_modules: str | list | None = None
    cuda_graph_scope: str | list | None = None  # the older name


_DEFAULTS = {f.name: f.default for f in fields(OverlapModelConfig)}


def option(config: Any, name: str) -> Any:
    """The setting `name` of `config`, or its default where `config` has no such attribute."""
    return getattr(config, name, _DEFAULTS[name])


def settings_of(config: Any) -> Settings:
    """All of them as attributes."""
    return Settings(config, _DEFAULTS)


def graph_modules(config: Any) -> set[str]:
    """Names of the modules that CUDA graphs capture, from the newer and the older setting.

    Either may be a text with commas, an enumerator, or a list of both.
    """
    found: set[str] = set()
    for name in ("cuda_graph_modules", "cuda_graph_scope"):
        value = option(config, name)
        if value is None:
            continue
        is_list = isinstance(value, Iterable) and not isinstance(value, str)
        for entry in value if is_list else [value]:
            found.update(_names(entry))
    return found


def _names(entry: Any) -> list[str]:
    """["attn"] for "attn", for an enumerator called attn, and for that enumerator as a text."""
    text = entry if isinstance(entry, str) else getattr(entry, "name", str(entry))
    return [part.strip().rsplit(".", 1)[-1] for part in text.split(",") if part.strip()]


def warn_on_rank_0(logger: logging.Logger, text: str) -> None:
    """Logs `text` on rank 0 of the default process group, or of RANK where there is none."""
    if _rank() == 0:
        logger.warning(text)


def _rank() -> int:
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank()
    return int(os.environ.get("RANK", "0"))
