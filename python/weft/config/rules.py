# SPDX-License-Identifier: Apache-2.0
"""Rules for settings beside the overlap of expert-parallel communication. validate.py says which
rules hold where.

A rule is a condition on the settings and the reference's text if it is broken. Calling the rule
with a configuration then raises AssertionError with that text. "Megatron" is Megatron-LM's
model configuration, "arguments" its command line and "Bridge" Megatron-Bridge. A "b", or
`of_bridge`, marks Bridge's own version of a rule. Where the references disagree, a comment says
which is followed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from weft.dispatcher.config import Settings, expect, option

from . import process

OVERLAP = "overlap_moe_expert_parallel_comm"
DELAY = "delay_wgrad_compute"
_STAGED = "overlap_dispatch_backward_with_experts_wgrad"


class Rule(NamedTuple):
    """Texts may name settings, like {c.num_moe_experts}, and the version {te}."""

    holds: Callable[[Settings], Any]
    text: str
    bridge_text: str = ""

    @property
    def of_bridge(self) -> Rule:
        return Rule(self.holds, self.bridge_text)

    def __call__(self, config: Any) -> None:
        c = Settings(config)
        if not self.holds(c):
            raise AssertionError(self.text.format(c=c, te=process.get_te_version()))


def _te(minimum: str) -> bool:
    return process.is_te_min_version(minimum)


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
    """Returns ["attn"] for "attn", an enumerator called attn, and that enumerator as a text."""
    text = entry if isinstance(entry, str) else getattr(entry, "name", str(entry))
    return [part.strip().rsplit(".", 1)[-1] for part in text.split(",") if part.strip()]


def is_ncclep(c: Settings) -> bool:
    return c.moe_token_dispatcher_type == "flex" and c.moe_flex_dispatcher_backend == "ncclep"


# Rule 1 (Megatron, Bridge).
torch_version = Rule(
    lambda c: process.is_torch_min_version("2.6.0"),
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
    f"{OVERLAP} is only supported with expert model parallelism",
    f"{OVERLAP} is only supported when expert_model_parallel_size > 1",
)
# Rules 5 (Megatron) and 5b: the dispatcher exchanges in two directions.
dispatcher = Rule(
    lambda c: c.moe_token_dispatcher_type in ("alltoall", "flex"),
    f"{OVERLAP} is supported with alltoall/flex token dispatcher",
    f"{OVERLAP} is only supported when moe_token_dispatcher_type == 'alltoall' or 'flex', "
    "but got {c.moe_token_dispatcher_type}",
)
# Rule 6 (Megatron main, Bridge). Megatron's dev branch allows it under conditions and is not
# followed.
full_recompute = Rule(
    lambda c: c.recompute_granularity != "full",
    f"disable full recomputation when enabling {OVERLAP}",
)
# Rules 7, 8 and 9 (Megatron, Bridge). No list of modules to recompute means no modules.
recompute_method = Rule(
    lambda c: c.recompute_method is None,
    f"disable recomputation method when enabling {OVERLAP}",
)
recompute_layers = Rule(
    lambda c: c.recompute_num_layers is None,
    f"recompute_num_layers must be None when enabling {OVERLAP}",
)
recompute_moe = Rule(
    lambda c: "moe" not in (c.recompute_modules or ()),
    f"disable moe in recompute_modules when enabling {OVERLAP}",
)
# Rules 10 (Megatron) and 10b.
half_precision = Rule(
    lambda c: c.bf16 or c.fp16,
    f"{OVERLAP} is only supported with bf16 or fp16 model",
    f"{OVERLAP} is only supported when using bf16 or fp16 models",
)
# Rule 11 (Megatron, Bridge): shared experts are not overlapped a second time.
shared_experts = Rule(
    lambda c: not c.moe_shared_expert_overlap,
    f"disable moe_shared_expert_overlap when enabling {OVERLAP}",
)
# Rule 12 (Megatron main, Bridge). Megatron's dev branch refuses 0; it is older here and is not
# followed.
mtp_layers = Rule(
    lambda c: c.mtp_num_layers in (None, 0, 1),
    f"MTP supports at most one layer when enabling {OVERLAP}.",
)
# Rule 14 (Megatron): Transformer Engine's graphs capture neither moe nor mlp.
graph_scope = Rule(
    lambda c: c.cuda_graph_impl != "transformer_engine" or not graph_modules(c) & {"moe", "mlp"},
    f"CUDA graph scope on moe and mlp is not supported with {OVERLAP}",
)
# Rule 15 (Megatron). Rule 15b depends on the user's values too: see `_delayed_wgrad`.
needs_overlap = Rule(
    lambda c: not c.delay_wgrad_compute or c.overlap_moe_expert_parallel_comm,
    f"{OVERLAP} must be enabled when enabling {DELAY}",
)
# Rule 16 (Megatron).
partial_graph = Rule(
    lambda c: c.cuda_graph_impl != "transformer_engine" or _te("2.10.0"),
    f"TE version >= 2.10.0 is required for {DELAY} with partial cuda graph",
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
    f"overlap_grad_reduce is only supported with TE >= 2.8.0 when enabling {DELAY}",
)
grad_reduce_b = Rule(
    lambda c: _te("2.7.0"),
    f"TE version >= 2.7.0 is required for overlap_grad_reduce when using{DELAY}. "
    "Current TE version: {te}",
)
# Rules 19 (arguments) and 19b, which ask for the version with the fusion off and with it on.
# Megatron's sense is the newer one. setup() checks both: what passes it passes in either reference.
unfused_accumulation = Rule(
    lambda c: c.gradient_accumulation_fusion or _te("2.7.0"),
    "disabling gradient_accumulation_fusion is only supported with TE >= 2.7.0 "
    f"when enabling {DELAY}",
)
fused_accumulation_b = Rule(
    lambda c: c.gradient_accumulation_fusion is not True or _te("2.7.0"),
    f"TE version >= 2.7.0 is required for gradient_accumulation_fusion when using{DELAY}. "
    "Current TE version: {te}",
)
# Rules 20 and 21 (arguments, only under overlap_grad_reduce; Bridge, always).
graph_te_version = Rule(
    lambda c: not _has_wgrad_in_graph(c) or _te("2.12.0"),
    f"CUDA graph with {DELAY} requires TE version >= 2.12.0.",
)
graph_accumulation = Rule(
    lambda c: not _has_wgrad_in_graph(c) or c.gradient_accumulation_fusion,
    f"CUDA graph with {DELAY} requires gradient_accumulation_fusion to be enabled. "
    "Otherwise gradients move in memory, and a graph replays fixed addresses.",
)
# Rules 22 (arguments) and 22b.
graph_bias = Rule(
    lambda c: not ("attn" in graph_modules(c) and (c.add_bias_linear or c.add_qkv_bias)),
    f"CUDA graph with {DELAY} doesn't support attn bias for now.",
    f"CUDA graph with {DELAY} does not support attention bias for now.",
)
# Rule 23 (Megatron): expert weight gradients beside the dispatch backward stand alone.
_STAGED_RULES = (
    Rule(lambda c: not getattr(c, OVERLAP), f"{OVERLAP} must be disabled when enabling {_STAGED}"),
    Rule(lambda c: _te("2.3.0"), f"TE version >= 2.3.0 is required for {_STAGED}"),
    Rule(lambda c: not getattr(c, DELAY), f"{DELAY} must be disabled when enabling {_STAGED}"),
)
# Rule 24 (Megatron): the early release of attention memory is a part of the overlap.
early_release = Rule(
    lambda c: not c.ep_overlap_early_attn_memory_release or c.overlap_moe_expert_parallel_comm,
    f"{OVERLAP} must be enabled when enabling ep_overlap_early_attn_memory_release",
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
        raise TypeError(f"{OVERLAP}: num_moe_experts is None (expected a number > 1)")
    expect(count > 1, f"{OVERLAP} is only supported when num_moe_experts > 1, but got {count}")


def offloading(config: Any) -> None:
    """Rule 13 (Megatron): ncclep does not go with offloading the input of the first expert layer.

    A configuration without the switch `fine_grained_activation_offloading` counts as offloading
    what it lists.
    """
    is_on = getattr(config, "fine_grained_activation_offloading", True)
    is_offloaded = is_on and "expert_fc1" in (option(config, "offload_modules") or ())
    expect(
        not (is_offloaded and is_ncclep(Settings(config))),
        f"{OVERLAP} with ncclep does not support offloading 'expert_fc1': "
        "the rows stay in the communication buffer",
    )


def staged_dispatch_backward(config: Any) -> None:
    """Rule 23."""
    if option(config, _STAGED):
        check(_STAGED_RULES, config)


def interleaved(is_sharded: bool, num_chunks: int | None) -> None:
    """Checks for one chunk if parameters are sharded."""
    expect(
        not is_sharded or (num_chunks or 1) <= 1,
        "EP overlap 1F1B with FSDP is not supported for interleaved pipeline parallelism "
        f"(virtual_pipeline_model_parallel_size > 1), but got {num_chunks} chunks.",
    )


def check(rules: Sequence[Callable[[Any], None]], config: Any) -> None:
    for rule in rules:
        rule(config)


def _has_wgrad_in_graph(c: Settings) -> bool:
    """Returns whether a graph captures weight gradients: of attention, or of shared experts beside
    the router that are not overlapped."""
    return "attn" in graph_modules(c) or (
        "moe_router" in graph_modules(c)
        and c.moe_shared_expert_intermediate_size is not None
        and not c.moe_shared_expert_overlap
    )


_RECOMPUTE = (full_recompute, recompute_method, recompute_layers, recompute_moe)
MODEL_OVERLAP = (
    torch_version,
    virtual_pipeline,
    expert_parallel,
    dispatcher,
    *_RECOMPUTE,
    half_precision,
    shared_experts,
    mtp_layers,
    offloading,
    graph_scope,
)
USER_OVERLAP = (
    expert_parallel.of_bridge,
    experts,
    dispatcher.of_bridge,
    half_precision.of_bridge,
    torch_version,
    virtual_pipeline,
    *_RECOMPUTE,
    shared_experts,
    mtp_layers,
)
