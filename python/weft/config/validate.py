# SPDX-License-Identifier: Apache-2.0
"""Checks of the rules in rules.py: one function for each place where a reference checks them."""

import logging
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from weft.dispatcher.config import DispatcherConfig, Settings, expect, option

from . import process, rules
from .process import warn_on_rank_0
from .rules import DELAY, OVERLAP

logger = logging.getLogger(__name__)

_BLACKWELL = 10  # major number of the first GPUs whose queues do not depend on the setting

# Pieces that may be recomputed, each inside one node.
RECOMPUTABLE = ("core_attn", "layernorm", "moe_act", "mla_up_proj", "mlp", "shared_experts")

# Classes of Megatron-FSDP and of PyTorch's fully_shard, whichever of their versions.
_SHARDED = {"MegatronFSDP", "FSDPModule"}

# Layers whose pieces a plan runs, and whose parameters it can gather.
UNIT_MODULES = ("TransformerLayer", "MoETransformerLayer", "MambaLayer")


def validate_model_overlap(model_config: Any) -> None:
    """Checks rules 1 to 16, 23 and 24, as Megatron-LM's model configuration does.

    Raises AssertionError with the text of the first rule that is broken. Rank 0 logs a warning for
    ncclep with zero copy.
    """
    has_overlap = option(model_config, OVERLAP)
    if has_overlap:
        rules.check(rules.MODEL_OVERLAP, model_config)
    rules.needs_overlap(model_config)
    if option(model_config, DELAY):
        rules.partial_graph(model_config)
    rules.staged_dispatch_backward(model_config)
    rules.early_release(model_config)
    if has_overlap and rules.is_ncclep(Settings(model_config)):
        # ncclep receives into its own buffer, where the schedule's gradients are not yet.
        if option(model_config, "moe_ncclep_zero_copy"):
            warn_on_rank_0(
                logger,
                f"moe_ncclep_zero_copy with {OVERLAP}: each backward of a dispatch first copies "
                "its gradient into the communication buffer.",
            )


def validate_overlap_arguments(args: Any) -> None:
    """Checks rules 17 to 22, like Megatron-LM's command line.

    Raises AssertionError with the text of the first rule that is broken. Rank 0 logs a warning for
    tensor or context parallelism beside the overlap on GPUs older than Blackwell.
    """
    if option(args, OVERLAP):
        _advise_device_connections(args)
    if not option(args, DELAY):
        return
    rules.implementation(args)
    if option(args, "overlap_grad_reduce"):
        rules.check(
            (rules.grad_reduce, rules.graph_te_version, rules.graph_accumulation, rules.graph_bias),
            args,
        )
    rules.unfused_accumulation(args)


def validate_user_overlap(user: Any, model_config: Any, ddp_config: Any = None) -> None:
    """Checks Megatron-Bridge's rules for the user's values `user`, where these are True.

    With Megatron-FSDP also `validate_sharded_overlap`, which would refuse the model later.
    Raises AssertionError with the text of the first rule that is broken; TypeError where
    num_moe_experts is None; ValueError as `validate_sharded_overlap`.
    """
    if option(user, OVERLAP) is True:
        rules.check(rules.USER_OVERLAP, model_config)
        if _is_sharded(ddp_config):
            _sharded_overlap(model_config, ddp_config)
    if option(user, DELAY) is True:
        _delayed_wgrad(user, model_config, ddp_config)


def _delayed_wgrad(user: Any, model: Any, ddp: Any) -> None:
    has_grad_reduce = option(ddp, "overlap_grad_reduce") or option(user, "overlap_grad_reduce")
    if has_grad_reduce:
        rules.grad_reduce_b(model)
    rules.fused_accumulation_b(model)
    # Rule 15b: the overlap may be the user's setting or the model's.
    expect(option(model, OVERLAP) or option(user, OVERLAP), f"{OVERLAP} is required for {DELAY}")
    rules.check(
        (rules.graph_te_version, rules.graph_accumulation, rules.graph_bias.of_bridge), model
    )
    # Where the references disagree about a version, the newer one's rule holds as well. It comes
    # last, so that what Bridge refuses is refused with Bridge's words.
    if has_grad_reduce:
        rules.grad_reduce(model)
    rules.unfused_accumulation(model)
    if _is_sharded(ddp):
        _sharded_wgrad(ddp)


def validate_delayed_linear(model_config: Any) -> None:
    """Checks Transformer Engine before linear layers with delayed gradients are built.

    Raises RuntimeError if it is older than 2.3.0 or absent. Other implementations delay what they
    can: `weft.overlap.DelayedLinear` needs no Transformer Engine.
    """
    is_te = option(model_config, "transformer_impl") == "transformer_engine"
    if option(model_config, DELAY) and is_te and not process.is_te_min_version("2.3.0"):
        raise RuntimeError(f"Only TE with version >=2.3.0 supports {DELAY} now.")


