# SPDX-License-Identifier: Apache-2.0
"""Rules 15 to 23, and one without a number: what delayed weight gradients go with.

Each function raises AssertionError with the text of the reference. "Megatron" is Megatron-LM's
model configuration, "arguments" its command line, "Bridge" is Megatron-Bridge; a "b" marks
Bridge's own version. All but rules 15 and 23 suppose that delay_wgrad_compute is on.
"""

from __future__ import annotations

from typing import Any

from weft.dispatcher.checks import expect

from . import versions
from .settings import graph_modules, option

_OVERLAP = "overlap_moe_expert_parallel_comm"
_DELAY = "delay_wgrad_compute"
_STAGED = "overlap_dispatch_backward_with_experts_wgrad"


def needs_overlap(config: Any) -> None:
    """Rule 15 (Megatron): delayed weight gradients need the overlap."""
    expect(
        not option(config, _DELAY) or option(config, _OVERLAP),
        f"{_OVERLAP} must be enabled when enabling {_DELAY}",
    )


def needs_overlap_b(user: Any, model: Any) -> None:
    """Rule 15b (Bridge): as rule 15; the overlap may be the user's or the model's setting."""
    expect(
        option(model, _OVERLAP) or option(user, _OVERLAP),
        f"{_OVERLAP} is required for {_DELAY}",
    )


def partial_graph(config: Any) -> None:
    """Rule 16 (Megatron): with Transformer Engine's graphs, TE 2.10.0 or newer."""
    expect(
        option(config, "cuda_graph_impl") != "transformer_engine"
        or versions.is_te_min_version("2.10.0"),
        f"TE version >= 2.10.0 is required for {_DELAY} with partial cuda graph",
    )


def linear_te_version(config: Any) -> None:
    """Transformer Engine's linear layers: 2.3.0 or newer. Raises RuntimeError.

    Other implementations delay what they can: `weft.overlap.DelayedLinear` needs no TE.
    """
    is_te = option(config, "transformer_impl") == "transformer_engine"
    if is_te and not versions.is_te_min_version("2.3.0"):
        raise RuntimeError(f"Only TE with version >=2.3.0 supports {_DELAY} now.")


def implementation(args: Any) -> None:
    """Rule 17 (arguments): Transformer Engine's layers."""
    expect(
        option(args, "transformer_impl") == "transformer_engine",
        "Delaying wgrad compute is only supported with transformer_engine implementation",
    )


def grad_reduce(has_overlap_grad_reduce: Any) -> None:
    """Rule 18 (arguments): with overlap_grad_reduce, TE 2.8.0 or newer.

    Bridge asks for 2.7.0 (rule 18b). Megatron's number is newer, and setup() asks for both.
    """
    expect(
        not has_overlap_grad_reduce or versions.is_te_min_version("2.8.0"),
        f"overlap_grad_reduce is only supported with TE >= 2.8.0 when enabling {_DELAY}",
    )


def grad_reduce_b(has_overlap_grad_reduce: Any) -> None:
    """Rule 18b (Bridge): as rule 18, with TE 2.7.0. The text lacks a space, as shipped."""
    expect(
        not has_overlap_grad_reduce or versions.is_te_min_version("2.7.0"),
        "TE version >= 2.7.0 is required for overlap_grad_reduce when using"
        f"{_DELAY}. Current TE version: {versions.get_te_version()}",
    )


def unfused_accumulation(config: Any) -> None:
    """Rule 19 (arguments): with gradient_accumulation_fusion off, TE 2.7.0 or newer.

    Bridge asks for it with the fusion on (rule 19b). Megatron's sense is the newer one, and
    setup() asks for both, so that what passes it passes in either reference.
    """
    expect(
        option(config, "gradient_accumulation_fusion") or versions.is_te_min_version("2.7.0"),
        "disabling gradient_accumulation_fusion is only supported with TE >= 2.7.0 "
        f"when enabling {_DELAY}",
    )


def fused_accumulation_b(config: Any) -> None:
    """Rule 19b (Bridge): with gradient_accumulation_fusion on, TE 2.7.0 or newer."""
    expect(
        option(config, "gradient_accumulation_fusion") is not True
        or versions.is_te_min_version("2.7.0"),
        "TE version >= 2.7.0 is required for gradient_accumulation_fusion when using"
        f"{_DELAY}. Current TE version: {versions.get_te_version()}",
    )


def has_wgrad_in_graph(config: Any) -> bool:
    """Whether a graph captures weight gradients: of attention, or of shared experts beside the
    router that are not overlapped."""
    modules = graph_modules(config)
    return "attn" in modules or (
        "moe_router" in modules
        and option(config, "moe_shared_expert_intermediate_size") is not None
        and not option(config, "moe_shared_expert_overlap")
    )


def graph_te_version(config: Any) -> None:
    """Rule 20 (arguments, only under overlap_grad_reduce; Bridge, always): TE 2.12.0 or newer."""
    expect(
        not has_wgrad_in_graph(config) or versions.is_te_min_version("2.12.0"),
        f"CUDA graph with {_DELAY} requires TE version >= 2.12.0.",
    )


def graph_accumulation(config: Any) -> None:
    """Rule 21 (as rule 20): captured weight gradients need gradient_accumulation_fusion."""
    expect(
        not has_wgrad_in_graph(config) or option(config, "gradient_accumulation_fusion"),
        f"CUDA graph with {_DELAY} requires gradient_accumulation_fusion to be enabled. "
        "Otherwise gradients move in memory, and a graph replays fixed addresses.",
    )


def graph_bias(config: Any) -> None:
    """Rule 22 (arguments): captured attention has no bias."""
    expect(
        not _has_captured_bias(config),
        f"CUDA graph with {_DELAY} doesn't support attn bias for now.",
    )


def graph_bias_b(config: Any) -> None:
    """Rule 22b (Bridge): as rule 22."""
    expect(
        not _has_captured_bias(config),
        f"CUDA graph with {_DELAY} does not support attention bias for now.",
    )


def _has_captured_bias(config: Any) -> bool:
    has_bias = option(config, "add_bias_linear") or option(config, "add_qkv_bias")
    return bool("attn" in graph_modules(config) and has_bias)


def staged_dispatch_backward(config: Any) -> None:
    """Rule 23 (Megatron): expert weight gradients beside the dispatch backward stand alone."""
    if not option(config, _STAGED):
        return
    expect(not option(config, _OVERLAP), f"{_OVERLAP} must be disabled when enabling {_STAGED}")
    expect(versions.is_te_min_version("2.3.0"), f"TE version >= 2.3.0 is required for {_STAGED}")
    expect(not option(config, _DELAY), f"{_DELAY} must be disabled when enabling {_STAGED}")
