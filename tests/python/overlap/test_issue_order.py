# SPDX-License-Identifier: Apache-2.0
"""The order in which nodes are issued, step by step, and on which lane."""

from contextlib import contextmanager

import overlap_cases as cases
import pytest
import torch

from weft.overlap import (
    TransformerLayer,
    TransformerModelChunkSchedulePlan,
    combined_1f1b_schedule_for_no_pipelining,
    record_issue_order,
)

run = TransformerModelChunkSchedulePlan.run


def two_chunks(group, f_kinds, b_kinds, hooks=False, **options):
    """Issue order of one combined run of micro-batches f and b."""
    f_model = cases.model(group, f_kinds, **options)
    b_model = f_model if f_kinds == b_kinds else cases.model(group, b_kinds, **options)
    b = b_model.build_schedule_plan(**cases.batch(0, 0), name="b")
    loss = run(b, None)
    f = f_model.build_schedule_plan(**cases.batch(0, 1), name="f")
    with record_issue_order() as steps:
        called = {}
        if hooks:
            for name in ("pre_forward", "pre_backward", "post_forward", "post_backward"):
                called[name] = lambda *args, name=name: steps.append(f"{name} is called")
        run(f, b, torch.ones_like(loss), **called)
    return [str(step) for step in steps]


def _order(rank, num_ranks, group, args, options):
    return two_chunks(group, *args, **options)


MOE_LAYER = [
    "b.L0.moe_combine.bwd [comm]",
    "f.L0.pre_dispatch_computation.fwd",
    "b.L0.mlp.bwd",
    "f.L0.moe_dispatch.fwd [comm]",
    "b.L0.mlp.backward_dw",
    "b.L0.moe_dispatch.bwd [comm]",
    "f.L0.mlp.fwd",
    "f.L0.moe_combine.fwd [comm]",
    "b.L0.pre_dispatch_computation.bwd",
]
AROUND = (
    ["f.pre_process.fwd", "b.post_process.bwd"],
    [
        "b.L0.pre_dispatch_computation.backward_dw",
        "f.post_process.fwd",
        "b.pre_process.bwd",
    ],
)


@pytest.mark.parametrize("dispatcher", ["alltoall", "hybridep"])
def test_moe_layer(ranks, dispatcher):
    options = {"delay": True, "dispatcher": dispatcher}
    expected = AROUND[0] + MOE_LAYER + AROUND[1]
    assert ranks(_order, 2, ("m", "m"), options) == [expected, expected]


def test_early_release(ranks):
    options = {"ep_overlap_early_attn_memory_release": True}
    assert ranks(_order, 1, ("m", "m"), options)[0][2:-2] == [
        "b.L0.moe_combine.bwd [comm]",
        "f.L0.pre_dispatch_computation.fwd",
        "b.L0.mlp.bwd",
        "f.L0.moe_dispatch.fwd [comm]",
        "b.L0.mlp.backward_dw",
        "b.L0.moe_dispatch.bwd [comm]",
        "b.L0.pre_dispatch_computation.bwd",
        "f.L0.mlp.fwd",
        "f.L0.moe_combine.fwd [comm]",
        "b.L0.pre_dispatch_computation.backward_dw",
    ]


def test_dense_layer(ranks):
    assert ranks(_order, 1, ("d", "d"), {"delay": True})[0] == [
        *AROUND[0],
        "f.L0.pre_dispatch_computation.fwd",
        "b.L0.mlp.bwd",
        "b.L0.mlp.backward_dw",
        "f.L0.mlp.fwd",
        "b.L0.pre_dispatch_computation.bwd",
        *AROUND[1],
    ]


class _SeveralTokens(TransformerLayer):
    def mtp_post_process(self, x):
        return x * 2


def _several_tokens(rank, num_ranks, group):
    made = cases.model(group, "m")
    made.layers[0].__class__ = _SeveralTokens
    b = made.build_schedule_plan(**cases.batch(rank, 0), name="b")
    loss = run(b, None)
    f = made.build_schedule_plan(**cases.batch(rank, 1), name="f")
    with record_issue_order() as steps:
        run(f, b, torch.ones_like(loss))
    order = [str(step) for step in steps if "backward_dw" not in step]
    layer = [step for step in MOE_LAYER if "backward_dw" not in step]
    extra = "L0.mtp_post_process"
    expected = [*AROUND[0], f"b.{extra}.bwd", *layer, f"f.{extra}.fwd", *AROUND[1][1:]]
    assert order == expected


def test_layer_that_predicts_several_tokens(ranks):
    ranks(_several_tokens, 1)


