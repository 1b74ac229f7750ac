# SPDX-License-Identifier: Apache-2.0
"""One node: detached inputs, gradients, tensors handed aside, memory, streams."""

import gc
import weakref

import pytest
import torch

from weft.overlap import (
    NoopScheduleNode,
    ScheduleNode,
    TransformerLayerNode,
    get_comm_stream,
    get_comp_stream,
    lanes,
    record_issue_order,
    set_streams,
)


def node(function, **options):
    return ScheduleNode(function, get_comp_stream, lanes.new_event(), **options)


def test_inputs_are_detached_and_their_gradients_returned():
    weight = torch.nn.Parameter(torch.tensor([2.0, 3.0]))
    before = torch.ones(2, requires_grad=True)
    x = before * 5
    fixed = torch.ones(2)
    made = node(lambda a, b: (a * weight + b, a * a))
    y, squared = made.forward((x, fixed))
    assert torch.equal(y, torch.tensor([11.0, 16.0]))
    grad_x, grad_fixed = made.backward((torch.ones(2), torch.ones(2)))
    assert torch.equal(grad_x, torch.tensor([12.0, 13.0])) and grad_fixed is None
    assert torch.equal(weight.grad, torch.tensor([5.0, 5.0]))
    assert before.grad is None  # the graph ended at the node


def test_one_output_may_have_no_gradient():
    made = node(lambda a: (a * 2, a * 3))
    made.forward(torch.ones(1, requires_grad=True))
    assert made.backward((None, torch.ones(1))).item() == 3


def test_a_node_is_used_once():
    made = node(lambda a: a * 2, name="mlp")
    with pytest.raises(AssertionError, match="mlp: backward without a forward"):
        made.backward(torch.ones(1))
    made.forward(torch.ones(1, requires_grad=True))
    with pytest.raises(AssertionError, match="mlp: 2 gradients for 1 outputs"):
        made.backward((torch.ones(1), torch.ones(1)))
    made.backward(torch.ones(1))
    with pytest.raises(AssertionError, match="used once"):
        made.backward(torch.ones(1))


def test_backward_drops_everything():
    made = node(lambda a: a.exp())
    x = torch.ones(3, requires_grad=True) * 1
    out = made.forward(x)
    leaf, result = weakref.ref(made.inputs[0]), weakref.ref(out)
    made.backward(torch.ones(3))
    del out
    gc.collect()
    assert leaf() is None and result() is None


def test_own_backward():
    seen = []
    made = node(lambda a: a * 2, backward_func=lambda outs, grads: seen.append((outs, grads)))
    out = made.forward(torch.ones(1, requires_grad=True))
    assert made.backward(torch.ones(1)) is None
    assert seen[0][0][0] is out and seen[0][1][0].item() == 1


def test_input_is_freed():
    weight = torch.nn.Parameter(torch.full((8,), 2.0))
    x = torch.ones(8, requires_grad=True) * 1
    made = node(lambda a: a + weight, free_input=True)
    made.forward(x)
    assert x.untyped_storage().nbytes() == 0 and x.shape == (8,)
    assert torch.equal(made.backward(torch.ones(8)), torch.ones(8))


@pytest.mark.parametrize("is_kept_by_output", [True, False])
def test_input_that_an_output_lives_in_is_not_freed(is_kept_by_output):
    x = torch.ones(8, requires_grad=True) * 1
    y = torch.ones(8, requires_grad=True) * 1
    held = []

    def forward(self, a, b):
        held.append(self.detach(b))
        return a if is_kept_by_output else a * 2

    made = TransformerLayerNode(
        forward, get_comp_stream, lanes.new_event(), name="n", free_input=True
    )
    made.forward((x, y))
    assert x.untyped_storage().nbytes() == (32 if is_kept_by_output else 0)
    assert y.untyped_storage().nbytes() == 32 and torch.equal(held[0], torch.ones(8))


def test_memory_of_others_is_not_freed():
    x = torch.frombuffer(bytearray(16), dtype=torch.float32)
    node(lambda a: a * 2, free_input=True).forward(x)
    assert x.untyped_storage().nbytes() == 16


def test_gradient_of_a_tensor_handed_aside_is_fed_back():
    handed = []

    def forward(self, a):
        handed.append(self.detach(a * 3))
        return a * 2

    first = TransformerLayerNode(forward, get_comp_stream, lanes.new_event(), name="first")
    out = first.forward(torch.ones(2, requires_grad=True))
    later = node(lambda a: a * handed[0])
    later.forward(out)
    grad = later.backward(torch.ones(2))
    assert torch.equal(first.backward(grad), torch.full((2,), 3 * 2.0 + 2 * 3.0))


def test_hooks_come_after_the_work():
    order = []
    made = TransformerLayerNode(
        lambda self, a: order.append("forward") or a * 2,
        get_comp_stream,
        lanes.new_event(),
        name="n",
    )
    made.post_forward_hooks.append(lambda: order.append("reshard"))
    made.post_backward_hooks.append(lambda: order.append("reduce"))
    made.forward(torch.ones(1, requires_grad=True)).register_hook(lambda g: order.append("bwd"))
    made.backward(torch.ones(1))
    assert order == ["forward", "reshard", "bwd", "reduce"]


def test_noop():
    noop = NoopScheduleNode()
    x = torch.ones(1)
    assert noop.forward(x) is x and noop.backward(x) is x


class FakeEvent:
    def __init__(self, log):
        self.log = log

    def record(self, stream):
        self.log.append(("record", lanes.lane_of(stream)))

    def wait(self, stream):
        self.log.append(("wait", lanes.lane_of(stream)))


def test_streams_and_events(monkeypatch):
    """Each node waits for its micro-batch on its own stream, runs there, and moves it on."""
    log = []

    class On:
        def __init__(self, stream):
            self.stream = stream

        def __enter__(self):
            log.append(("on", lanes.lane_of(self.stream)))

        def __exit__(self, *error):
            log.append(("off", lanes.lane_of(self.stream)))

    monkeypatch.setattr(lanes, "on_stream", On)
    event = FakeEvent(log)
    comp = ScheduleNode(lambda a: log.append("work") or a * 2, get_comp_stream, event)
    comm = ScheduleNode(lambda a: log.append("move") or a * 2, get_comm_stream, event)
    with record_issue_order() as steps:
        comm.forward(comp.forward(torch.ones(1, requires_grad=True)))
        comp.backward(comm.backward(torch.ones(1)))
    around = {
        name: [("wait", name), ("on", name), ("off", name), ("record", name)]
        for name in ("comp", "comm")
    }
    forward = [
        *(around["comp"][:2] + ["work"] + around["comp"][2:]),
        *(around["comm"][:2] + ["move"] + around["comm"][2:]),
    ]
    assert log == forward + around["comm"] + around["comp"]
    assert [step.lane for step in steps] == ["comp", "comm", "comm", "comp"]


def test_one_communication_stream(monkeypatch):
    made = []

    def stream(priority):
        made.append(priority)
        return object()

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "Stream", stream)
    monkeypatch.setattr(lanes, "_comm_stream", None)
    set_streams(high_priority=True)
    first = get_comm_stream()
    set_streams()
    set_streams(object())
    assert get_comm_stream() is first
    assert len(made) == 1 and made[0] < 0
    monkeypatch.setattr(lanes, "_comm_stream", None)
    assert get_comm_stream() is not first and made[1] == 0
    monkeypatch.setattr(lanes, "_comm_stream", None)
    own = object()
    set_streams(own)
    assert get_comm_stream() is own and len(made) == 2
