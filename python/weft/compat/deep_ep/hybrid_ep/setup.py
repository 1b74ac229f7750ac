# SPDX-License-Identifier: Apache-2.0
"""What a `HybridEPBuffer` is made of, apart from its calls: settings, ranks and exchanges."""

import dataclasses
import warnings
from typing import Any

import torch.distributed as dist
from torch import Tensor

from weft import Exchange, Group, Plan

from ..checks import check, check_least
from ..layout import ranks_per_domain
from ..payload import round_up
from ..runtime import MIN_TOPK, TIMEOUT, ExchangePool
from .routing import Routing, is_bytes

MIN_CAPACITY = 512


@dataclasses.dataclass
class HybridEPConfig:
    """What a handle carries of the buffer's settings. SM and block counts: 0 = chosen by Weft."""

    hidden_dim: int
    max_num_of_tokens_per_rank: int
    num_of_experts_per_rank: int
    num_of_ranks_per_node: int
    num_of_nodes: int
    use_fp8: bool = False
    pad_multiple: int = 0
    fuse_permute_dispatch: bool = False
    num_of_blocks_dispatch_api: int = 0
    num_of_blocks_combine_api: int = 0
    num_of_blocks_preprocessing_api: int = 0
    num_blocks_permute: int = 0
    num_blocks_unpermute: int = 0


class HybridEPConfigurer:
    """Keeps the buffer's settings, `buffer_config`, and makes those of a call from them."""

    def __init__(self, config: HybridEPConfig) -> None:
        config.max_num_of_tokens_per_rank = round_up(
            max(config.max_num_of_tokens_per_rank, MIN_CAPACITY), 64
        )
        self.buffer_config = config

    @property
    def capacity(self) -> int:
        """Tokens of a rank that need no growth."""
        return self.buffer_config.max_num_of_tokens_per_rank

    def raise_capacity(self, num_tokens: int) -> None:
        """Never lowers it."""
        needed = round_up(num_tokens, 16)
        self.buffer_config.max_num_of_tokens_per_rank = max(self.capacity, needed)

    def config(
        self,
        hidden_dim: int | None = None,
        num_local_experts: int | None = None,
        pad_multiple: int | None = None,
        use_fp8: bool | None = None,
        fuse_permute_dispatch: bool = False,
        **others: Any,
    ) -> HybridEPConfig:
        """A copy of the buffer's settings with those of a call; `others` become attributes."""
        given = {
            "hidden_dim": hidden_dim,
            "num_of_experts_per_rank": num_local_experts,
            "pad_multiple": pad_multiple or None,
            "use_fp8": None if use_fp8 is None else bool(use_fp8),
            "fuse_permute_dispatch": bool(fuse_permute_dispatch),
        }
        given = {name: value for name, value in given.items() if value is not None}
        made = dataclasses.replace(self.buffer_config, **given)
        vars(made).update(others)
        return made


