# SPDX-License-Identifier: Apache-2.0
"""The process groups of a dispatcher."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch.distributed as dist


@dataclass(frozen=True)
class DispatcherGroups:
    """Groups under Megatron-LM's names. None stands for a group of this rank alone;
    the flex dispatcher needs a real `tp_ep`.

    Rank r of `tp_ep` is rank r // TP of `ep` and rank r % TP of `expt_tp`.
    """

    ep: dist.ProcessGroup | None
    expt_tp: dist.ProcessGroup | None
    tp_ep: dist.ProcessGroup | None


def groups_of(source: Any) -> DispatcherGroups:
    """Groups from a collection of either generation of names, or from one process group.

    A collection has `ep`, `expt_tp`, `tp_ep`, or the same names with `_group` behind. A process
    group is the expert-parallel group; there is no tensor parallelism then.
    Raises TypeError for anything else.
    """
    if isinstance(source, dist.ProcessGroup):
        return DispatcherGroups(source, None, source)
    for suffix in ("", "_group"):
        names = [name + suffix for name in ("ep", "expt_tp", "tp_ep")]
        if all(hasattr(source, name) for name in names):
            return DispatcherGroups(*(getattr(source, name) for name in names))
    raise TypeError(
        f"dispatcher: {type(source).__name__} has no groups "
        "(expected a process group, or an object with ep, expt_tp and tp_ep)"
    )


def size_of(group: Any) -> int:
    return 1 if group is None else group.size()


def rank_in(group: Any) -> int:
    return 0 if group is None else group.rank()
