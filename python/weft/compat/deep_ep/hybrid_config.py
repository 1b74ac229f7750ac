# SPDX-License-Identifier: Apache-2.0
"""The sizes of a `HybridEPBuffer`. They are for callers to read: an exchange needs none of them
but the capacity, and takes the other sizes from the tensors of a call."""

from __future__ import annotations

import dataclasses
from typing import Any

MIN_CAPACITY = 512


def round_up(value: int, multiple: int) -> int:
    return (value + multiple - 1) // multiple * multiple


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
        made = dataclasses.replace(
            self.buffer_config, fuse_permute_dispatch=bool(fuse_permute_dispatch)
        )
        if hidden_dim is not None:
            made.hidden_dim = hidden_dim
        if num_local_experts is not None:
            made.num_of_experts_per_rank = num_local_experts
        if use_fp8 is not None:
            made.use_fp8 = bool(use_fp8)
        if pad_multiple is not None and pad_multiple > 0:
            made.pad_multiple = pad_multiple
        for name, value in others.items():
            setattr(made, name, value)
        return made
