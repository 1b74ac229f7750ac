# SPDX-License-Identifier: Apache-2.0
"""The interleaved schedule step by step."""

from functools import partial

import overlap_cases as cases
import pipeline_cases as pipelines
import pytest
import torch

from weft.overlap import (
    PipelineShape,
    PointToPoint,
    backward_order,
    combined_1f1b_schedule_for_interleaved_pipelining,
    forward_order,
    num_warm_up,
    record_issue_order,
)


def test_one_forward_more_to_warm_up():
    assert num_warm_up(PipelineShape(0, 2, 2, 4)) == 5
    assert num_warm_up(PipelineShape(1, 2, 2, 4)) == 3
    assert num_warm_up(PipelineShape(0, 4, 2, 8)) == 11
    assert num_warm_up(PipelineShape(3, 4, 2, 8)) == 5
    assert num_warm_up(PipelineShape(0, 2, 2, 2)) == 4  # all there are


def test_as_many_micro_batches_as_ranks_go_through_a_chunk_together():
    shape = PipelineShape(1, 2, 3, 4)
    assert forward_order(shape) == [
        *[(0, 0), (1, 0), (0, 1), (1, 1), (0, 2), (1, 2)],
        *[(2, 0), (3, 0), (2, 1), (3, 1), (2, 2), (3, 2)],
    ]
    assert backward_order(shape) == [
        *[(0, 2), (1, 2), (0, 1), (1, 1), (0, 0), (1, 0)],
        *[(2, 2), (3, 2), (2, 1), (3, 1), (2, 0), (3, 0)],
    ]


@pytest.mark.parametrize(
    "shape, text",
    [
        ((2, 2, 1, 2), "schedule: rank 2 of a pipeline of 2"),
        ((-1, 2, 1, 2), "schedule: rank -1 of a pipeline of 2"),
        ((0, 0, 1, 2), "schedule: rank 0 of a pipeline of 0"),
        ((0, 2, 0, 2), "schedule: 0 chunks (at least 1)"),
        (
            (0, 2, 1, 3),
            "schedule: 3 micro-batches in a pipeline of 2 ranks (a multiple of them)",
        ),
        (
            (0, 2, 1, 0),
            "schedule: 0 micro-batches in a pipeline of 2 ranks (a multiple of them)",
        ),
    ],
)
def test_shapes_that_are_none(shape, text):
    with pytest.raises(ValueError) as caught:
        PipelineShape(*shape)
    assert str(caught.value).startswith(text + " ")  # where it was found follows


def _steps(shape, group, kinds, **options):
    """Steps that one rank of a pipeline issues, and what it sends; it receives zeros."""
    part = pipelines.Part(cases.model(group, kinds, **options), shape)
    batches = [cases.batch(0, i) for i in range(shape.num_micro_batches)]
    sent = []
    link = PointToPoint(
        receive_forward=lambda stage: torch.zeros(pipelines.HIDDEN),
        send_forward=lambda stage, x: sent.append(("forward", *stage)),
        receive_backward=lambda stage: torch.zeros(pipelines.HIDDEN),
        send_backward=lambda stage, x: sent.append(("backward", *stage)),
    )
    with record_issue_order() as steps:
        combined_1f1b_schedule_for_interleaved_pipelining(shape, partial(part.build, batches), link)
    return [str(step) for step in steps], sent


def _runs(rank, num_ranks, group, shape):
    """Forwards (F) and backwards (B) of chunks, in the order of the steps that begin them."""
    shape = PipelineShape(*shape)
    steps, _ = _steps(shape, group, "d" * shape.num_ranks * shape.num_chunks)
    runs = []
    for step in steps:
        chunk, _, what = step.rpartition(".L0.")
        if what == "pre_dispatch_computation.fwd":
            runs.append(f"F {chunk}")
        elif what == "mlp.bwd":
            runs.append(f"B {chunk}")
    return runs


def test_pairs_of_a_forward_and_a_backward(ranks):
    assert ranks(_runs, 1, (1, 2, 2, 4))[0] == [
        *["F m0.c0", "F m1.c0", "F m0.c1"],  # warm-up
        *["F m1.c1", "B m0.c1", "F m2.c0", "B m1.c1"],  # pairs
        *["F m3.c0", "B m0.c0", "F m2.c1", "B m1.c0", "F m3.c1", "B m2.c1"],
        *["B m3.c1", "B m2.c0", "B m3.c0"],
    ]
    assert ranks(_runs, 1, (0, 2, 2, 4))[0] == [
        *["F m0.c0", "F m1.c0", "F m0.c1", "F m1.c1", "F m2.c0"],
        *["F m3.c0", "B m0.c1", "F m2.c1", "B m1.c1", "F m3.c1", "B m0.c0"],
        *["B m1.c0", "B m2.c1", "B m3.c1", "B m2.c0", "B m3.c0"],
    ]


def _hooks(rank, num_ranks, group, shape):
    steps, sent = _steps(PipelineShape(*shape), group, "dddd")
    names = {step.split(".", 1)[1] for step in steps if ".pre_f" in step or ".post_f" in step}
    names |= {step.split(".", 1)[1] for step in steps if "_backward" in step and ".L" not in step}
    return names, sorted(sent)


def test_nothing_is_transferred_beyond_the_ends(ranks):
    first, first_sent = ranks(_hooks, 1, (0, 2, 2, 2))[0]
    last, last_sent = ranks(_hooks, 1, (1, 2, 2, 2))[0]
    assert first == {
        *["c0.post_forward [comm]", "c0.pre_backward"],
        *["c1.pre_forward", "c1.post_forward [comm]", "c1.pre_backward", "c1.post_backward"],
    }
    assert last == {
        *["c0.pre_forward", "c0.post_forward [comm]", "c0.pre_backward", "c0.post_backward"],
        *["c1.pre_forward", "c1.post_backward"],
    }
    assert first_sent == [
        *[("backward", 0, 1), ("backward", 1, 1)],
        *[("forward", 0, 0), ("forward", 0, 1), ("forward", 1, 0), ("forward", 1, 1)],
    ]
    assert last_sent == [
        *[("backward", 0, 0), ("backward", 0, 1), ("backward", 1, 0), ("backward", 1, 1)],
        *[("forward", 0, 0), ("forward", 1, 0)],
    ]


def _pair(rank, num_ranks, group):
    """All steps of the second pair: a forward in the first chunk, a backward in the last."""
    steps, _ = _steps(PipelineShape(1, 2, 2, 4), group, "mmmm", delay=True)
    first = steps.index("m3.c0.pre_forward")
    return steps[first : steps.index("m2.c1.pre_forward")]


def test_every_step_of_a_pair(ranks):
    assert ranks(_pair, 1)[0] == [
        "m3.c0.pre_forward",
        "m3.c0.pre_process.fwd",
        "m0.c0.pre_backward",
        "m0.c0.L0.moe_combine.bwd [comm]",
        "m3.c0.L0.pre_dispatch_computation.fwd",
        "m0.c0.L0.mlp.bwd",
        "m3.c0.L0.moe_dispatch.fwd [comm]",
        "m0.c0.L0.mlp.backward_dw",
        "m0.c0.L0.moe_dispatch.bwd [comm]",
        "m3.c0.L0.mlp.fwd",
        "m3.c0.L0.moe_combine.fwd [comm]",
        "m0.c0.L0.pre_dispatch_computation.bwd",
        "m3.c0.post_forward [comm]",
        "m0.c0.post_backward",
        "m0.c0.L0.pre_dispatch_computation.backward_dw",
        "m0.c0.pre_process.bwd",
    ]
