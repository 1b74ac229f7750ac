# SPDX-License-Identifier: Apache-2.0
"""Events and the stream rules, as far as they show without a GPU."""

import pytest
import torch

from weft.compat.deep_ep import Buffer, EventHandle, EventOverlap, utils
from weft.streams import CommStream


class Recorder:
    """Stands for an event handle."""

    def __init__(self):
        self.waits = 0

    def current_stream_wait(self):
        self.waits += 1


def test_utils_has_the_same_names():
    assert utils.EventHandle is EventHandle and utils.EventOverlap is EventOverlap


def test_handle_can_be_made_and_waited_for_without_a_gpu():
    EventHandle().current_stream_wait()
    EventOverlap(EventHandle()).current_stream_wait()
    assert isinstance(Buffer.capture(), EventOverlap)


def test_overlap_without_event_has_nothing_to_wait_for():
    overlap = EventOverlap()
    assert overlap.event is None and overlap.extra_tensors is None
    with pytest.raises(AssertionError, match="event is None"):
        overlap.current_stream_wait()
    with overlap:
        pass


def test_overlap_waits_at_the_end_of_its_context():
    event = Recorder()
    with EventOverlap(event) as overlap:
        assert event.waits == 0
    assert event.waits == 1 and overlap.event is event


def test_handle_is_released_on_request():
    event, tensors = Recorder(), (torch.zeros(1),)
    overlap = EventOverlap(event, tensors)
    assert overlap.extra_tensors is tensors
    with overlap(release_handle=True):
        pass
    assert event.waits == 1 and overlap.event is None and overlap.extra_tensors is None
    kept = EventOverlap(event)
    kept.current_stream_wait()
    assert kept.event is event
    kept.current_stream_wait(release_handle=True)
    assert kept.event is None


def test_hook_runs_once_after_the_wait():
    event, seen = Recorder(), []
    overlap = EventOverlap(event)
    overlap.register_hook_after_wait(lambda: seen.append(event.waits))
    with pytest.raises(AssertionError, match="already"):
        overlap.register_hook_after_wait(lambda: None)
    overlap.current_stream_wait()
    overlap.current_stream_wait()
    assert seen == [1]


def test_allocation_on_the_comm_stream_needs_an_event_and_async_finish():
    stream, cpu = CommStream(), torch.device("cpu")
    event = EventOverlap(EventHandle())
    with stream.call(
        cpu, previous_event=event, async_finish=True, allocate_on_comm_stream=True
    ) as call:
        pass
    assert call.event is None
    for previous_event, async_finish in ((None, True), (EventOverlap(), True), (event, False)):
        options = {"async_finish": async_finish, "allocate_on_comm_stream": True}
        with pytest.raises(AssertionError, match="allocate_on_comm_stream"):
            with stream.call(cpu, previous_event=previous_event, **options):
                pass


def test_errors_pass_through_a_call():
    with pytest.raises(KeyError), CommStream().call(torch.device("cpu")):
        raise KeyError


class FakeStream:
    """Notes what it is asked to wait for."""

    def __init__(self, name, log):
        self.name, self.device, self._log = name, torch.device("cuda", 0), log
        self.device_index, self.cuda_stream = 0, name  # a name for a handle

    def wait_stream(self, other):
        self._log.append(f"{self.name} waits for {other.name}")

    def record_event(self):
        self._log.append(f"event on {self.name}")
        return f"event on {self.name}"


class FakeTensor:
    is_cuda = True

    def __init__(self, name, log):
        self._name, self._log = name, log

    def record_stream(self, stream):
        self._log.append(f"{self._name} is used on {stream.name}")


@pytest.fixture
def gpu(monkeypatch):
    """A log of what happens to streams, with a caller's stream and a communication stream."""
    log = []
    current = [FakeStream("caller", log)]

    class Switch:
        def __init__(self, stream):
            self._stream = stream

        def __enter__(self):
            current.append(self._stream)

        def __exit__(self, *_):
            current.pop()

    def new_stream(device, priority):
        assert priority < 0
        return FakeStream("comm", log)

    monkeypatch.setattr(torch.cuda, "Stream", new_stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: current[-1])
    monkeypatch.setattr(torch.cuda, "stream", Switch)
    handle = lambda index: current[-1].cuda_stream  # noqa: E731
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", handle, raising=False)
    return log, lambda: current[-1].name


def on_gpu(gpu, fails=False, **options):
    log, current = gpu
    inputs = (FakeTensor("input", log), None, torch.zeros(1))
    with CommStream().call(torch.device("cuda", 0), inputs, **options) as call:
        log.append(f"work on {current()}")
        call.returns(FakeTensor("output", log), None)
        if fails:
            raise KeyError
    assert current() == "caller"
    return call


class StreamEvent:
    def __init__(self, gpu):
        self._gpu = gpu

    def current_stream_wait(self):
        log, current = self._gpu
        log.append(f"{current()} waits for the event")


def test_work_that_nothing_can_happen_beside_runs_on_the_current_stream(gpu):
    assert on_gpu(gpu).event is None
    assert gpu[0] == ["work on caller"]


def test_asynchronous_work_follows_all_that_the_current_stream_was_given(gpu):
    assert on_gpu(gpu, async_finish=True).event == "event on comm"
    assert gpu[0][:2] == ["comm waits for caller", "work on comm"]


def test_previous_event_replaces_the_wait_for_the_current_stream(gpu):
    on_gpu(gpu, previous_event=EventOverlap(StreamEvent(gpu)))
    assert gpu[0][:2] == ["comm waits for the event", "work on comm"]
    assert gpu[0][-1] == "caller waits for comm"


def test_asynchronous_work_ends_with_an_event(gpu):
    call = on_gpu(
        gpu,
        previous_event=StreamEvent(gpu),
        async_finish=True,
        allocate_on_comm_stream=True,
    )
    assert call.event == "event on comm"
    assert gpu[0] == [
        "comm waits for the event",
        "work on comm",
        "output is used on caller",
        "input is used on comm",
        "event on comm",
    ]


def test_after_an_error_the_caller_waits(gpu):
    with pytest.raises(KeyError):
        on_gpu(gpu, fails=True, async_finish=True)
    assert gpu[0][-1] == "caller waits for comm" and gpu[1]() == "caller"
