# SPDX-License-Identifier: Apache-2.0
"""Everything derived from routing before a byte of payload moves. exchange.py makes it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from weft import _core

if TYPE_CHECKING:
    from weft.exchange import Exchange


def _of_core(name: str, doc: str) -> property:
    return property(lambda plan: getattr(plan.core, name), doc=doc)


def _on_device(name: str, doc: str) -> property:
    return property(lambda plan: plan._numbers()[name], doc=doc)


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

    num_experts = _of_core("num_experts", "Of all ranks.")
    num_local_experts = _of_core("num_local_experts", "Of this rank.")
    pad_multiple = _of_core("pad_multiple", "What the rows of each expert are rounded up to.")

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

    num_rows_required = _on_device(
        "required_rows", "int64 [1] on the exchange's device: `required_rows` without a wait."
    )
    overflow = _on_device(
        "overflow",
        "int32 [1] on the exchange's device: 1 if a route to or from this rank was dropped.",
    )
    rows_per_expert = _on_device(
        "rows_per_expert",
        "int64 [El] on the exchange's device: rows that carry a token (rank_major: routes).",
    )
    padded_rows_per_expert = _on_device(
        "padded_rows_per_expert",
        "int64 [El] on the exchange's device: rows of each expert's block, padding included.",
    )
    expert_begin = _on_device(
        "expert_begin", "int64 [El] on the exchange's device: first row of each expert's block."
    )

    # Numbers on the host. In budget mode on a GPU the first question copies the plan, and waits.

    rows_per_expert_list = _of_core("rows_per_expert", "[El] rows that carry a token.")
    padded_rows_per_expert_list = _of_core(
        "padded_rows_per_expert", "[El] rows of each expert's block, padding included."
    )
    required_rows = _of_core(
        "required_rows",
        "Rows that would hold every route: the budget that would not have dropped.",
    )
    received_arrivals = _of_core("received_arrivals", "[R] tokens that each rank sends here.")
    sent_arrivals = _of_core("sent_arrivals", "[R] tokens that this rank sends to each.")

    def __repr__(self) -> str:
        return repr(self.core)

    def _numbers(self) -> dict[str, torch.Tensor]:
        if self._on_device is None:
            device, core = self.exchange.device, self.core
            if device.type == "cuda":
                self._on_device = core.on_device(device.index)
                return self._on_device
            names = ("rows_per_expert", "padded_rows_per_expert", "expert_begin")
            made = {name: torch.tensor(getattr(core, name), dtype=torch.int64) for name in names}
            made["required_rows"] = torch.tensor([core.required_rows], dtype=torch.int64)
            made["overflow"] = torch.tensor([int(core.overflow)], dtype=torch.int32)
            self._on_device = {name: numbers.to(device) for name, numbers in made.items()}
        return self._on_device
