# SPDX-License-Identifier: Apache-2.0
"""What libraries that balance experts from exact counts have in common: ultra_ep.py, moonep.py."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from weft import Group
from weft.planner import PlannedBalance, plan_balance


def planned_by(
    group: Group, name: str, count: Callable[[], Tensor], replicas: int, min_rows: int = 1
) -> PlannedBalance:
    """Collective, over the set-up way of the group. count(): routes of this rank to each expert,
    int64 [E]; what it raises, all ranks raise."""
    counts = group.agreed(name, count)
    told = torch.tensor(group.gather_numbers(*counts.tolist()))
    return plan_balance(told, replicas, min_rows=min_rows, domains=group.domains)
