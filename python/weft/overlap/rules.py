# SPDX-License-Identifier: Apache-2.0
"""What a plan refuses: the rules of `weft.config` that concern it."""

from collections.abc import Iterable
from typing import Any

from weft.config import OverlapModelConfig, rules

# What may be recomputed: pieces that lie inside one node.
RECOMPUTABLE = ("core_attn", "layernorm", "moe_act", "mla_up_proj", "mlp", "shared_experts")

# Classes of Megatron-FSDP and of PyTorch's fully_shard, whichever of their versions.
_SHARDED = {"MegatronFSDP", "FSDPModule"}


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


def check_interleaved(model: Any, num_chunks: int) -> None:
    """Raises AssertionError for several chunks on a rank, if fully sharded data parallelism gathers
    the parameters of `model`: its hooks know one chunk."""
    if num_chunks > 1:
        names = {base.__name__ for part in model.modules() for base in type(part).__mro__}
        rules.interleaved(not names.isdisjoint(_SHARDED), num_chunks)
