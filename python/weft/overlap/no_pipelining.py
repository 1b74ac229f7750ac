# SPDX-License-Identifier: Apache-2.0
"""All micro-batches of a step on one stage."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from .chunk_plan import TransformerModelChunkSchedulePlan

Tensor = torch.Tensor
BuildPlan = Callable[[int], TransformerModelChunkSchedulePlan]


def combined_1f1b_schedule_for_no_pipelining(
    build_plan: BuildPlan,
    num_micro_batches: int,
    *,
    output_grad: Callable[[Tensor], Tensor] = torch.ones_like,
    no_sync_func: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> list[Tensor]:
    """Collective. F0; each backward with the next forward; the last backward.

    build_plan(i): the plan of micro-batch i, called when its forward comes. output_grad: the
    gradient of an output, e.g. the loss scale. no_sync_func: a context around all but the last
    backward, in which data parallelism only adds up gradients.
    Returns the outputs, detached. Raises what a node raises (see the plan's `run`).
    """
    run = TransformerModelChunkSchedulePlan.run
    plan = None
    outputs: list[Tensor] = []
    try:
        with no_sync_func():
            for i in range(num_micro_batches):
                next_plan = build_plan(i)
                grad = None if plan is None else output_grad(outputs[-1])
                outputs.append(run(next_plan, plan, grad).detach())
                plan = next_plan
        if plan is not None:
            run(None, plan, output_grad(outputs[-1]))
    except BaseException:
        if plan is not None:
            plan.abandon()  # it was not the schedule that threw, perhaps
        raise
    return outputs


def sequential_schedule_for_no_pipelining(
    build_plan: BuildPlan,
    num_micro_batches: int,
    *,
    output_grad: Callable[[Tensor], Tensor] = torch.ones_like,
    no_sync_func: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> list[Tensor]:
    """Collective. The same nodes with nothing woven: F0, B0, F1, B1, ..."""
    run = TransformerModelChunkSchedulePlan.run
    outputs = []
    for i in range(num_micro_batches):
        is_last = i == num_micro_batches - 1
        with nullcontext() if is_last else no_sync_func():
            plan = build_plan(i)
            output = run(plan, None).detach()
            run(None, plan, output_grad(output))
        outputs.append(output)
    return outputs
