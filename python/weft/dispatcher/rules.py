# SPDX-License-Identifier: Apache-2.0
"""Checks which settings of the dispatchers go together. config.py has the settings."""

import warnings
from typing import Any

from .config import Settings, expect

DISPATCHERS = ("allgather", "alltoall", "flex")
BACKENDS = ("deepep", "hybridep", "uccl_ep", "ncclep", "deepepv2")
BALANCING_WITH_CAPACITY = ("aux_loss", "seq_aux_loss", "global_aux_loss", "none")
PACKING_SCHEDULERS = ("dp_balanced", "default_dynamic_cp")


def check(config: Any) -> None:
    """Raises ValueError for the first rule that `config` breaks; settles deprecated settings."""
    c = Settings(config)
    kind = c.moe_token_dispatcher_type
    _names(c)
    backend = c.moe_flex_dispatcher_backend if kind == "flex" else None
    _deprecated(config, c, backend)
    _capacity(config, c, backend)
    _wire_dtypes(c, backend)
    if c.moe_flex_dispatcher_backend == "ncclep":
        _ncclep(c)
    if c.moe_router_padding_for_quantization:
        name = "moe_router_padding_for_quantization"
        _refuse(not c.fp8 and not c.fp4, f"{name}: nothing is quantised (set fp8 or fp4)")
        _refuse(kind == "allgather", f"{name}: the allgather dispatcher does not support it")
    _refuse(
        c.moe_shared_expert_overlap and kind not in ("alltoall", "flex"),
        "moe_shared_expert_overlap: only the alltoall and flex dispatchers support it",
    )
    _sequence_packing(config, c)
    if c.moe_paged_stash:
        _paged_stash(c)


def _refuse(is_wrong: Any, text: str) -> None:
    if is_wrong:
        raise ValueError(text)


def _names(c: Settings) -> None:
    kind, backend = c.moe_token_dispatcher_type, c.moe_flex_dispatcher_backend
    _refuse(
        kind not in DISPATCHERS,
        f"moe_token_dispatcher_type: {kind!r} is unknown (expected one of {DISPATCHERS})",
    )
    _refuse(
        kind == "flex" and backend not in BACKENDS,
        f"Invalid backend: {backend}. moe_flex_dispatcher_backend must be one of {BACKENDS}.",
    )


def _deprecated(config: Any, c: Settings, backend: str | None) -> None:
    if c.moe_enable_deepep:
        _refuse(backend is None, "DeepEP backend is only supported with flex token dispatcher.")
        _refuse(backend == "hybridep", "Only one backend is supported for flex token dispatcher.")
        text = "moe_enable_deepep is deprecated: set moe_flex_dispatcher_backend = 'deepep'"
        warnings.warn(text, stacklevel=4)
    names = ("moe_deepep_num_sms", "moe_hybridep_num_sms")
    old = {name: getattr(c, name) for name in names if getattr(c, name) is not None}
    if not old:
        return
    values = set(old.values())
    _refuse(
        len(values) > 1,
        f"moe_flex_dispatcher_num_sms: deprecated settings disagree ({old}; set only the new one)",
    )
    text = f"{' and '.join(old)} is deprecated: set moe_flex_dispatcher_num_sms"
    warnings.warn(text, stacklevel=4)
    if c.moe_flex_dispatcher_num_sms is None:
        config.moe_flex_dispatcher_num_sms = values.pop()


