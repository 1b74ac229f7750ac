# SPDX-License-Identifier: Apache-2.0
"""What a plan refuses: the rules of `weft.config` that concern it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from weft.config import OverlapModelConfig
from weft.config import rules_overlap as rules

# What may be recomputed: pieces that lie inside one node.
RECOMPUTABLE = ("core_attn", "layernorm", "moe_act", "mla_up_proj", "mlp", "shared_experts")


def check_overlap(config: Any) -> None:
    """Raises AssertionError where a plan cannot give what the settings ask for, ValueError for
    pieces to recompute that it does not know.

    Recomputing all of a layer, or of its experts' part, would repeat exchanges in a backward that
    the other ranks do not repeat at the same place.
    """
    rules.full_recompute(config)
    rules.recompute_method(config)
    rules.recompute_layers(config)
    check_recompute(rules.option(config, "recompute_modules") or ())
    rules.shared_experts(config)


def check_recompute(modules: Iterable[str]) -> None:
    """Raises AssertionError for "moe", ValueError for what else does not lie inside one node."""
    rules.recompute_moe(OverlapModelConfig(recompute_modules=list(modules)))
    unknown = sorted(set(modules) - set(RECOMPUTABLE))
    if unknown:
        raise ValueError(f"recompute_modules: {unknown} (expected some of {RECOMPUTABLE})")
