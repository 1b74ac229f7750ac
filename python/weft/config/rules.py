# SPDX-License-Identifier: Apache-2.0
"""What the overlap of expert-parallel communication goes with, and which rules hold where.

A rule is what must hold of the settings and the reference's text for the case that it does not.
Calling it with a configuration raises AssertionError with that text. "Megatron" is Megatron-LM's
model configuration, "arguments" its command line and "Bridge" Megatron-Bridge. A "b" marks
Bridge's own version of a rule. Where the references disagree, a comment says which is followed.
"""

import logging
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from weft.dispatcher.config import Settings, expect

from . import versions
from .settings import graph_modules, option, settings_of, warn_on_rank_0

logger = logging.getLogger(__name__)

_OVERLAP = "overlap_moe_expert_parallel_comm"
_DELAY = "delay_wgrad_compute"
_STAGED = "overlap_dispatch_backward_with_experts_wgrad"
_BLACKWELL = 10  # major number of the first GPUs whose queues do not depend on the setting

# The layers whose pieces a plan runs: it can gather the parameters that these hold.
UNIT_MODULES = ("TransformerLayer", "MoETransformerLayer", "MambaLayer")


class Rule(NamedTuple):
    """`text` may name settings, like {c.num_moe_experts}, and the version {te}."""

    holds: Callable[[Settings], Any]
    text: str

    def __call__(self, config: Any) -> None:
        c = settings_of(config)
        if not self.holds(c):
            raise AssertionError(self.text.format(c=c, te=versions.get_te_version()))


def _te(minimum: str) -> bool:
    return versions.is_te_min_version(minimum)


def _is_ncclep(c: Settings) -> bool:
    return c.moe_token_dispatcher_type == "flex" and c.moe_flex_dispatcher_backend == "ncclep"


