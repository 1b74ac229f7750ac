# SPDX-License-Identifier: Apache-2.0
"""The interleaved schedule stopped at each of its steps: all is freed, and it can run again."""

import gc
import weakref

import overlap_cases as cases
import pipeline_cases as pipelines
import torch

from weft.overlap import (
    PipelineShape,
    PointToPoint,
    combined_1f1b_schedule_for_interleaved_pipelining,
)
from weft.overlap.wgrad import DelayedWgradModule

SHAPE = PipelineShape(0, 1, 2, 3)
OPTIONS = {"kinds": "mm", "shared": True, "delay": True, "dispatcher": "hybridep"}


class Broken(Exception):
    pass


class Fuse:
    """Counts calls, and throws after the one numbered `last`; notes what they returned."""

    def __init__(self, last):
        self.last, self.calls = last, 0
        self.made = []

    def wrap(self, function):
        def fused(*args):
            result = function(*args)
            for value in result if isinstance(result, tuple) else (result,):
                if isinstance(value, torch.Tensor):
                    self.made.append(weakref.ref(value))
            self.calls += 1
            if self.calls == self.last:
                raise Broken(f"call {self.last}")
            return result

        return fused

    def wrap_plan(self, plan):
        nodes = [plan.pre_process, plan.post_process]
        for layer in plan.layers:
            nodes += [getattr(layer, name) for name in layer.NODES]
        for node in nodes:
            if hasattr(node, "forward_func"):
                node.forward_func = self.wrap(node.forward_func)
                node.backward_func = self.wrap(node.backward_func)
                node.bwd_dw_callables = [_Delayed(self, m) for m in node.bwd_dw_callables]
        return plan

    def wrap_link(self, link):
        return PointToPoint(*(self.wrap(getattr(link, name)) for name in link.__annotations__))


class _Delayed:
    def __init__(self, fuse, module):
        self.backward_dw = fuse.wrap(module.backward_dw)


def _step(part, fuse, plans):
    """One step of the schedule with every function in it under the fuse."""
    batches = [cases.batch(0, i) for i in range(SHAPE.num_micro_batches)]
    load = fuse.wrap(lambda stage: None)  # the data of a micro-batch

    def build(stage):
        load(stage)
        plans.append(part.build(batches, stage))
        return fuse.wrap_plan(plans[-1])

    return combined_1f1b_schedule_for_interleaved_pipelining(
        SHAPE,
        build,
        fuse.wrap_link(pipelines.Mail(SHAPE).link()),
        output_grad=fuse.wrap(torch.ones_like),
    )


def _assert_free(part, plans, fuse):
    for plan in plans:
        assert plan.state.input_ids is None and plan.state.decoder_input is None
        for layer in plan.layers:
            for name in layer.NODES:
                node = getattr(layer, name)
                assert getattr(node, "inputs", None) is None
                assert getattr(node, "output", None) is None
    for module in part.modules():
        assert not isinstance(module, DelayedWgradModule) or len(module.wgrad_queue) == 0
    alive = [tensor for tensor in (ref() for ref in fuse.made) if tensor is not None]
    assert not alive, f"{len(alive)} of {len(fuse.made)} tensors are held"


def _every_step(rank, num_ranks, group):
    """How many places there are to stop at."""
    part = pipelines.Part(cases.model(group, **OPTIONS), SHAPE)
    whole = Fuse(last=0)
    losses = _step(part, whole, [])
    assert len(losses) == SHAPE.num_micro_batches
    for last in range(1, whole.calls + 1):
        fuse, plans = Fuse(last), []
        try:
            _step(part, fuse, plans)
        except Broken as error:
            assert str(error) == f"call {last}"
            error.__traceback__ = None  # its frames hold what they were working on
        else:
            raise AssertionError(f"nothing was raised at call {last}")
        assert fuse.calls == last
        if last % 16 == 0:
            gc.collect()
        _assert_free(part, plans, fuse)

    # The same model and the same group, as if nothing had been.
    fresh = cases.train(cases.model(group, **OPTIONS), cases.plain, rank, 3, steps=1)
    seen = cases.train(part, pipelines.interleaved, rank, 3, steps=1)
    cases.assert_same_bits(seen, fresh)
    return whole.calls


def test_every_step_that_throws(ranks):
    calls = ranks(_every_step, 1)[0]
    assert calls > 100
