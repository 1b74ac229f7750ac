# SPDX-License-Identifier: Apache-2.0
"""Which settings of the dispatchers go together. One function for each subject."""

from __future__ import annotations

import warnings
from typing import Any

from .checks import expect
from .config import option

DISPATCHERS = ("allgather", "alltoall", "flex")
BACKENDS = ("deepep", "hybridep", "uccl_ep", "ncclep", "deepepv2")
BALANCING_WITH_CAPACITY = ("aux_loss", "seq_aux_loss", "global_aux_loss", "none")
PACKING_SCHEDULERS = ("dp_balanced", "default_dynamic_cp")


def check(config: Any) -> None:
    """Raises ValueError for the first rule that `config` breaks; settles deprecated settings."""
    for rule in (
        _names,
        _deprecated_deepep,
        _deprecated_num_sms,
        _capacity,
        _rank_capacity,
        _wire_dtypes,
        _ncclep,
        _router_padding,
        _shared_experts,
        _sequence_packing,
        _paged_stash,
    ):
        rule(config)


def _refuse(is_wrong: Any, text: str) -> None:
    if is_wrong:
        raise ValueError(text)


def _is_flex(config: Any) -> bool:
    return config.moe_token_dispatcher_type == "flex"


def _backend(config: Any) -> str | None:
    return config.moe_flex_dispatcher_backend if _is_flex(config) else None


def _names(config: Any) -> None:
    kind, backend = config.moe_token_dispatcher_type, config.moe_flex_dispatcher_backend
    _refuse(
        kind not in DISPATCHERS,
        f"moe_token_dispatcher_type: {kind!r} is unknown (expected one of {DISPATCHERS})",
    )
    _refuse(
        _is_flex(config) and backend not in BACKENDS,
        f"Invalid backend: {backend}. moe_flex_dispatcher_backend must be one of {BACKENDS}.",
    )


def _deprecated_deepep(config: Any) -> None:
    if not option(config, "moe_enable_deepep"):
        return
    _refuse(not _is_flex(config), "DeepEP backend is only supported with flex token dispatcher.")
    _refuse(
        _backend(config) == "hybridep",
        "Only one backend is supported for flex token dispatcher.",
    )
    warnings.warn(
        "moe_enable_deepep is deprecated: set moe_flex_dispatcher_backend = 'deepep'", stacklevel=4
    )


def _deprecated_num_sms(config: Any) -> None:
    names = ("moe_deepep_num_sms", "moe_hybridep_num_sms")
    old = {name: getattr(config, name, None) for name in names}
    old = {name: value for name, value in old.items() if value is not None}
    if not old:
        return
    values = set(old.values())
    _refuse(
        len(values) > 1,
        f"moe_flex_dispatcher_num_sms: deprecated settings disagree ({old}; set the new one alone)",
    )
    warnings.warn(
        f"{' and '.join(old)} is deprecated: set moe_flex_dispatcher_num_sms", stacklevel=4
    )
    if option(config, "moe_flex_dispatcher_num_sms") is None:
        config.moe_flex_dispatcher_num_sms = values.pop()


def _capacity(config: Any) -> None:
    factor = option(config, "moe_expert_capacity_factor")
    if factor is not None and factor < 0:
        factor = config.moe_expert_capacity_factor = None
    if factor is not None:
        kinds = option(config, "moe_router_load_balancing_type")
        for kind in [kinds] if isinstance(kinds, str) else kinds:
            _refuse(
                kind not in BALANCING_WITH_CAPACITY,
                f"moe_expert_capacity_factor: load balancing {kind!r} does not drop tokens "
                f"(expected one of {BALANCING_WITH_CAPACITY})",
            )
    if option(config, "moe_pad_expert_input_to_capacity"):
        _refuse(
            factor is None,
            "moe_pad_expert_input_to_capacity: there is no capacity to pad to "
            "(set moe_expert_capacity_factor)",
        )
        _refuse(
            _backend(config) in ("deepep", "uccl_ep"),
            f"moe_pad_expert_input_to_capacity: flex backend {_backend(config)!r} has no fixed "
            "sizes (use 'hybridep' or the alltoall dispatcher)",
        )