# Rule 1 (Megatron, Bridge).
torch_version = Rule(
    lambda c: versions.is_torch_min_version("2.6.0"),
    "A2A Overlap encounters hang issue with torch version < 2.6.0",
)
# Rule 2 (Megatron, Bridge).
virtual_pipeline = Rule(
    lambda c: (
        c.pipeline_model_parallel_size <= 1 or c.virtual_pipeline_model_parallel_size is not None
    ),
    "If enabling EP A2A overlap, virtual_pipeline_model_parallel_size must be specified when "
    "pipeline_model_parallel_size > 1",
)
# Rules 3 (Megatron) and 3b.
expert_parallel = Rule(
    lambda c: c.expert_model_parallel_size > 1,
    f"{_OVERLAP} is only supported with expert model parallelism",
)
expert_parallel_b = Rule(
    expert_parallel.holds, f"{_OVERLAP} is only supported when expert_model_parallel_size > 1"
)
# Rules 5 (Megatron) and 5b: the dispatcher exchanges in two directions.
dispatcher = Rule(
    lambda c: c.moe_token_dispatcher_type in ("alltoall", "flex"),
    f"{_OVERLAP} is supported with alltoall/flex token dispatcher",
)
dispatcher_b = Rule(
    dispatcher.holds,
    f"{_OVERLAP} is only supported when moe_token_dispatcher_type == 'alltoall' or 'flex', "
    "but got {c.moe_token_dispatcher_type}",
)
# Rule 6 (Megatron main, Bridge). Megatron's dev branch allows it under conditions and is not
# followed.
full_recompute = Rule(
    lambda c: c.recompute_granularity != "full",
    f"disable full recomputation when enabling {_OVERLAP}",
)
# Rules 7, 8 and 9 (Megatron, Bridge). No list of modules to recompute means no modules.
recompute_method = Rule(
    lambda c: c.recompute_method is None,
    f"disable recomputation method when enabling {_OVERLAP}",
)
recompute_layers = Rule(
    lambda c: c.recompute_num_layers is None,
    f"recompute_num_layers must be None when enabling {_OVERLAP}",
)
recompute_moe = Rule(
    lambda c: "moe" not in (c.recompute_modules or ()),
    f"disable moe in recompute_modules when enabling {_OVERLAP}",
)
# Rules 10 (Megatron) and 10b.
half_precision = Rule(
    lambda c: c.bf16 or c.fp16, f"{_OVERLAP} is only supported with bf16 or fp16 model"
)
half_precision_b = Rule(
    half_precision.holds, f"{_OVERLAP} is only supported when using bf16 or fp16 models"
)
# Rule 11 (Megatron, Bridge): shared experts are not overlapped a second time.
shared_experts = Rule(
    lambda c: not c.moe_shared_expert_overlap,
    f"disable moe_shared_expert_overlap when enabling {_OVERLAP}",
)
# Rule 12 (Megatron main, Bridge). Megatron's dev branch refuses 0; it is older here and is not
# followed.
mtp_layers = Rule(
    lambda c: c.mtp_num_layers in (None, 0, 1),
    f"MTP supports at most one layer when enabling {_OVERLAP}.",
)
# Rule 14 (Megatron): Transformer Engine's graphs capture neither moe nor mlp.
graph_scope = Rule(
    lambda c: c.cuda_graph_impl != "transformer_engine" or not graph_modules(c) & {"moe", "mlp"},
    f"CUDA graph scope on moe and mlp is not supported with {_OVERLAP}",
)
# Rule 15 (Megatron). Rule 15b depends on the user's values too: see `_delayed_wgrad`.
needs_overlap = Rule(
    lambda c: not c.delay_wgrad_compute or c.overlap_moe_expert_parallel_comm,
    f"{_OVERLAP} must be enabled when enabling {_DELAY}",
)
# Rule 16 (Megatron).
partial_graph = Rule(
    lambda c: c.cuda_graph_impl != "transformer_engine" or _te("2.10.0"),
    f"TE version >= 2.10.0 is required for {_DELAY} with partial cuda graph",
)
# Rule 17 (arguments).
implementation = Rule(
    lambda c: c.transformer_impl == "transformer_engine",
    "Delaying wgrad compute is only supported with transformer_engine implementation",
)
# Rules 18 (arguments) and 18b, for overlap_grad_reduce. setup() checks both. Rule 18b's text, like
# rule 19b's, lacks a space, as shipped.
grad_reduce = Rule(
    lambda c: _te("2.8.0"),
    f"overlap_grad_reduce is only supported with TE >= 2.8.0 when enabling {_DELAY}",
)
grad_reduce_b = Rule(
    lambda c: _te("2.7.0"),
    f"TE version >= 2.7.0 is required for overlap_grad_reduce when using{_DELAY}. "
    "Current TE version: {te}",
)
# Rules 19 (arguments) and 19b, which ask for the version with the fusion off and with it on.
# Megatron's sense is the newer one. setup() checks both: what passes it passes in either reference.
unfused_accumulation = Rule(
    lambda c: c.gradient_accumulation_fusion or _te("2.7.0"),
    "disabling gradient_accumulation_fusion is only supported with TE >= 2.7.0 "
    f"when enabling {_DELAY}",
)
fused_accumulation_b = Rule(
    lambda c: c.gradient_accumulation_fusion is not True or _te("2.7.0"),
    f"TE version >= 2.7.0 is required for gradient_accumulation_fusion when using{_DELAY}. "
    "Current TE version: {te}",
)
# Rules 20 and 21 (arguments, only under overlap_grad_reduce; Bridge, always).
graph_te_version = Rule(
    lambda c: not _has_wgrad_in_graph(c) or _te("2.12.0"),
    f"CUDA graph with {_DELAY} requires TE version >= 2.12.0.",
)
graph_accumulation = Rule(
    lambda c: not _has_wgrad_in_graph(c) or c.gradient_accumulation_fusion,
    f"CUDA graph with {_DELAY} requires gradient_accumulation_fusion to be enabled. "
    "Otherwise gradients move in memory, and a graph replays fixed addresses.",
)
# Rules 22 (arguments) and 22b.
graph_bias = Rule(
    lambda c: not ("attn" in graph_modules(c) and (c.add_bias_linear or c.add_qkv_bias)),
    f"CUDA graph with {_DELAY} doesn't support attn bias for now.",
)
graph_bias_b = Rule(
    graph_bias.holds, f"CUDA graph with {_DELAY} does not support attention bias for now."
)
# Rule 23 (Megatron): expert weight gradients beside the dispatch backward stand alone.
_STAGED_RULES = (
    Rule(
        lambda c: not getattr(c, _OVERLAP), f"{_OVERLAP} must be disabled when enabling {_STAGED}"
    ),
    Rule(lambda c: _te("2.3.0"), f"TE version >= 2.3.0 is required for {_STAGED}"),
    Rule(lambda c: not getattr(c, _DELAY), f"{_DELAY} must be disabled when enabling {_STAGED}"),
)
# Rule 24 (Megatron): the early release of attention memory is a part of the overlap.
early_release = Rule(
    lambda c: not c.ep_overlap_early_attn_memory_release or c.overlap_moe_expert_parallel_comm,
    f"{_OVERLAP} must be enabled when enabling ep_overlap_early_attn_memory_release",
)
# Megatron-FSDP goes with CUDA graphs of a whole iteration, or with none.
sharded_graphs = Rule(
    lambda c: c.cuda_graph_impl in ("none", "full_iteration"),
    "1F1B overlap with FSDP does not support per-layer CUDA graphs "
    "(cuda_graph_impl={c.cuda_graph_impl!r}, expected 'none' or 'full_iteration').",
)


