# SPDX-License-Identifier: Apache-2.0
"""How many multiprocessors an exchange takes that shares the GPU."""

import threading
from types import SimpleNamespace

import pytest
import torch

from weft import beside
from weft.overlap import (
    ModelChunk,
    TransformerLayer,
    combined_1f1b_schedule_for_no_pipelining,
    sequential_schedule_for_no_pipelining,
)


@pytest.fixture
def gpu(monkeypatch):
    def make(name, count):
        properties = SimpleNamespace(name=name, multi_processor_count=count)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
        beside._sms_of.cache_clear()

    yield make
    beside._sms_of.cache_clear()


@pytest.mark.parametrize(
    "name, count, sms", [("NVIDIA H200", 132, 32), ("another", 132, 32), ("small", 4, 2)]
)
def test_a_part_of_the_gpu(gpu, name, count, sms):
    gpu(name, count)
    assert beside.usual_sms() == 0
    with beside.beside_computation():
        assert beside.usual_sms() == sms
        with beside.beside_computation():
            pass
        seen = []
        thread = threading.Thread(target=lambda: seen.append(beside.usual_sms()))
        thread.start()
        thread.join()
        assert seen == [sms] and beside.usual_sms() == sms
    assert beside.usual_sms() == 0


def test_ends_with_an_error(gpu):
    gpu("NVIDIA H200", 132)
    with pytest.raises(KeyError), beside.beside_computation():
        raise KeyError
    assert beside.usual_sms() == 0


def test_nothing_without_a_gpu():
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with beside.beside_computation():
        assert beside.usual_sms() == 0


def test_only_a_pair_of_micro_batches_shares_the_gpu(monkeypatch):
    monkeypatch.setattr(beside, "sms_beside_computation", lambda: 48)
    seen = []

    class Attention(torch.nn.Linear):
        def forward(self, x):
            seen.append(beside.usual_sms())
            return super().forward(x)

    layer = TransformerLayer(Attention(4, 4), mlp=torch.nn.Linear(4, 4))
    model = ModelChunk([layer])
    inputs = torch.ones(3, 2, 4)

    def plan_of(i):
        return model.build_schedule_plan(None, decoder_input=inputs[i])

    combined_1f1b_schedule_for_no_pipelining(plan_of, 3)
    assert seen == [0, 48, 48]
    seen.clear()
    sequential_schedule_for_no_pipelining(plan_of, 3)
    assert seen == [0, 0, 0]