def _rank_capacity(config: Any) -> None:
    if option(config, "moe_expert_rank_capacity_factor") is None:
        return
    backend = _backend(config)
    _refuse(
        backend not in ("hybridep", "ncclep"),
        "moe_expert_rank_capacity_factor: needs a flex backend with a row budget "
        f"(hybridep or ncclep, not {backend!r})",
    )
    _refuse(
        backend == "hybridep"
        and not option(config, "use_transformer_engine_op_fuser")
        and not option(config, "moe_use_grouped_tensor")
        and not option(config, "moe_experts_ignore_unused_rows"),
        "moe_expert_rank_capacity_factor: hybridep needs experts that ignore unused rows "
        "(set use_transformer_engine_op_fuser or moe_use_grouped_tensor)",
    )


def _wire_dtypes(config: Any) -> None:
    for name in ("moe_dispatch_fwd_dtype", "moe_combine_bwd_dtype"):
        value = option(config, name)
        _refuse(value not in ("bf16", "mxfp8"), f"{name}: {value!r} is unknown (bf16 or mxfp8)")
        can_quantise = (
            _backend(config) == "ncclep"
            and option(config, "use_transformer_engine_op_fuser")
            and option(config, "moe_grouped_gemm")
        )
        _refuse(
            value == "mxfp8" and not can_quantise,
            f"{name}: mxfp8 needs the flex dispatcher with ncclep, "
            "use_transformer_engine_op_fuser and moe_grouped_gemm",
        )


def _ncclep(config: Any) -> None:
    if config.moe_flex_dispatcher_backend != "ncclep":
        return
    has_fuser = option(config, "use_transformer_engine_op_fuser")
    has_budget = option(config, "moe_expert_rank_capacity_factor") is not None
    _refuse(not _is_flex(config), "ncclep: needs moe_token_dispatcher_type = 'flex'")
    _refuse(
        option(config, "moe_use_grouped_tensor") and not has_fuser,
        "ncclep: moe_use_grouped_tensor needs use_transformer_engine_op_fuser",
    )
    _refuse(
        option(config, "moe_expert_capacity_factor") is not None
        or option(config, "moe_pad_expert_input_to_capacity"),
        "ncclep: a capacity factor and drop-and-pad are not supported",
    )
    _refuse(
        option(config, "moe_ncclep_zero_copy") and not has_budget,
        "moe_ncclep_zero_copy: needs moe_expert_rank_capacity_factor",
    )
    _refuse(
        has_budget and not (has_fuser and option(config, "moe_grouped_gemm")),
        "ncclep: moe_expert_rank_capacity_factor needs use_transformer_engine_op_fuser "
        "and moe_grouped_gemm",
    )


def _router_padding(config: Any) -> None:
    if not option(config, "moe_router_padding_for_quantization"):
        return
    _refuse(
        not option(config, "fp8") and not option(config, "fp4"),
        "moe_router_padding_for_quantization: nothing is quantised (set fp8 or fp4)",
    )
    _refuse(
        config.moe_token_dispatcher_type == "allgather",
        "moe_router_padding_for_quantization: the allgather dispatcher does not support it",
    )


def _shared_experts(config: Any) -> None:
    _refuse(
        option(config, "moe_shared_expert_overlap")
        and config.moe_token_dispatcher_type not in ("alltoall", "flex"),
        "moe_shared_expert_overlap: only the alltoall and flex dispatchers support it",
    )


def _sequence_packing(config: Any) -> None:
    kind = config.moe_token_dispatcher_type
    scheduler = option(config, "sequence_packing_scheduler")
    if scheduler is not None:
        expect(
            kind in ("alltoall", "flex"),
            "sequence_packing only supports moe_token_dispatcher_type in ('alltoall', 'flex'), "
            f"got '{kind}'",
        )
        _refuse(
            scheduler not in PACKING_SCHEDULERS,
            f"sequence_packing_scheduler: {scheduler!r} is unknown "
            f"(expected one of {PACKING_SCHEDULERS})",
        )
        config.variable_seq_lengths = True
    _refuse(
        option(config, "variable_seq_lengths") and kind == "allgather",
        "variable_seq_lengths: the allgather dispatcher needs equal lengths",
    )


def _paged_stash(config: Any) -> None:
    if not option(config, "moe_paged_stash"):
        return
    _refuse(
        option(config, "moe_expert_rank_capacity_factor") is None,
        "moe_paged_stash: needs moe_expert_rank_capacity_factor",
    )
    _refuse(option(config, "cpu_offloading"), "moe_paged_stash: excludes cpu_offloading")
    stashed = {"expert_fc1", "moe_act", "fused_group_mlp"}
    both = stashed.intersection(getattr(config, "offload_modules", None) or [])
    _refuse(both, f"moe_paged_stash: {sorted(both)} would be offloaded too (offload_modules)")
