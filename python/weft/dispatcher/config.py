# SPDX-License-Identifier: Apache-2.0
"""The settings that the dispatchers and the rules of `weft.config` read, under the names of
Megatron-LM and NeMo Automodel.

Both take any object that has (some of) these attributes, Megatron's own configuration included:
what it lacks has the default that is written here.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass, fields
from typing import Any

from weft import _core


@dataclass
class DispatcherConfig:
    """Names and defaults of Megatron-LM's TransformerConfig. `validate()` checks those of the
    dispatchers together, `weft.config.validate_model_overlap` those of the overlap."""

    num_moe_experts: int | None = None
    moe_router_topk: int = 2
    moe_router_dtype: str | None = None  # "fp32", "fp64"
    moe_router_load_balancing_type: str | list[str] = "aux_loss"

    moe_token_dispatcher_type: str = "allgather"  # this package has "alltoall" and "flex"
    moe_flex_dispatcher_backend: str | None = "deepep"  # "hybridep", "ncclep", "uccl_ep"
    moe_enable_deepep: bool = False  # deprecated
    moe_permute_fusion: bool = False
    moe_permute_fusion_into_hybridep: bool = False

    # Streaming multiprocessors of the exchange; None: the library chooses.
    moe_flex_dispatcher_num_sms: int | None = None
    moe_deepep_num_sms: int | None = None  # deprecated
    moe_hybridep_num_sms: int | None = None  # deprecated
    moe_hybridep_num_sms_preprocessing: int | None = 108
    moe_hybridep_num_blocks_permute: int | None = None
    moe_hybridep_num_blocks_unpermute: int | None = None

    # Dropping and padding.
    moe_expert_capacity_factor: float | None = None
    moe_pad_expert_input_to_capacity: bool = False
    moe_expert_rank_capacity_factor: float | None = None
    # The largest number of tokens that any rank brings, which the row budget counts with. Only
    # needed with a rank capacity factor where ranks bring different numbers. Weft's own setting.
    moe_max_tokens_per_rank: int | None = None
    moe_ncclep_max_tokens_per_rank: int | None = None  # Megatron-LM's, with "ncclep"
    # Experts that neither read nor need rows behind the last one's, and want no alignment, whoever
    # made them: a row budget then needs none of Transformer Engine's. Weft's own setting.
    moe_experts_ignore_unused_rows: bool = False
    moe_router_padding_for_quantization: bool = False

    # Places on each rank for replicas of popular experts, at most 16, with "hybridep"; the
    # layer says whose weights they get (`replicate_experts`). With block_rows above 1 a replica
    # takes whole blocks of so many rows. combine_order "topk": a token's rows are added in the
    # order of its choices, rounded once, with "hybridep". Weft's own settings.
    moe_balance_replicas: int = 0
    moe_balance_block_rows: int = 1
    moe_combine_order: str = "rank"

    # Different token counts on every rank work as they are, but for sizes that are fixed beforehand
    # (a rank capacity factor, drop-and-pad): with either flag they count with the largest of any
    # rank, which is asked for at every call. Input that the caller has padded works too.
    moe_hybridep_pad_uneven_dispatch_inputs: bool = False
    moe_hybridep_pad_variable_tokens: bool = False

    # Settings that decide the row alignment of the experts.
    fp8: str | None = None
    fp8_recipe: str | None = "delayed"
    fp4: str | None = None
    use_transformer_engine_op_fuser: bool = False
    moe_use_grouped_tensor: bool = False
    moe_grouped_gemm: bool = False

    moe_shared_expert_overlap: bool = False
    moe_shared_expert_intermediate_size: int | None = None
    # Megatron-LM's own schedule, which frees what "deepep" received once the experts have run.
    overlap_moe_expert_parallel_comm: bool = False
    moe_dispatch_fwd_dtype: str = "bf16"
    moe_combine_bwd_dtype: str = "bf16"
    moe_ncclep_zero_copy: bool = False
    # Megatron-Core 0.19 has False: its experts get no unused rows, and so no budget.
    moe_ncclep_static_shape: bool = True

    variable_seq_lengths: bool = False
    sequence_packing_scheduler: str | None = None

    moe_paged_stash: bool = False
    moe_paged_stash_page_size: int = 64
    moe_paged_stash_buffer_size_factor_cuda: float = 1.10
    moe_paged_stash_buffer_size_factor_cpu: float = 0.0
    cpu_offloading: bool = False
    offload_modules: list[str] | None = None

    # The rest of what the overlap of communication is about.
    delay_wgrad_compute: bool = False
    overlap_dispatch_backward_with_experts_wgrad: bool = False
    ep_overlap_early_attn_memory_release: bool = False
    high_priority_a2a_comm_stream: bool = False
    overlap_grad_reduce: bool = False  # among Megatron's arguments; DDP's setting otherwise
    tp_comm_overlap: bool = False
    tp_comm_overlap_cfg: dict | None = None
    tp_comm_bootstrap_backend: str = "nccl"
    overlap_p2p_comm: bool = False
    batch_p2p_comm: bool = True
    defer_embedding_wgrad_compute: bool = False
    wgrad_deferral_limit: int = 0

    # Parallelism.
    tensor_model_parallel_size: int = 1
    pipeline_model_parallel_size: int = 1
    virtual_pipeline_model_parallel_size: int | None = None
    context_parallel_size: int = 1
    expert_model_parallel_size: int = 1
    sequence_parallel: bool = False

    # Other settings that the overlap has to live with.
    bf16: bool = False
    fp16: bool = False
    recompute_granularity: str | None = None
    recompute_method: str | None = None
    recompute_num_layers: int | None = None
    recompute_modules: list[str] | None = None
    mtp_num_layers: int | None = None
    transformer_impl: str = "transformer_engine"
    gradient_accumulation_fusion: bool = False
    add_bias_linear: bool = True
    add_qkv_bias: bool = False
    cuda_graph_impl: str = "none"
    cuda_graph_modules: str | list | None = None
    cuda_graph_scope: str | list | None = None  # the older name

    # NeMo Automodel's settings without a counterpart above.
    moe_router_expert_pad_multiple: int | None = None
    moe_share_token_dispatcher: bool = False
    moe_deepep_async_dispatch: bool = False
    moe_hybridep_permute_fusion: bool = False  # Megatron-LM's moe_permute_fusion_into_hybridep
    moe_hybridep_compact_routing: bool = False  # "hybridep" is told experts in place of a map
    moe_benchmark_static_routing: bool = False  # every dispatch has as many rows as the first

    def validate(self) -> DispatcherConfig:
        """Checks the settings against each other, and settles deprecated ones. Returns self.

        Raises ValueError (AssertionError for sequence packing) with the reason.
        """
        check(self)
        return self


@dataclass
class TokenDispatcherConfig(DispatcherConfig):
    """`DispatcherConfig` with the defaults of NeMo Automodel's settings of the flex dispatcher."""

    num_moe_experts: int | None = 64
    moe_router_dtype: str | None = "fp32"
    moe_enable_deepep: bool = True
    moe_deepep_num_sms: int | None = 20
    moe_hybridep_num_sms: int | None = 24
    moe_hybridep_num_sms_preprocessing: int | None = None
    moe_share_token_dispatcher: bool = True


