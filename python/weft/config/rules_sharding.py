# SPDX-License-Identifier: Apache-2.0
"""What the overlap goes with when fully sharded data parallelism gathers the parameters.

Megatron-LM's rules, with the beginning of its texts. Each function supposes that the overlap and
Megatron-FSDP are on, and raises AssertionError unless it says otherwise.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from weft.dispatcher.checks import expect

from .settings import option

# The layers whose pieces a plan runs: it can gather what these hold.
UNIT_MODULES = ("TransformerLayer", "MoETransformerLayer", "MambaLayer")


def double_buffer(ddp: Any) -> None:
    """No double buffer: two micro-batches hold parameters of several layers at a time."""
    expect(
        not getattr(ddp, "fsdp_double_buffer", False),
        "1F1B overlap with FSDP does not support double buffer. "
        "Please set fsdp_double_buffer=False in the ddp config.",
    )


def graphs(config: Any) -> None:
    """CUDA graphs of a whole iteration or none."""
    kind = option(config, "cuda_graph_impl")
    expect(
        kind in ("none", "full_iteration"),
        "1F1B overlap with FSDP does not support per-layer CUDA graphs "
        f"(cuda_graph_impl={kind!r}, expected 'none' or 'full_iteration').",
    )


def unit_modules(ddp: Any, units: Sequence[type] | None) -> None:
    """Where parameters are sharded too, the units are layers that plans know.

    units: classes, told by their names; None: Megatron-FSDP's own choice, which is good.
    """
    is_sharded = getattr(ddp, "data_parallel_sharding_strategy", "") == "optim_grads_params"
    if not is_sharded or units is None:
        return
    names = [unit.__name__ for unit in units]
    expect(
        bool(names) and set(names) <= set(UNIT_MODULES),
        "EP overlap with FSDP currently requires fsdp_unit_modules to contain only supported "
        f"MCore modules {list(UNIT_MODULES)}, got {names}.",
    )


def delayed_wgrad(ddp: Any) -> None:
    """Version 2 reduces gradients in its backward. Raises ValueError with delayed ones."""
    if getattr(ddp, "megatron_fsdp_version", 1) == 2:
        raise ValueError("MFSDP v2 does not currently support delay_wgrad_compute.")


def interleaved(is_sharded: bool, num_chunks: int | None) -> None:
    """One model chunk on each rank."""
    expect(
        not is_sharded or (num_chunks or 1) <= 1,
        "EP overlap 1F1B with FSDP is not supported for interleaved pipeline parallelism "
        f"(virtual_pipeline_model_parallel_size > 1), but got {num_chunks} chunks.",
    )