def validate_sharded_overlap(
    model_config: Any, ddp_config: Any, fsdp_unit_modules: Sequence[type] | None = None
) -> None:
    """Checks, before Megatron-FSDP wraps a model, the rules of its adapter and of the interleaved
    schedule.

    Checks nothing without ddp_config.use_megatron_fsdp. fsdp_unit_modules: classes, compared by
    name, which must be layers that plans know if parameters are sharded, too; None is Megatron-
    FSDP's own choice, which is good.
    Raises AssertionError with the text of the first rule that is broken; ValueError for version 2
    with delayed weight gradients.
    """
    if not _is_sharded(ddp_config):
        return
    if option(model_config, DELAY):
        _sharded_wgrad(ddp_config)
    if option(model_config, OVERLAP):
        _sharded_overlap(model_config, ddp_config)
        strategy = getattr(ddp_config, "data_parallel_sharding_strategy", "")
        if strategy != "optim_grads_params" or fsdp_unit_modules is None:
            return
        names = [unit.__name__ for unit in fsdp_unit_modules]
        expect(
            bool(names) and set(names) <= set(UNIT_MODULES),
            "EP overlap with FSDP currently requires fsdp_unit_modules to contain only supported "
            f"MCore modules {list(UNIT_MODULES)}, got {names}.",
        )


def check_overlap(config: Any) -> None:
    """Raises AssertionError for settings that a plan cannot serve, ValueError for unknown pieces to
    recompute.

    Recomputing all of a layer, or of its experts' part, would repeat exchanges in a backward that
    the other ranks do not repeat at the same place.
    """
    rules.full_recompute(config)
    rules.recompute_method(config)
    rules.recompute_layers(config)
    check_recompute(option(config, "recompute_modules") or ())
    rules.shared_experts(config)


def check_recompute(modules: Iterable[str]) -> None:
    """Raises AssertionError for "moe", ValueError for other pieces not inside one node."""
    rules.recompute_moe(DispatcherConfig(recompute_modules=list(modules)))
    unknown = sorted(set(modules) - set(RECOMPUTABLE))
    if unknown:
        raise ValueError(f"recompute_modules: {unknown} (expected some of {RECOMPUTABLE})")


def check_interleaved(model: Any, num_chunks: int) -> None:
    """Raises AssertionError for several chunks on a rank, if fully sharded data parallelism gathers
    the parameters of `model`: its hooks know one chunk."""
    if num_chunks > 1:
        names = {base.__name__ for part in model.modules() for base in type(part).__mro__}
        rules.interleaved(not names.isdisjoint(_SHARDED), num_chunks)


def validate_overlap_schedule(checkpoint_activations_microbatch: Any = None) -> None:
    """Rule 25, before an overlapped step: no activation checkpointing chosen for each micro-batch.

    Raises AssertionError.
    """
    expect(
        checkpoint_activations_microbatch is None,
        f"checkpoint_activations_microbatch is not supported for {OVERLAP}",
    )


def validate_graph_replay(model_config: Any, has_captured_mlp: bool) -> None:
    """Rule 26, before a captured layer is replayed. Raises AssertionError.

    has_captured_mlp: the graph holds the whole MLP or MoE part and so hides its exchanges, as it
    does where no modules to capture are named, which rule 14 cannot see.
    """
    expect(
        not (option(model_config, OVERLAP) and has_captured_mlp),
        "EP overlap must be disabled when CUDA graph captures the whole MLP/MoE part.",
    )


def _is_sharded(ddp: Any) -> bool:
    return bool(getattr(ddp, "use_megatron_fsdp", False))


def _sharded_overlap(model: Any, ddp: Any) -> None:
    # Two micro-batches hold parameters of several layers at a time.
    expect(
        not getattr(ddp, "fsdp_double_buffer", False),
        "1F1B overlap with FSDP does not support double buffer. "
        "Please set fsdp_double_buffer=False in the ddp config.",
    )
    rules.sharded_graphs(model)
    rules.interleaved(True, option(model, "virtual_pipeline_model_parallel_size"))


def _sharded_wgrad(ddp: Any) -> None:
    # Version 2 reduces gradients in its backward.
    if getattr(ddp, "megatron_fsdp_version", 1) == 2:
        raise ValueError("MFSDP v2 does not currently support delay_wgrad_compute.")


def _advise_device_connections(config: Any) -> None:
    """Warns of tensor or context parallelism on Hopper and older GPUs, unless the parameters are
    sharded.

    Such parallelism wants CUDA_DEVICE_MAX_CONNECTIONS=1, the overlap more. Does not warn without
    CUDA, since the configuration may be made on another machine.
    """
    c = Settings(config)
    is_parallel = max(c.tensor_model_parallel_size, c.context_parallel_size) > 1
    is_sharded = _is_sharded(config) or getattr(config, "use_torch_fsdp2", False)
    if not is_parallel or is_sharded or not torch.cuda.is_available():
        return
    if torch.cuda.get_device_properties(0).major < _BLACKWELL:
        warn_on_rank_0(
            logger,
            "For Hopper and before, try not to use tensor model parallelism or context parallelism "
            f"with {OVERLAP}: the former is fastest with CUDA_DEVICE_MAX_CONNECTIONS=1, the "
            "latter with a larger number. With both, set 1 or 32, after what matters more.",
        )