def _capacity(config: Any, c: Settings, backend: str | None) -> None:
    factor = c.moe_expert_capacity_factor
    if factor is not None and factor < 0:
        factor = config.moe_expert_capacity_factor = None
    if factor is not None:
        kinds = c.moe_router_load_balancing_type
        for kind in [kinds] if isinstance(kinds, str) else kinds:
            _refuse(
                kind not in BALANCING_WITH_CAPACITY,
                f"moe_expert_capacity_factor: load balancing {kind!r} does not drop tokens "
                f"(expected one of {BALANCING_WITH_CAPACITY})",
            )
    if c.moe_pad_expert_input_to_capacity:
        _refuse(
            factor is None,
            "moe_pad_expert_input_to_capacity: there is no capacity to pad to "
            "(set moe_expert_capacity_factor)",
        )
        _refuse(
            backend in ("deepep", "uccl_ep"),
            f"moe_pad_expert_input_to_capacity: flex backend {backend!r} has no fixed "
            "sizes (use 'hybridep' or the alltoall dispatcher)",
        )
    if c.moe_expert_rank_capacity_factor is None:
        return
    _refuse(
        backend not in ("hybridep", "ncclep"),
        "moe_expert_rank_capacity_factor: needs a flex backend with a row budget "
        f"(hybridep or ncclep, not {backend!r})",
    )
    ignores_unused_rows = (
        c.use_transformer_engine_op_fuser
        or c.moe_use_grouped_tensor
        or c.moe_experts_ignore_unused_rows
    )
    _refuse(
        backend == "hybridep" and not ignores_unused_rows,
        "moe_expert_rank_capacity_factor: hybridep needs experts that ignore unused rows "
        "(set use_transformer_engine_op_fuser or moe_use_grouped_tensor)",
    )


def _wire_dtypes(c: Settings, backend: str | None) -> None:
    is_grouped = c.use_transformer_engine_op_fuser and c.moe_grouped_gemm
    for name in ("moe_dispatch_fwd_dtype", "moe_combine_bwd_dtype"):
        value = getattr(c, name)
        _refuse(value not in ("bf16", "mxfp8"), f"{name}: {value!r} is unknown (bf16 or mxfp8)")
        _refuse(
            value == "mxfp8" and not (backend == "ncclep" and is_grouped),
            f"{name}: mxfp8 needs the flex dispatcher with ncclep, "
            "use_transformer_engine_op_fuser and moe_grouped_gemm",
        )


def _ncclep(c: Settings) -> None:
    has_fuser = c.use_transformer_engine_op_fuser
    has_budget = c.moe_expert_rank_capacity_factor is not None
    has_capacity = c.moe_expert_capacity_factor is not None or c.moe_pad_expert_input_to_capacity
    for is_wrong, text in (
        (c.moe_token_dispatcher_type != "flex", "needs moe_token_dispatcher_type = 'flex'"),
        (
            c.moe_use_grouped_tensor and not has_fuser,
            "moe_use_grouped_tensor needs use_transformer_engine_op_fuser",
        ),
        (has_capacity, "a capacity factor and drop-and-pad are not supported"),
    ):
        _refuse(is_wrong, f"ncclep: {text}")
    _refuse(
        c.moe_ncclep_zero_copy and not has_budget,
        "moe_ncclep_zero_copy: needs moe_expert_rank_capacity_factor",
    )
    _refuse(
        has_budget and not (has_fuser and c.moe_grouped_gemm),
        "ncclep: moe_expert_rank_capacity_factor needs use_transformer_engine_op_fuser "
        "and moe_grouped_gemm",
    )


def _sequence_packing(config: Any, c: Settings) -> None:
    kind, scheduler = c.moe_token_dispatcher_type, c.sequence_packing_scheduler
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
        c.variable_seq_lengths and kind == "allgather",
        "variable_seq_lengths: the allgather dispatcher needs equal lengths",
    )


def _paged_stash(c: Settings) -> None:
    _refuse(
        c.moe_expert_rank_capacity_factor is None,
        "moe_paged_stash: needs moe_expert_rank_capacity_factor",
    )
    _refuse(c.cpu_offloading, "moe_paged_stash: excludes cpu_offloading")
    both = {"expert_fc1", "moe_act", "fused_group_mlp"}.intersection(c.offload_modules or [])
    _refuse(both, f"moe_paged_stash: {sorted(both)} would be offloaded too (offload_modules)")
