# SPDX-License-Identifier: Apache-2.0
"""A node that throws: nothing more is issued, all is freed, everything can be used again."""

import gc
import weakref

import overlap_cases as cases
import pytest
import torch

from weft.overlap import (
    TransformerModelChunkSchedulePlan,
    combined_1f1b_schedule_for_no_pipelining,
    record_issue_order,
)
from weft.overlap.wgrad import DelayedWgradModule

run = TransformerModelChunkSchedulePlan.run


class Broken(Exception):
    pass


def _break(plan, layer, name, what, watched):
    """Has a node throw, after noting what the nodes hold then."""
    node = getattr(plan, name) if layer is None else getattr(plan.layers[layer], name)

    def broken(*args):
        for layer_plan in plan.layers:
            for other in layer_plan.NODES:
                for tensor in getattr(getattr(layer_plan, other), "inputs", None) or ():
                    watched.append(weakref.ref(tensor))
        raise Broken(f"{name}.{what}")

    if what == "fwd":
        node.forward_func = broken
    elif what == "bwd":
        node.backward_func = broken
    else:
        node.bwd_dw_callables.insert(0, type("Module", (), {"backward_dw": broken})())


def _failure(rank, num_ranks, group, dispatcher, place):
    options = {"kinds": "mm", "dispatcher": dispatcher, "shared": True, "delay": True}
    whose, layer, name, what = place
    made = cases.model(group, **options)
    b = made.build_schedule_plan(**cases.batch(rank, 0), name="b")
    loss = run(b, None)
    f = made.build_schedule_plan(**cases.batch(rank, 1), name="f")
    watched = []
    _break(f if whose == "f" else b, layer, name, what, watched)
    with record_issue_order() as steps:
        try:
            run(f, b, torch.ones_like(loss))
        except Broken as error:
            assert str(error) == f"{name}.{what}"
            error.__traceback__ = None  # its frames hold what they were working on
        else:
            raise AssertionError("nothing was raised")
    last = steps[-1]
    assert (last.chunk, last.node.split(".")[-1], last.what) == (whose, name, what)
    gc.collect()
    alive = [tensor for tensor in (ref() for ref in watched) if tensor is not None]
    assert watched and not alive, f"{len(alive)} of {len(watched)} tensors are held"
    for plan in (f, b):
        assert plan.state.input_ids is None
        for layer_plan in plan.layers:
            for other in layer_plan.NODES:
                assert getattr(getattr(layer_plan, other), "output", None) is None
            manager = getattr(layer_plan.layer.dispatcher, "_comm_manager", None)
            assert manager is None or manager.handle is None and manager.token_probs is None
    for module in made.modules():
        assert not isinstance(module, DelayedWgradModule) or len(module.wgrad_queue) == 0

    # The same model and the same group, as if nothing had been.
    fresh = cases.train(cases.model(group, **options), cases.plain, rank, 2)
    cases.assert_same_bits(cases.train(made, cases.overlapped, rank, 2), fresh)


PLACES = [
    ("f", 0, "pre_dispatch_computation", "fwd"),
    ("f", 0, "moe_dispatch", "fwd"),
    ("f", 1, "mlp", "fwd"),
    ("f", 1, "moe_combine", "fwd"),
    ("b", 1, "moe_combine", "bwd"),
    ("b", 1, "mlp", "bwd"),
    ("b", 0, "mlp", "backward_dw"),
    ("b", 0, "moe_dispatch", "bwd"),
    ("b", 0, "pre_dispatch_computation", "bwd"),
    ("f", None, "post_process", "fwd"),
]


@pytest.mark.parametrize("dispatcher", ["alltoall", "hybridep"])
@pytest.mark.parametrize("place", PLACES, ids=lambda place: ".".join(map(str, place)))
def test_node_that_throws(ranks, dispatcher, place):
    ranks(_failure, 2, dispatcher, place)


def _arguments(rank, num_ranks, group):
    """Arguments go by position as in Megatron-LM's models; those of no use here are refused."""
    made = cases.model(group, "m")
    ids = torch.zeros(1, 3, dtype=torch.long)
    plan = made.build_schedule_plan(ids, None, None, None, ids, None, None, {}, None, None)
    assert plan.state.labels is ids and plan.state.decoder_input is None
    for name in ("inference_context", "inference_params", "packed_seq_params"):
        with pytest.raises(NotImplementedError):
            made.build_schedule_plan(ids, **{name: object()})


def test_arguments_of_a_plan(ranks):
    ranks(_arguments, 1)


def _hook(rank, num_ranks, group):
    made = cases.model(group, "m")
    plan = made.build_schedule_plan(**cases.batch(rank, 0))

    def broken(*args):
        raise Broken("hook")

    with pytest.raises(Broken, match="hook"):
        run(plan, None, post_forward=broken)
    assert plan.layers[0].mlp.output is None
    with pytest.raises(AssertionError, match="no gradient"):
        run(None, made.build_schedule_plan(**cases.batch(rank, 0)))


def test_hook_that_throws(ranks):
    ranks(_hook, 1)


def _builder(rank, num_ranks, group):
    """The builder of the plans throws while a forward waits for its backward."""
    made = cases.model(group, "m")
    plans = []

    def build(i):
        if i == 2:
            raise Broken("data")
        plans.append(made.build_schedule_plan(**cases.batch(rank, i)))
        return plans[-1]

    with pytest.raises(Broken, match="data"):
        combined_1f1b_schedule_for_no_pipelining(build, 3)
    assert all(plan.layers[0].mlp.output is None for plan in plans) and len(plans) == 2


def test_builder_that_throws(ranks):
    ranks(_builder, 1)