_DEFAULTS = {f.name: f.default for f in fields(DispatcherConfig)}


class Settings:
    """The settings of `config` as attributes: what it lacks has its default."""

    def __init__(self, config: Any) -> None:
        self._config = config

    def __getattr__(self, name: str) -> Any:
        return option(self._config, name)


def option(config: Any, name: str) -> Any:
    """The setting `name` of `config`, or its default where `config` has no such attribute."""
    return getattr(config, name, _DEFAULTS[name])


def num_sms(config: Any, own_name: str) -> int | None:
    """SMs for a backend: the common setting, else the backend's own, `own_name`."""
    common = option(config, "moe_flex_dispatcher_num_sms")
    return option(config, own_name) if common is None else common


def expect(condition: bool, text: str) -> None:
    """Raises AssertionError(text) unless `condition`: what callers know as an assertion, kept under
    `python -O`."""
    if not condition:
        raise AssertionError(text)


# Rules of which settings go together.

DISPATCHERS = ("allgather", "alltoall", "flex")
BACKENDS = ("deepep", "hybridep", "uccl_ep", "ncclep", "deepepv2")
BALANCING_WITH_CAPACITY = ("aux_loss", "seq_aux_loss", "global_aux_loss", "none")
PACKING_SCHEDULERS = ("dp_balanced", "default_dynamic_cp")