def experts(config: Any) -> None:
    """Rule 4 (Bridge): more than one expert. Raises TypeError where no number is set."""
    count = option(config, "num_moe_experts")
    if count is None:
        raise TypeError(f"{_OVERLAP}: num_moe_experts is None (expected a number > 1)")
    expect(count > 1, f"{_OVERLAP} is only supported when num_moe_experts > 1, but got {count}")


def offloading(config: Any) -> None:
    """Rule 13 (Megatron): ncclep does not go with offloading the input of the first expert layer.

    A configuration without the switch `fine_grained_activation_offloading` counts as offloading
    what it lists.
    """
    is_on = getattr(config, "fine_grained_activation_offloading", True)
    is_offloaded = is_on and "expert_fc1" in (option(config, "offload_modules") or ())
    expect(
        not (is_offloaded and _is_ncclep(settings_of(config))),
        f"{_OVERLAP} with ncclep does not support offloading 'expert_fc1': "
        "the rows stay in the communication buffer",
    )


def staged_dispatch_backward(config: Any) -> None:
    """Rule 23."""
    if option(config, _STAGED):
        _check(_STAGED_RULES, config)


def interleaved(is_sharded: bool, num_chunks: int | None) -> None:
    """A rank has one model chunk if parameters are sharded."""
    expect(
        not is_sharded or (num_chunks or 1) <= 1,
        "EP overlap 1F1B with FSDP is not supported for interleaved pipeline parallelism "
        f"(virtual_pipeline_model_parallel_size > 1), but got {num_chunks} chunks.",
    )


_MODEL_OVERLAP = (
    torch_version,
    virtual_pipeline,
    expert_parallel,
    dispatcher,
    full_recompute,
    recompute_method,
    recompute_layers,
    recompute_moe,
    half_precision,
    shared_experts,
    mtp_layers,
    offloading,
    graph_scope,
)
_USER_OVERLAP = (
    expert_parallel_b,
    experts,
    dispatcher_b,
    half_precision_b,
    torch_version,
    virtual_pipeline,
    full_recompute,
    recompute_method,
    recompute_layers,
    recompute_moe,
    shared_experts,
    mtp_layers,
)


def validate_model_overlap(model_config: Any) -> None:
    """Rules 1 to 16, 23 and 24, as Megatron-LM's model configuration has them.

    Raises AssertionError with the text of the first rule that is broken. Rank 0 logs a warning for
    ncclep with zero copy.
    """
    has_overlap = option(model_config, _OVERLAP)
    if has_overlap:
        _check(_MODEL_OVERLAP, model_config)
    needs_overlap(model_config)
    if option(model_config, _DELAY):
        partial_graph(model_config)
    staged_dispatch_backward(model_config)
    early_release(model_config)
    if has_overlap and _is_ncclep(settings_of(model_config)):
        # ncclep receives into its own buffer, where the schedule's gradients are not yet.
        if option(model_config, "moe_ncclep_zero_copy"):
            warn_on_rank_0(
                logger,
                f"moe_ncclep_zero_copy with {_OVERLAP}: each backward of a dispatch first copies "
                "its gradient into the communication buffer.",
            )


def validate_overlap_arguments(args: Any) -> None:
    """Rules 17 to 22, as Megatron-LM's command line has them.

    Raises AssertionError with the text of the first rule that is broken. Rank 0 logs a warning for
    tensor or context parallelism beside the overlap on GPUs older than Blackwell.
    """
    if option(args, _OVERLAP):
        _advise_device_connections(args)
    if not option(args, _DELAY):
        return
    implementation(args)
    if option(args, "overlap_grad_reduce"):
        _check((grad_reduce, graph_te_version, graph_accumulation, graph_bias), args)
    unfused_accumulation(args)


def validate_user_overlap(user: Any, model_config: Any, ddp_config: Any = None) -> None:
    """The rules of Megatron-Bridge for the user's values `user`, which count where they are True.

    With Megatron-FSDP also those of `validate_sharded_overlap`, which would refuse the model later.
    Raises AssertionError with the text of the first rule that is broken; TypeError where
    num_moe_experts is None; ValueError as `validate_sharded_overlap`.
    """
    if option(user, _OVERLAP) is True:
        _check(_USER_OVERLAP, model_config)
        if _is_sharded(ddp_config):
            _sharded_overlap(model_config, ddp_config)
    if option(user, _DELAY) is True:
        _delayed_wgrad(user, model_config, ddp_config)


