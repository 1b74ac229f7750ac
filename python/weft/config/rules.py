# SPDX-License-Identifier: Apache-2.0
"""Which rules hold where, in the order in which the references check them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from . import rules_advice as advice
from . import rules_overlap as overlap
from . import rules_sharding as sharding
from . import rules_wgrad as wgrad
from .settings import option

_MODEL_OVERLAP = (
    overlap.torch_version,
    overlap.virtual_pipeline,
    overlap.expert_parallel,
    overlap.dispatcher,
    overlap.full_recompute,
    overlap.recompute_method,
    overlap.recompute_layers,
    overlap.recompute_moe,
    overlap.half_precision,
    overlap.shared_experts,
    overlap.mtp_layers,
    overlap.offloading,
    overlap.graph_scope,
)

_USER_OVERLAP = (
    overlap.expert_parallel_b,
    overlap.experts,
    overlap.dispatcher_b,
    overlap.half_precision_b,
    overlap.torch_version,
    overlap.virtual_pipeline,
    overlap.full_recompute,
    overlap.recompute_method,
    overlap.recompute_layers,
    overlap.recompute_moe,
    overlap.shared_experts,
    overlap.mtp_layers,
)


def validate_model_overlap(model_config: Any) -> None:
    """Rules 1 to 16, 23 and 24, as Megatron-LM's model configuration has them.

    Raises AssertionError with the text of the first rule that is broken. Rank 0 logs a warning for
    ncclep with zero copy.
    """
    has_overlap = option(model_config, "overlap_moe_expert_parallel_comm")
    if has_overlap:
        for rule in _MODEL_OVERLAP:
            rule(model_config)
    wgrad.needs_overlap(model_config)
    if option(model_config, "delay_wgrad_compute"):
        wgrad.partial_graph(model_config)
    wgrad.staged_dispatch_backward(model_config)
    overlap.early_release(model_config)
    if has_overlap:
        advice.zero_copy(model_config)


def validate_overlap_arguments(args: Any) -> None:
    """Rules 17 to 22, as Megatron-LM's command line has them.

    Raises AssertionError with the text of the first rule that is broken. Rank 0 logs a warning for
    tensor or context parallelism beside the overlap on GPUs older than Blackwell.
    """
    if option(args, "overlap_moe_expert_parallel_comm"):
        advice.device_connections(args)
    if not option(args, "delay_wgrad_compute"):
        return
    wgrad.implementation(args)
    if option(args, "overlap_grad_reduce"):
        wgrad.grad_reduce(True)
        wgrad.graph_te_version(args)
        wgrad.graph_accumulation(args)
        wgrad.graph_bias(args)
    wgrad.unfused_accumulation(args)


def validate_user_overlap(user: Any, model_config: Any, ddp_config: Any = None) -> None:
    """The rules of Megatron-Bridge for the user's values `user`, which count where they are True.

    With Megatron-FSDP also those of `validate_sharded_overlap`, which would refuse the model later.
    Raises AssertionError with the text of the first rule that is broken; TypeError where
    num_moe_experts is None; ValueError as `validate_sharded_overlap`.
    """
    if option(user, "overlap_moe_expert_parallel_comm") is True:
        for rule in _USER_OVERLAP:
            rule(model_config)
        if _is_sharded(ddp_config):
            _sharded_overlap(model_config, ddp_config)
    if option(user, "delay_wgrad_compute") is True:
        _delayed_wgrad(user, model_config, ddp_config)


def _delayed_wgrad(user: Any, model: Any, ddp: Any) -> None:
    has_grad_reduce = option(ddp, "overlap_grad_reduce") or option(user, "overlap_grad_reduce")
    wgrad.grad_reduce_b(has_grad_reduce)
    wgrad.fused_accumulation_b(model)
    wgrad.needs_overlap_b(user, model)
    wgrad.graph_te_version(model)
    wgrad.graph_accumulation(model)
    wgrad.graph_bias_b(model)
    # Where the references disagree about a version, the newer one's rule holds as well. Last, so
    # that what Bridge refuses is refused with Bridge's words.
    wgrad.grad_reduce(has_grad_reduce)
    wgrad.unfused_accumulation(model)
    if _is_sharded(ddp):
        sharding.delayed_wgrad(ddp)


def validate_delayed_linear(model_config: Any) -> None:
    """Before Transformer Engine's linear layers are built with delayed weight gradients.

    Raises RuntimeError where it is older than 2.3.0 or absent.
    """
    if option(model_config, "delay_wgrad_compute"):
        wgrad.linear_te_version(model_config)


def validate_sharded_overlap(
    model_config: Any, ddp_config: Any, fsdp_unit_modules: Sequence[type] | None = None
) -> None:
    """Before Megatron-FSDP wraps a model, as its adapter and the interleaved schedule have it.

    Nothing is checked without ddp_config.use_megatron_fsdp. fsdp_unit_modules: see
    `rules_sharding.unit_modules`.
    Raises AssertionError with the text of the first rule that is broken; ValueError for version 2
    with delayed weight gradients.
    """
    if not _is_sharded(ddp_config):
        return
    if option(model_config, "delay_wgrad_compute"):
        sharding.delayed_wgrad(ddp_config)
    if option(model_config, "overlap_moe_expert_parallel_comm"):
        _sharded_overlap(model_config, ddp_config)
        sharding.unit_modules(ddp_config, fsdp_unit_modules)


def _is_sharded(ddp: Any) -> bool:
    return bool(getattr(ddp, "use_megatron_fsdp", False))


def _sharded_overlap(model: Any, ddp: Any) -> None:
    sharding.double_buffer(ddp)
    sharding.graphs(model)
    sharding.interleaved(True, option(model, "virtual_pipeline_model_parallel_size"))


def validate_overlap_schedule(checkpoint_activations_microbatch: Any = None) -> None:
    """Rule 25, before an overlapped step. Raises AssertionError."""
    overlap.checkpointed_microbatch(checkpoint_activations_microbatch)


def validate_graph_replay(model_config: Any, has_captured_mlp: bool) -> None:
    """Rule 26, before a captured layer is replayed. Raises AssertionError.

    has_captured_mlp: the graph holds the whole MLP or MoE part, as it does where no modules to
    capture are named, which rule 14 cannot see.
    """
    overlap.graph_replay(model_config, has_captured_mlp)
