# SPDX-License-Identifier: Apache-2.0
"""Rules 1 to 14 and 24 to 26: what the overlap of expert-parallel communication goes with.

Each function raises AssertionError with the text of the reference. "Megatron" is Megatron-LM's
model configuration, "Bridge" is Megatron-Bridge; a "b" marks Bridge's own wording.
"""

from __future__ import annotations

from typing import Any

from weft.dispatcher.checks import expect

from . import versions
from .settings import graph_modules, option

_OVERLAP = "overlap_moe_expert_parallel_comm"
_DISPATCHERS = ("alltoall", "flex")


def torch_version(_config: Any) -> None:
    """Rule 1 (Megatron, Bridge): torch 2.6.0 or newer."""
    expect(
        versions.is_torch_min_version("2.6.0"),
        "A2A Overlap encounters hang issue with torch version < 2.6.0",
    )


def virtual_pipeline(config: Any) -> None:
    """Rule 2 (Megatron, Bridge): pipeline stages need a virtual pipeline size."""
    expect(
        option(config, "pipeline_model_parallel_size") <= 1
        or option(config, "virtual_pipeline_model_parallel_size") is not None,
        "If enabling EP A2A overlap, virtual_pipeline_model_parallel_size must be specified when "
        "pipeline_model_parallel_size > 1",
    )


def expert_parallel(config: Any) -> None:
    """Rule 3 (Megatron): more than one expert-parallel rank."""
    expect(
        option(config, "expert_model_parallel_size") > 1,
        f"{_OVERLAP} is only supported with expert model parallelism",
    )


def expert_parallel_b(config: Any) -> None:
    """Rule 3b (Bridge): as rule 3."""
    expect(
        option(config, "expert_model_parallel_size") > 1,
        f"{_OVERLAP} is only supported when expert_model_parallel_size > 1",
    )


def experts(config: Any) -> None:
    """Rule 4 (Bridge): more than one expert. Raises TypeError where no number is set."""
    count = option(config, "num_moe_experts")
    if count is None:
        raise TypeError(f"{_OVERLAP}: num_moe_experts is None (expected a number > 1)")
    expect(
        count > 1,
        f"{_OVERLAP} is only supported when num_moe_experts > 1, but got {count}",
    )


def dispatcher(config: Any) -> None:
    """Rule 5 (Megatron): a dispatcher that exchanges in two directions."""
    expect(
        option(config, "moe_token_dispatcher_type") in _DISPATCHERS,
        f"{_OVERLAP} is supported with alltoall/flex token dispatcher",
    )


def dispatcher_b(config: Any) -> None:
    """Rule 5b (Bridge): as rule 5."""
    kind = option(config, "moe_token_dispatcher_type")
    expect(
        kind in _DISPATCHERS,
        f"{_OVERLAP} is only supported when moe_token_dispatcher_type == 'alltoall' or 'flex', "
        f"but got {kind}",
    )


def full_recompute(config: Any) -> None:
    """Rule 6 (Megatron main, Bridge): no full recomputation.

    Megatron's dev branch allows it under conditions. Megatron main and Bridge are followed.
    """
    expect(
        option(config, "recompute_granularity") != "full",
        f"disable full recomputation when enabling {_OVERLAP}",
    )


def recompute_method(config: Any) -> None:
    """Rule 7 (Megatron, Bridge): no recomputation method."""
    expect(
        option(config, "recompute_method") is None,
        f"disable recomputation method when enabling {_OVERLAP}",
    )


def recompute_layers(config: Any) -> None:
    """Rule 8 (Megatron, Bridge): no number of recomputed layers."""
    expect(
        option(config, "recompute_num_layers") is None,
        f"recompute_num_layers must be None when enabling {_OVERLAP}",
    )


def recompute_moe(config: Any) -> None:
    """Rule 9 (Megatron, Bridge): no recomputation of the MoE layer. None means no modules."""
    expect(
        "moe" not in (option(config, "recompute_modules") or ()),
        f"disable moe in recompute_modules when enabling {_OVERLAP}",
    )


def half_precision(config: Any) -> None:
    """Rule 10 (Megatron): bf16 or fp16."""
    expect(
        option(config, "bf16") or option(config, "fp16"),
        f"{_OVERLAP} is only supported with bf16 or fp16 model",
    )


def half_precision_b(config: Any) -> None:
    """Rule 10b (Bridge): as rule 10."""
    expect(
        option(config, "bf16") or option(config, "fp16"),
        f"{_OVERLAP} is only supported when using bf16 or fp16 models",
    )


def shared_experts(config: Any) -> None:
    """Rule 11 (Megatron, Bridge): shared experts are not overlapped a second time."""
    expect(
        not option(config, "moe_shared_expert_overlap"),
        f"disable moe_shared_expert_overlap when enabling {_OVERLAP}",
    )


def mtp_layers(config: Any) -> None:
    """Rule 12 (Megatron main, Bridge): None, 0 or 1 layers of multi-token prediction.

    Megatron's dev branch refuses 0. Megatron main and Bridge, which are newer here, are followed.
    """
    expect(
        option(config, "mtp_num_layers") in (None, 0, 1),
        f"MTP supports at most one layer when enabling {_OVERLAP}.",
    )


def offloading(config: Any) -> None:
    """Rule 13 (Megatron): ncclep, and the input of the first expert layer offloaded.

    A configuration without the switch `fine_grained_activation_offloading` counts as offloading
    what it lists.
    """
    is_ncclep = (
        option(config, "moe_token_dispatcher_type") == "flex"
        and option(config, "moe_flex_dispatcher_backend") == "ncclep"
    )
    is_on = getattr(config, "fine_grained_activation_offloading", True)
    expect(
        not (is_ncclep and is_on and "expert_fc1" in (option(config, "offload_modules") or ())),
        f"{_OVERLAP} with ncclep does not support offloading 'expert_fc1': "
        "the rows stay in the communication buffer",
    )


def graph_scope(config: Any) -> None:
    """Rule 14 (Megatron): Transformer Engine's graphs capture neither moe nor mlp."""
    expect(
        option(config, "cuda_graph_impl") != "transformer_engine"
        or not graph_modules(config) & {"moe", "mlp"},
        f"CUDA graph scope on moe and mlp is not supported with {_OVERLAP}",
    )


def early_release(config: Any) -> None:
    """Rule 24 (Megatron): the early release of attention memory is a part of the overlap."""
    expect(
        not option(config, "ep_overlap_early_attn_memory_release") or option(config, _OVERLAP),
        f"{_OVERLAP} must be enabled when enabling ep_overlap_early_attn_memory_release",
    )


def checkpointed_microbatch(checkpoint_activations_microbatch: Any) -> None:
    """Rule 25 (schedule): no activation checkpointing chosen for each micro-batch."""
    expect(
        checkpoint_activations_microbatch is None,
        f"checkpoint_activations_microbatch is not supported for {_OVERLAP}",
    )


def graph_replay(config: Any, has_captured_mlp: bool) -> None:
    """Rule 26 (layer replay): a graph that holds the whole MLP or MoE part hides its exchanges."""
    expect(
        not (option(config, _OVERLAP) and has_captured_mlp),
        "EP overlap must be disabled when CUDA graph captures the whole MLP/MoE part.",
    )