def test_chunk_pairs_the_first_layer_with_the_last(ranks):
    """Layer 0 of f is MoE and meets the dense layer 1 of b; then the other way round."""
    hooks = {"delay": True, "hooks": True}
    assert ranks(_order, 1, ("md", "md"), hooks)[0] == [
        "f.pre_forward",
        "pre_forward is called",
        "f.pre_process.fwd",
        "b.pre_backward",
        "pre_backward is called",
        "b.post_process.bwd",
        "f.L0.pre_dispatch_computation.fwd",
        "b.L1.mlp.bwd",
        "f.L0.moe_dispatch.fwd [comm]",
        "b.L1.mlp.backward_dw",
        "f.L0.mlp.fwd",
        "f.L0.moe_combine.fwd [comm]",
        "b.L1.pre_dispatch_computation.bwd",
        "b.L1.pre_dispatch_computation.backward_dw",
        "b.L0.moe_combine.bwd [comm]",
        "f.L1.pre_dispatch_computation.fwd",
        "b.L0.mlp.bwd",
        "b.L0.mlp.backward_dw",
        "b.L0.moe_dispatch.bwd [comm]",
        "f.L1.mlp.fwd",
        "b.L0.pre_dispatch_computation.bwd",
        "f.post_forward [comm]",
        "post_forward is called",
        "b.post_backward",
        "post_backward is called",
        "b.L0.pre_dispatch_computation.backward_dw",
        "f.post_process.fwd",
        "b.pre_process.bwd",
    ]


@pytest.mark.parametrize("f_kinds,b_kinds", [("d", "dd"), ("dd", "d")])
def test_layers_left_over_run_alone(ranks, f_kinds, b_kinds):
    order = ranks(_order, 1, (f_kinds, b_kinds), {})[0]
    rest = {
        "d": ["b.L0.mlp.bwd", "b.L0.mlp.backward_dw", "b.L0.pre_dispatch_computation.bwd"],
        "dd": ["f.L1.pre_dispatch_computation.fwd", "f.L1.mlp.fwd"],
    }[f_kinds]
    begin = order.index(rest[0])
    assert order[begin : begin + len(rest)] == rest
    assert not any("L" in step.split(".")[1] for step in order[begin + len(rest) :][1:])


def _schedules(rank, num_ranks, group):
    """Order of the forwards and backwards of three micro-batches."""
    made = cases.model(group, "d")
    batches = [cases.batch(rank, i) for i in range(3)]
    ends = {("post_process", "fwd"): "F", ("pre_process", "bwd"): "B"}

    def order(way):
        with record_issue_order() as steps:
            way(made, batches, 1.0)
        return [ends[step[1:3]] + step.chunk[1:] for step in steps if step[1:3] in ends]

    return order(cases.overlapped), order(cases.sequential)


def test_schedules_without_a_pipeline(ranks):
    overlapped, sequential = ranks(_schedules, 1)[0]
    assert overlapped == ["F0", "F1", "B0", "F2", "B1", "B2"]
    assert sequential == ["F0", "B0", "F1", "B1", "F2", "B2"]


def _hooks(rank, num_ranks, group):
    """Arguments of hooks; checks the gradient of a stage's input."""
    made = cases.model(group, "m")
    made.vp_stage = 3
    ids = cases.batch(rank, 0)
    x = torch.randn(cases.SEQUENCE, cases.BATCH, cases.H, requires_grad=True)
    expected = made(**{**ids, "decoder_input": x})
    expected.backward()
    grad, x.grad = x.grad, None
    seen = []
    plan = made.build_schedule_plan(**ids, decoder_input=x)
    out = run(plan, None, post_forward=lambda y, stage: seen.append((tuple(y.shape), stage)))
    run(
        None,
        plan,
        torch.ones_like(out),
        pre_backward=lambda stage: seen.append(stage),
        post_backward=lambda g, stage: seen.append((torch.equal(g, grad), stage)),
    )
    assert torch.equal(out, expected) and torch.equal(x.grad, grad)
    return seen


def test_hooks_of_a_pipeline(ranks):
    shape = (cases.SEQUENCE, cases.BATCH, cases.H)
    assert ranks(_hooks, 2) == [[(shape, 3), 3, (True, 3)]] * 2


def _no_sync(rank, num_ranks, group):
    made = cases.model(group, "d")
    log = []

    @contextmanager
    def no_sync():
        log.append("enter")
        yield
        log.append("exit")

    made.embedding.tokens.weight.register_post_accumulate_grad_hook(lambda p: log.append("B"))
    combined_1f1b_schedule_for_no_pipelining(
        lambda i: made.build_schedule_plan(**cases.batch(rank, i)), 3, no_sync_func=no_sync
    )
    return log


def test_only_the_last_backward_is_outside_no_sync(ranks):
    assert ranks(_no_sync, 1)[0] == ["enter", "B", "B", "exit", "B"]