class HybridEPSetup:
    """Base of `HybridEPBuffer`, which says what the arguments mean."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        hidden_dim: int,
        max_num_of_tokens_per_rank: int,
        num_local_experts: int,
        use_fp8: bool = False,
        num_sms_dispatch_api: int | None = None,
        num_sms_combine_api: int | None = None,
        num_sms_preprocessing_api: int | None = None,
        num_blocks_permute: int | None = None,
        num_blocks_unpermute: int | None = None,
        load_cached_kernels: bool = False,
        use_shared_buffer: bool = True,
        enable_custom_allgather: bool = False,
        num_of_hybrid_ep_ranks_per_nvlink_domain: int | None = None,
        use_mnnvl: bool | None = None,
    ) -> None:
        del load_cached_kernels, use_shared_buffer, enable_custom_allgather  # nothing like it here
        for name, value in (
            ("num_of_hybrid_ep_ranks_per_nvlink_domain", num_of_hybrid_ep_ranks_per_nvlink_domain),
            ("use_mnnvl", use_mnnvl),
        ):
            if value is not None:
                warn_deprecated("HybridEPBuffer", name)
        sizes = {"hidden_dim": hidden_dim, "num_local_experts": num_local_experts}
        for name, value in sizes.items():
            check_least(f"HybridEPBuffer: {name}", value)
        ranks = Group.of(group)
        self.group = group
        self.rank: int = ranks.rank
        self.group_size: int = ranks.num_ranks
        domain = ranks_per_domain(ranks)
        self.num_of_hybrid_ep_ranks_per_nvlink_domain: int = domain
        self.local_rank: int = self.rank % domain
        self.node_rank: int = self.rank // domain
        self.num_of_nodes: int = self.group_size // domain
        self.runtime = ExchangePool(ranks, TIMEOUT)
        self.configurer = HybridEPConfigurer(
            HybridEPConfig(
                hidden_dim=hidden_dim,
                # Callers give their own T, which need not be that of others.
                max_num_of_tokens_per_rank=self.runtime.largest(max_num_of_tokens_per_rank),
                num_of_experts_per_rank=num_local_experts,
                num_of_ranks_per_node=domain,
                num_of_nodes=self.num_of_nodes,
                use_fp8=use_fp8,
                num_of_blocks_dispatch_api=num_sms_dispatch_api or 0,
                num_of_blocks_combine_api=num_sms_combine_api or 0,
                num_of_blocks_preprocessing_api=num_sms_preprocessing_api or 0,
                num_blocks_permute=num_blocks_permute or 0,
                num_blocks_unpermute=num_blocks_unpermute or 0,
            )
        )

    def empty_jit_cache(self) -> None:
        """Nothing: Weft compiles no kernels while it runs."""

    def update_template_config(
        self,
        hidden_dim: int | None = None,
        num_of_tokens_per_rank: int | None = None,
        num_local_experts: int | None = None,
        pad_multiple: int | None = None,
        use_fp8: bool | None = None,
        fuse_permute_dispatch: bool = False,
        **kwargs: Any,
    ) -> HybridEPConfig:
        """Raises the capacity to num_of_tokens_per_rank, the same on all ranks; never lowers it.

        The other arguments only appear in the settings that are returned, kwargs as attributes of
        their own. An exchange that is too small is replaced at its next use (collective); handles
        keep working.
        """
        if num_of_tokens_per_rank is not None:
            self.configurer.raise_capacity(num_of_tokens_per_rank)
        return self.configurer.config(
            hidden_dim, num_local_experts, pad_multiple, use_fp8, fuse_permute_dispatch, **kwargs
        )

    def _num_experts(
        self, verb: str, total: int | None, per_rank: int | None, topk_idx: Tensor | None
    ) -> int | None:
        """The experts of all ranks, from whichever number is given; None if only a map says it."""
        if total is not None and per_rank is not None:
            check(
                total == per_rank * self.group_size,
                f"{verb}: num_of_experts = {total}, num_of_experts_per_rank = {per_rank} "
                f"(expected {per_rank * self.group_size} with {self.group_size} ranks)",
            )
        if total is None and per_rank is None and topk_idx is not None:
            per_rank = self.configurer.buffer_config.num_of_experts_per_rank
        return total if per_rank is None else per_rank * self.group_size

    def _exchange(
        self, verb: str, hidden: Tensor, routing: Routing, non_blocking: bool
    ) -> Exchange:
        check(hidden.dim() == 2, f"{verb}: hidden has shape {list(hidden.shape)} (expected [T, H])")
        if non_blocking and hidden.is_cuda:
            # Nobody waits to learn of another rank's T: as with deep_ep it is then the same.
            self.configurer.raise_capacity(hidden.size(0))
        return self.runtime.get(
            hidden=hidden.size(1),
            num_experts=routing.map.size(1),
            device=hidden.device,
            max_tokens=self.configurer.capacity,
            max_topk=lambda: max(MIN_TOPK, routing.most_routes()),
        )

    def _config(
        self, hidden: Tensor, plan: Plan, pad_multiple: int | None, fuse: bool
    ) -> HybridEPConfig:
        return self.configurer.config(
            hidden.size(1), plan.num_local_experts, pad_multiple, is_bytes(hidden), fuse
        )

    def _sms(self, tensor: Tensor, name: str) -> int:
        return getattr(self.configurer.buffer_config, name) if tensor.is_cuda else 0


def warn_deprecated(verb: str, name: str, what: str = "ignored") -> None:
    warnings.warn(f"{verb}: {name} is deprecated and {what}", DeprecationWarning, stacklevel=3)
