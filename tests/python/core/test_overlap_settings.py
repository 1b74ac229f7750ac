# SPDX-License-Identifier: Apache-2.0
"""How an exchange runs that shares the GPU: its multiprocessors, and whether by copy engines."""

import threading
from types import SimpleNamespace

import pytest
import torch

import weft
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
    "name, count, sms, copied",
    [("NVIDIA H200", 132, 32, 64), ("another", 132, 32, 64), ("small", 4, 2, 2)],
)
def test_a_part_of_the_gpu(gpu, name, count, sms, copied):
    gpu(name, count)
    assert beside.usual_sms() == beside.usual_sms(True) == 0
    with beside.beside_computation():
        assert beside.usual_sms() == sms
        assert beside.usual_sms(True) == copied
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
    monkeypatch.setattr(beside, "sms_beside_computation", lambda: (48, 64))
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


@pytest.fixture
def choose(monkeypatch):
    def choose(choice):
        monkeypatch.setenv("WEFT_COPY_ENGINES", choice)
        beside._copies.cache_clear()

    yield choose
    beside._copies.cache_clear()


@pytest.mark.parametrize(
    "choice, short, long", [("auto", False, True), ("never", False, False), ("always", True, True)]
)
def test_copy_engines_beside_computation_alone(choose, choice, short, long):
    choose(choice)
    assert not beside.usual_copies(7168, 2)
    with beside.beside_computation():
        assert beside.usual_copies(2032, 2) is short
        assert beside.usual_copies(7168, 2) is long
        assert beside.usual_copies(7168, 8) is long
        assert beside.usual_copies(7168, 9) is short
    assert not beside.usual_copies(7168, 2)


def test_refuses_another_choice(choose):
    choose("")
    with beside.beside_computation():
        assert beside.usual_copies(7168, 2)
    choose("sometimes")
    with beside.beside_computation(), pytest.raises(ValueError, match="sometimes .expected one of"):
        beside.usual_copies(7168, 2)


def on_a_cpu(rank, num_ranks, group):
    exchange = weft.Exchange(group, hidden=8, num_experts=2, copy_engines=True)
    x = torch.randn(3, 8)
    with beside.beside_computation():
        plan = exchange.plan(torch.tensor([[0], [1], [1]]))
        rows = weft.dispatch(plan, x, copy_engines=True).rows
        assert torch.equal(weft.combine(plan, rows, copy_engines=True).x, x)
    assert exchange.stats()["num_copied"] == 0

    def full():
        raise weft.Error("no room", "out of memory")

    core, exchange._make = exchange.core, full
    with pytest.warns(UserWarning, match="no calls by copy engines: no room"):
        assert not exchange._make_copy_room()
    assert exchange.core is core
    with pytest.raises(weft.InvalidArgument, match="copy_engines = "):
        weft.Exchange(group, hidden=8, num_experts=2, copy_engines=rank == 0)


def test_have_no_meaning_on_a_cpu(ranks, choose):
    choose("always")
    ranks(on_a_cpu, 2)