def _delayed_wgrad(user: Any, model: Any, ddp: Any) -> None:
    has_grad_reduce = option(ddp, "overlap_grad_reduce") or option(user, "overlap_grad_reduce")
    if has_grad_reduce:
        grad_reduce_b(model)
    fused_accumulation_b(model)
    # Rule 15b: the overlap may be the user's setting or the model's.
    expect(
        option(model, _OVERLAP) or option(user, _OVERLAP), f"{_OVERLAP} is required for {_DELAY}"
    )
    _check((graph_te_version, graph_accumulation, graph_bias_b), model)
    # Where the references disagree about a version, the newer one's rule holds as well. It comes
    # last, so that what Bridge refuses is refused with Bridge's words.
    if has_grad_reduce:
        grad_reduce(model)
    unfused_accumulation(model)
    if _is_sharded(ddp):
        _sharded_wgrad(ddp)


def validate_delayed_linear(model_config: Any) -> None:
    """Is called before Transformer Engine's linear layers with delayed weight gradients are built.

    Raises RuntimeError where it is older than 2.3.0 or absent. Other implementations delay what
    they can: `weft.overlap.DelayedLinear` needs no Transformer Engine.
    """
    is_te = option(model_config, "transformer_impl") == "transformer_engine"
    if option(model_config, _DELAY) and is_te and not _te("2.3.0"):
        raise RuntimeError(f"Only TE with version >=2.3.0 supports {_DELAY} now.")


def validate_sharded_overlap(
    model_config: Any, ddp_config: Any, fsdp_unit_modules: Sequence[type] | None = None
) -> None:
    """Is called before Megatron-FSDP wraps a model. The rules are those of its adapter and of the
    interleaved schedule.

    Nothing is checked without ddp_config.use_megatron_fsdp. fsdp_unit_modules: classes, which are
    told by their names, and which must be layers that plans know where parameters are sharded too;
    None is Megatron-FSDP's own choice, which is good.
    Raises AssertionError with the text of the first rule that is broken; ValueError for version 2
    with delayed weight gradients.
    """
    if not _is_sharded(ddp_config):
        return
    if option(model_config, _DELAY):
        _sharded_wgrad(ddp_config)
    if option(model_config, _OVERLAP):
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


def validate_overlap_schedule(checkpoint_activations_microbatch: Any = None) -> None:
    """Rule 25, before an overlapped step: no activation checkpointing chosen for each micro-batch.

    Raises AssertionError.
    """
    expect(
        checkpoint_activations_microbatch is None,
        f"checkpoint_activations_microbatch is not supported for {_OVERLAP}",
    )


def validate_graph_replay(model_config: Any, has_captured_mlp: bool) -> None:
    """Rule 26, before a captured layer is replayed. Raises AssertionError.

    has_captured_mlp: the graph holds the whole MLP or MoE part and so hides its exchanges, as it
    does where no modules to capture are named, which rule 14 cannot see.
    """
    expect(
        not (option(model_config, _OVERLAP) and has_captured_mlp),
        "EP overlap must be disabled when CUDA graph captures the whole MLP/MoE part.",
    )


def _check(rules: Sequence[Callable[[Any], None]], config: Any) -> None:
    for rule in rules:
        rule(config)


def _has_wgrad_in_graph(c: Settings) -> bool:
    """Whether a graph captures weight gradients: of attention, or of shared experts beside the
    router that are not overlapped."""
    return "attn" in graph_modules(c) or (
        "moe_router" in graph_modules(c)
        and c.moe_shared_expert_intermediate_size is not None
        and not c.moe_shared_expert_overlap
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
    sharded_graphs(model)
    interleaved(True, option(model, "virtual_pipeline_model_parallel_size"))


def _sharded_wgrad(ddp: Any) -> None:
    # Version 2 reduces gradients in its backward.
    if getattr(ddp, "megatron_fsdp_version", 1) == 2:
        raise ValueError("MFSDP v2 does not currently support delay_wgrad_compute.")


def _advise_device_connections(config: Any) -> None:
    """Warns of tensor or context parallelism on Hopper and older GPUs, unless the parameters are
    sharded.

    It wants CUDA_DEVICE_MAX_CONNECTIONS=1, while the overlap wants more. Nothing is said without
    CUDA, since the configuration may be made on another machine.
    """
    c = settings_of(config)
    is_parallel = max(c.tensor_model_parallel_size, c.context_parallel_size) > 1
    is_sharded = _is_sharded(config) or getattr(config, "use_torch_fsdp2", False)
    if not is_parallel or is_sharded or not torch.cuda.is_available():
        return
    if torch.cuda.get_device_properties(0).major < _BLACKWELL:
        warn_on_rank_0(
            logger,
            "For Hopper and before, try not to use tensor model parallelism or context parallelism "
            f"with {_OVERLAP}: the former is fastest with CUDA_DEVICE_MAX_CONNECTIONS=1, the "
            "latter with a larger number. With both, set 1 or 32, after what matters more.",
        )
