# SPDX-License-Identifier: Apache-2.0
"""Inputs that go after the forward; and a backward leaves nothing behind."""

import gc
import weakref

import overlap_cases as cases
import pytest
import torch

from weft.dispatcher import DispatcherConfig, MoEAlltoAllTokenDispatcher
from weft.overlap import FreedInputs, TransformerModelChunkSchedulePlan, freed_inputs

run = TransformerModelChunkSchedulePlan.run


class _Dispatcher:
    def __init__(self, config, num_local_experts):
        self.config, self.num_local_experts = config, num_local_experts


class _AllToAll(_Dispatcher, MoEAlltoAllTokenDispatcher):
    pass


def of(kind, num_local, in_graph=False, **options):
    config = DispatcherConfig(**options)
    if kind == "alltoall":
        return freed_inputs(_AllToAll(config, num_local), in_graph)
    config.moe_flex_dispatcher_backend = kind
    return freed_inputs(_Dispatcher(config, num_local), in_graph)


def test_rules():
    """moe_dispatch, mlp, moe_combine."""
    assert of("alltoall", 2) == FreedInputs(True, True, True)
    assert of("alltoall", 1) == FreedInputs(True, False, True)
    assert of("alltoall", 2, in_graph=True) == FreedInputs(False, True, True)
    for num_local in (1, 2):
        assert of("deepep", num_local) == FreedInputs(False, True, True)
        assert of("uccl_ep", num_local) == FreedInputs(False, True, True)
        assert of("hybridep", num_local) == FreedInputs(False, False, True)
        assert of("ncclep", num_local) == FreedInputs(False, False, True)
    assert not of("hybridep", 2, fp8=False, fp4=False).mlp
    for low in ({"fp8": "hybrid"}, {"fp4": "e2m1"}):
        assert of("alltoall", 1, **low).mlp and of("hybridep", 1, **low).mlp


def _freed(rank, num_ranks, group, dispatcher, num_experts):
    """Bytes of each node's input after the node's forward, as 0 or 1."""
    made = cases.model(group, "dm", dispatcher=dispatcher, num_experts=num_experts)
    plan = made.build_schedule_plan(**cases.batch(rank, 0))
    sizes = {}

    def watch(layer, name):
        node = getattr(plan.layers[layer], name)
        forward = node.forward

        def watched(inputs):
            given = inputs if isinstance(inputs, tuple) else (inputs,)
            out = forward(inputs)
            sizes[layer, name] = [int(t.untyped_storage().nbytes() > 0) for t in given]
            return out

        node.forward = watched

    for layer, names in enumerate((("pre_dispatch_computation", "mlp"), plan.layers[1].NODES)):
        for name in names:
            watch(layer, name)
    loss = run(plan, None)
    run(None, plan, torch.ones_like(loss))
    assert sizes.pop((0, "pre_dispatch_computation")) == sizes.pop((0, "mlp")) == [1]
    assert sizes.pop((1, "pre_dispatch_computation")) == sizes.pop((1, "mtp_post_process")) == [1]
    return [sizes[1, name] for name in ("moe_dispatch", "mlp", "moe_combine")]


@pytest.mark.parametrize(
    "dispatcher,num_experts,left",
    [
        ("alltoall", 4, [[0, 0], [0], [0]]),
        ("alltoall", 2, [[0, 0], [1], [0]]),
        # Rows that Weft received on a CPU are its own memory, so the rule for mlp has no effect.
        ("deepep", 4, [[1, 1], [1], [0]]),
        ("hybridep", 4, [[1, 1], [1], [0]]),
    ],
)
def test_inputs_are_freed(ranks, dispatcher, num_experts, left):
    assert ranks(_freed, 2, dispatcher, num_experts) == [left, left]


def test_one_rank_keeps_what_the_exchange_hands_on(ranks):
    assert ranks(_freed, 1, "alltoall", 4) == [[[1, 1], [0], [0]]]


def _nothing_left(rank, num_ranks, group, dispatcher, early):
    """Tensors of the forward are gone at the end of the backward, those of a layer with it."""
    config = {"ep_overlap_early_attn_memory_release": early}
    made = cases.model(group, "mm", dispatcher=dispatcher, shared=True, **config)
    plan = made.build_schedule_plan(**cases.batch(rank, 0))
    out = run(plan, None)
    grad = torch.ones_like(out)
    del out
    refs = [
        [weakref.ref(t) for name in layer.NODES for t in getattr(layer, name).inputs or ()]
        if layer
        else []
        for layer in [_with_inputs(layer) for layer in plan.layers]
    ]
    handed = [weakref.ref(t) for t in plan.layers[0].pre_dispatch_computation._copies]
    assert len(handed) == 2 and all(ref() is not None for ref in handed)
    alive_at = []

    def layer_ends(g):
        gc.collect()
        alive_at.append(sum(ref() is not None for ref in refs[1]))

    # The gradient of the input of layer 0's combine comes when layer 1 is done.
    plan.layers[0].moe_combine.output.register_hook(layer_ends)
    run(None, plan, grad)
    gc.collect()
    assert alive_at == [0] and len(refs[1]) >= 5
    assert plan.state.input_ids is plan.state.labels is plan.state.attention_mask is None
    assert not any(ref() is not None for layer in refs for ref in layer)
    assert not any(ref() is not None for ref in handed)


def _with_inputs(layer):
    for name in layer.NODES:
        node = getattr(layer, name)
        if not hasattr(node, "inputs"):
            node.inputs = ()
    return layer


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("dispatcher", ["alltoall", "hybridep", "ncclep"])
def test_backward_leaves_nothing(ranks, dispatcher, early):
    ranks(_nothing_left, 2, dispatcher, early)
