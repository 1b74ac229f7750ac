# SPDX-License-Identifier: Apache-2.0
"""Everything derived from routing before a byte of payload moves."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from weft import _core

if TYPE_CHECKING:
    from weft.exchange import Exchange


class Plan:
    """Immutable; any number may be alive, used in any order and as often as wanted.

    Holds the exchange that it was made with, and no tensor of the caller's. `Exchange.plan`
    makes it. T: tokens of this rank, K: choices of a token, El: experts of this rank.
    """

    def __init__(self, exchange: Exchange, core: _core.Plan, calls: _core.Exchange) -> None:
        self.exchange = exchange
        self.core = core
        self.calls = calls  # the exchange may have grown since
        self.num_tokens: int = core.num_tokens
        self.num_rows: int = core.num_rows  # to allocate, padding and slack included
        self.topk: int = core.topk
        self.from_map: bool = core.from_map
        self.layout: str = core.layout
        self.row_weight_cols: int = core.row_weight_cols  # K with rank_major, else 1
        self._on_device: dict[str, torch.Tensor] | None = None

    @property
    def num_experts(self) -> int:
        return self.core.num_experts

    @property
    def num_local_experts(self) -> int:
        return self.core.num_local_experts

    @property
    def pad_multiple(self) -> int:
        return self.core.pad_multiple

    @property
    def weight_cols(self) -> int:
        """Columns of weights at the source: K, or E with a routing map."""
        return self.num_experts if self.from_map else self.topk

    # Numbers where the tokens are: no wait on a GPU.

    @property
    def num_rows_used(self) -> torch.Tensor:
        """int64 [1] on the exchange's device: rows in use, at most `num_rows`."""
        required = self.num_rows_required
        if self.layout == "expert_strided":  # its budget is the stride
            return torch.full_like(required, self.num_rows)
        return required.clamp(max=self.num_rows)

    @property
    def num_rows_required(self) -> torch.Tensor:
        """int64 [1] on the exchange's device: `required_rows` without a wait."""
        return self._numbers()["required_rows"]

    @property
    def overflow(self) -> torch.Tensor:
        """int32 [1] on the exchange's device: 1 if a route to or from this rank was dropped."""
        return self._numbers()["overflow"]

    @property
    def rows_per_expert(self) -> torch.Tensor:
        """int64 [El] on the exchange's device: rows that carry a token (rank_major: routes)."""
        return self._numbers()["rows_per_expert"]

    @property
    def padded_rows_per_expert(self) -> torch.Tensor:
        """int64 [El] on the exchange's device: rows of each expert's block, padding included."""
        return self._numbers()["padded_rows_per_expert"]

    @property
    def expert_begin(self) -> torch.Tensor:
        """int64 [El] on the exchange's device: first row of each expert's block."""
        return self._numbers()["expert_begin"]

    # Numbers on the host. In budget mode on a GPU the first question copies the plan, and waits.

    @property
    def rows_per_expert_list(self) -> list[int]:
        return self.core.rows_per_expert

    @property
    def padded_rows_per_expert_list(self) -> list[int]:
        return self.core.padded_rows_per_expert

    @property
    def required_rows(self) -> int:
        """Rows that would hold every route: the budget that would not have dropped."""
        return self.core.required_rows

    @property
    def received_arrivals(self) -> list[int]:
        """[R] tokens that each rank sends here."""
        return self.core.received_arrivals

    @property
    def sent_arrivals(self) -> list[int]:
        """[R] tokens that this rank sends to each."""
        return self.core.sent_arrivals

    def __repr__(self) -> str:
        return repr(self.core)

    def _numbers(self) -> dict[str, torch.Tensor]:
        if self._on_device is None:
            device = self.exchange.device
            if device.type == "cuda":
                self._on_device = self.core.on_device(device.index)
            else:
                core = self.core
                host = {
                    "required_rows": [core.required_rows],
                    "rows_per_expert": core.rows_per_expert,
                    "padded_rows_per_expert": core.padded_rows_per_expert,
                    "expert_begin": core.expert_begin,
                }
                self._on_device = {
                    name: torch.tensor(values, dtype=torch.int64, device=device)
                    for name, values in host.items()
                }
                self._on_device["overflow"] = torch.tensor(
                    [int(core.overflow)], dtype=torch.int32, device=device
                )
        return self._on_device
