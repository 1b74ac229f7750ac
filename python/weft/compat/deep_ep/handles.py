# SPDX-License-Identifier: Apache-2.0
"""What all handles share: they are plans that read like the sequences that callers know."""

import json
from collections.abc import Sequence
from typing import Any

import torch

from weft import Plan


class PlanHandle(Sequence):
    """Holds a plan. Item i is the attribute `items[i]`, which is made when it is asked for.

    Any number of handles may be alive, used in any order and as often as wanted.
    """

    items: tuple[str, ...] = ()

    def __init__(self, plan: Plan) -> None:
        self.plan = plan

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int | slice) -> Any:
        if isinstance(index, slice):
            return tuple(self._item(name) for name in self.items[index])
        return self._item(self.items[index])

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {len(self)} items: {self.plan!r}>"

    def _item(self, name: str) -> Any:
        return getattr(self, name)

    @property
    def device(self) -> torch.device:
        return self.plan.exchange.device


def on_host(plan: Plan) -> dict[str, Any]:
    """The fields of a copy of the plan; for a GPU's plan this waits for the GPU."""
    return json.loads(plan.core.to_json())
