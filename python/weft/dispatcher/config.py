# SPDX-License-Identifier: Apache-2.0
"""The settings that the dispatchers read, under the names of Megatron-LM and NeMo Automodel.

A dispatcher takes any object that has (some of) these attributes: what it lacks has the default
that is written here.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any


@dataclass
class DispatcherConfig:
    """Names and defaults of Megatron-LM's TransformerConfig. `validate()` checks them together."""

    num_moe_experts: int | None = None
    moe_router_topk: int = 2
    moe_router_dtype: str | None = None  # "fp32", "fp64"
    moe_router_load_balancing_type: str | list[str] = "aux_loss"

    moe_token_dispatcher_type: str = "allgather"  # this package has "alltoall" and "flex"
    moe_flex_dispatcher_backend: str = "deepep"  # "hybridep", "uccl_ep"
    moe_enable_deepep: bool = False  # deprecated
    moe_permute_fusion: bool = False
    moe_permute_fusion_into_hybridep: bool = False

    # Streaming multiprocessors of the exchange; None: the library chooses.
    moe_flex_dispatcher_num_sms: int | None = None
    moe_deepep_num_sms: int | None = None  # deprecated
    moe_hybridep_num_sms: int | None = None  # deprecated
    moe_hybridep_num_sms_preprocessing: int = 108
    moe_hybridep_num_blocks_permute: int | None = None
    moe_hybridep_num_blocks_unpermute: int | None = None

    # Dropping and padding.
    moe_expert_capacity_factor: float | None = None
    moe_pad_expert_input_to_capacity: bool = False
    moe_expert_rank_capacity_factor: float | None = None
    # The largest number of tokens that any rank brings, which the row budget counts with. Only
    # needed with a rank capacity factor where ranks bring different numbers. Weft's own setting.
    moe_max_tokens_per_rank: int | None = None
    # Experts that neither read nor need rows behind the last one's, and want no alignment, whoever
    # made them: a row budget then needs none of Transformer Engine's. Weft's own setting.
    moe_experts_ignore_unused_rows: bool = False
    moe_router_padding_for_quantization: bool = False

    # Different token counts on every rank work as they are, but for sizes that are fixed beforehand
    # (a rank capacity factor, drop-and-pad): with either flag they count with the largest of any
    # rank, which is asked for at every call. Input that the caller has padded works too.
    moe_hybridep_pad_uneven_dispatch_inputs: bool = False
    moe_hybridep_pad_variable_tokens: bool = False

    # What decides the row alignment of the experts.
    fp8: str | None = None
    fp8_recipe: str | None = "delayed"
    fp4: str | None = None
    use_transformer_engine_op_fuser: bool = False
    moe_use_grouped_tensor: bool = False
    moe_grouped_gemm: bool = False

    moe_shared_expert_overlap: bool = False
    # Megatron-LM's own schedule, which frees what "deepep" received once the experts have run.
    overlap_moe_expert_parallel_comm: bool = False
    moe_dispatch_fwd_dtype: str = "bf16"
    moe_combine_bwd_dtype: str = "bf16"
    moe_ncclep_zero_copy: bool = False

    variable_seq_lengths: bool = False
    sequence_packing_scheduler: str | None = None

    moe_paged_stash: bool = False
    moe_paged_stash_page_size: int = 64
    moe_paged_stash_buffer_size_factor_cuda: float = 1.10
    moe_paged_stash_buffer_size_factor_cpu: float = 0.0
    cpu_offloading: bool = False
    offload_modules: list[str] | None = None

    # NeMo Automodel's settings without a counterpart above.
    moe_router_expert_pad_multiple: int | None = None
    moe_share_token_dispatcher: bool = False
    moe_deepep_async_dispatch: bool = False

    def validate(self) -> DispatcherConfig:
        """Checks the settings against each other, and settles deprecated ones. Returns self.

        Raises ValueError (AssertionError for sequence packing) with the reason.
        """
        from .rules import check  # rules read options from this module

        check(self)
        return self


@dataclass
class TokenDispatcherConfig:
    """Names and defaults of NeMo Automodel's settings of the flex dispatcher."""

    moe_enable_deepep: bool = True
    moe_permute_fusion: bool = False
    moe_expert_capacity_factor: float | None = None
    moe_router_topk: int = 2
    moe_router_expert_pad_multiple: int | None = None
    num_moe_experts: int = 64
    moe_router_dtype: str = "fp32"
    moe_flex_dispatcher_backend: str = "deepep"  # "hybridep", "uccl_ep"
    moe_deepep_num_sms: int = 20
    moe_hybridep_num_sms: int = 24
    moe_share_token_dispatcher: bool = True
    moe_deepep_async_dispatch: bool = False


_DEFAULTS = {f.name: f.default for f in fields(DispatcherConfig)}


class Settings:
    """The settings of `config` as attributes: what it lacks has its default."""

    def __init__(self, config: Any, defaults: dict[str, Any] = _DEFAULTS) -> None:
        self._config, self._defaults = config, defaults

    def __getattr__(self, name: str) -> Any:
        return getattr(self._config, name, self._defaults[name])


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
