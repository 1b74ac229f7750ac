# SPDX-License-Identifier: Apache-2.0
"""Common part for libraries that balance experts from exact counts: ultra_ep.py, moonep.py."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from weft import Group
from weft.compat.deep_ep.checks import check
from weft.planner import PlannedBalance, plan_balance


def planned_by(
    group: Group,
    name: str,
    count: Callable[[], Tensor],
    replicas: int,
    min_rows: int = 1,
    layer: int = 0,
) -> PlannedBalance:
    """Plans replicas from exact counts. Collective, by the group's set-up calls. count(): this
    rank's routes per expert, int64 [E]; all ranks raise its error. BadCall if layers differ."""
    counts = group.agreed(name, count)
    layers, *told = zip(*group.gather_numbers(layer, *counts.tolist()))
    check(len(set(layers)) == 1, f"{name}: layer differs between ranks: {list(layers)}")
    counts = torch.tensor(told, device="cpu").T
    return plan_balance(counts, replicas, min_rows=min_rows, domains=group.domains)