def check(config: Any) -> None:
    """Raises ValueError for the first rule that `config` breaks; settles deprecated settings."""
    c = Settings(config)
    kind = c.moe_token_dispatcher_type
    _refuse(
        kind not in DISPATCHERS,
        f"moe_token_dispatcher_type: {kind!r} is unknown (expected one of {DISPATCHERS})",
    )
    backend = c.moe_flex_dispatcher_backend if kind == "flex" else None
    _refuse(
        kind == "flex" and backend not in BACKENDS,
        f"Invalid backend: {backend}. moe_flex_dispatcher_backend must be one of {BACKENDS}.",
    )
    _deprecated(config, c, backend)
    _capacity(config, c, backend)
    _wire_dtypes(c, backend)
    if c.moe_flex_dispatcher_backend == "ncclep":
        _ncclep(c)
    check_own_exchange(c, backend)
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
        _refuse(
            c.moe_expert_rank_capacity_factor is None,
            "moe_paged_stash: needs moe_expert_rank_capacity_factor",
        )
        _refuse(c.cpu_offloading, "moe_paged_stash: excludes cpu_offloading")
        both = {"expert_fc1", "moe_act", "fused_group_mlp"}.intersection(c.offload_modules or [])
        _refuse(both, f"moe_paged_stash: {sorted(both)} would be offloaded too (offload_modules)")


def _refuse(is_wrong: Any, text: str) -> None:
    if is_wrong:
        raise ValueError(text)


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
            backend in ("deepep", "deepepv2", "uccl_ep"),
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
    _refuse(
        c.moe_token_dispatcher_type != "flex",
        "ncclep: needs moe_token_dispatcher_type = 'flex'",
    )
    _refuse(
        c.moe_use_grouped_tensor and not c.use_transformer_engine_op_fuser,
        "ncclep: moe_use_grouped_tensor needs use_transformer_engine_op_fuser",
    )
    check_ncclep(c)


def check_ncclep(c: Settings) -> bool:
    """Returns whether "ncclep" has a row budget. Raises ValueError for capacities, for a zero copy
    without a budget, and for one whose experts would take unused rows for tokens."""
    has_budget = c.moe_expert_rank_capacity_factor is not None and c.moe_ncclep_static_shape
    has_capacity = c.moe_expert_capacity_factor is not None or c.moe_pad_expert_input_to_capacity
    _refuse(has_capacity, "ncclep: a capacity factor and drop-and-pad are not supported")
    _refuse(
        c.moe_ncclep_zero_copy and not has_budget,
        "moe_ncclep_zero_copy: needs moe_expert_rank_capacity_factor, and moe_ncclep_static_shape",
    )
    _refuse(
        has_budget
        and not (c.use_transformer_engine_op_fuser and c.moe_grouped_gemm)
        and not c.moe_experts_ignore_unused_rows,
        "ncclep: moe_expert_rank_capacity_factor needs use_transformer_engine_op_fuser "
        "and moe_grouped_gemm",
    )
    return has_budget


def has_own_exchange(c: Settings) -> bool:
    """Returns whether settings of Weft's own are on that buffers of other libraries do not know."""
    return c.moe_balance_replicas > 0 or c.moe_combine_order != "rank"


def check_own_exchange(c: Settings, backend: str | None) -> None:
    """Raises ValueError where those do not go with the others."""
    order, replicas = c.moe_combine_order, c.moe_balance_replicas
    _refuse(
        order not in ("rank", "topk"), f"moe_combine_order: {order!r} is unknown (rank or topk)"
    )
    _refuse(
        not 0 <= replicas <= _core.MOST_REPLICAS,
        f"moe_balance_replicas = {replicas} (expected 0 to {_core.MOST_REPLICAS})",
    )
    if has_own_exchange(c):
        name = "moe_balance_replicas" if replicas else "moe_combine_order"
        _refuse(backend != "hybridep", f"{name}: needs the flex dispatcher with 'hybridep'")
        _refuse(c.moe_pad_expert_input_to_capacity, f"{name}: excludes drop-and-pad")


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
