# SPDX-License-Identifier: Apache-2.0
"""Which rules hold where, in the order in which the references check them."""

from __future__ import annotations

from typing import Any

from . import rules_overlap as overlap
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

    Raises AssertionError with the text of the first rule that is broken.
    """
    if option(model_config, "overlap_moe_expert_parallel_comm"):
        for rule in _MODEL_OVERLAP:
            rule(model_config)
    wgrad.needs_overlap(model_config)
    if option(model_config, "delay_wgrad_compute"):
        wgrad.partial_graph(model_config)
    wgrad.staged_dispatch_backward(model_config)
    overlap.early_release(model_config)


def validate_overlap_arguments(args: Any) -> None:
    """Rules 17 to 22, as Megatron-LM's command line has them.

    Raises AssertionError with the text of the first rule that is broken.
    """
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

    Raises AssertionError with the text of the first rule that is broken; TypeError where
    num_moe_experts is None.
    """
    if option(user, "overlap_moe_expert_parallel_comm") is True:
        for rule in _USER_OVERLAP:
            rule(model_config)
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


def validate_overlap_schedule(checkpoint_activations_microbatch: Any = None) -> None:
    """Rule 25, before an overlapped step. Raises AssertionError."""
    overlap.checkpointed_microbatch(checkpoint_activations_microbatch)


def validate_graph_replay(model_config: Any, has_captured_mlp: bool) -> None:
    """Rule 26, before a captured layer is replayed. Raises AssertionError.

    has_captured_mlp: the graph holds the whole MLP or MoE part, as it does where no modules to
    capture are named, which rule 14 cannot see.
    """
    overlap.graph_replay(model_config, has_captured_mlp)
