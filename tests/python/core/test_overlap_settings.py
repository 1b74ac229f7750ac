# SPDX-License-Identifier: Apache-2.0
"""How an exchange runs that shares the GPU: its multiprocessors, and whether by copy engines."""

import threading
from types import SimpleNamespace

import pytest
import torch

import weft
from weft import overlap_settings
from weft.overlap import (
    ModelChunk,
    TransformerLayer,
    combined_1f1b_schedule_for_no_pipelining,
    sequential_schedule_for_no_pipelining,
)


@pytest.fixture
def gpu(monkeypatch):
    def make(num_sms):
        properties = SimpleNamespace(multi_processor_count=num_sms)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)

    return make


@pytest.mark.parametrize("num_sms, sms, copied", [(132, 32, 64), (4, 2, 2)])
def test_a_part_of_the_gpu(gpu, num_sms, sms, copied):
    gpu(num_sms)
    assert overlap_settings.sms() == overlap_settings.sms(True) == 0
    with overlap_settings.overlapped():
        assert overlap_settings.sms() == sms
        assert overlap_settings.sms(True) == copied
        with overlap_settings.overlapped():
            pass
        seen = []
        thread = threading.Thread(target=lambda: seen.append(overlap_settings.sms()))
        thread.start()
        thread.join()
        assert seen == [sms] and overlap_settings.sms() == sms
    assert overlap_settings.sms() == 0


def test_ends_with_an_error(gpu):
    gpu(132)
    with pytest.raises(KeyError), overlap_settings.overlapped():
        raise KeyError
    assert overlap_settings.sms() == 0


def test_nothing_without_a_gpu():
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with overlap_settings.overlapped():
        assert overlap_settings.sms() == 0


def test_only_a_pair_of_micro_batches_shares_the_gpu(monkeypatch):
    monkeypatch.setattr(overlap_settings, "count_gpu_sms", lambda: 132)
    seen = []

    class Attention(torch.nn.Linear):
        def forward(self, x):
            seen.append(overlap_settings.sms())
            return super().forward(x)

    layer = TransformerLayer(Attention(4, 4), mlp=torch.nn.Linear(4, 4))
    model = ModelChunk([layer])
    inputs = torch.ones(3, 2, 4)

    def plan_of(i):
        return model.build_schedule_plan(None, decoder_input=inputs[i])

    combined_1f1b_schedule_for_no_pipelining(plan_of, 3)
    assert seen == [0, 32, 32]
    seen.clear()
    sequential_schedule_for_no_pipelining(plan_of, 3)
    assert seen == [0, 0, 0]


@pytest.fixture
def choose(monkeypatch):
    def choose(choice):
        monkeypatch.setenv("WEFT_COPY_ENGINES", choice)
        overlap_settings._copies.cache_clear()

    yield choose
    overlap_settings._copies.cache_clear()


@pytest.mark.parametrize(
    "choice, short, long", [("auto", False, True), ("never", False, False), ("always", True, True)]
)
def test_copy_engines_only_where_there_is_computation(choose, choice, short, long):
    choose(choice)
    assert not overlap_settings.copies(7168, 2)
    with overlap_settings.overlapped():
        assert overlap_settings.copies(2032, 2) is short
        assert overlap_settings.copies(7168, 2) is long
        assert overlap_settings.copies(7168, 8) is long
        assert overlap_settings.copies(7168, 9) is short
    assert not overlap_settings.copies(7168, 2)


def test_refuses_another_choice(choose):
    choose("")
    with overlap_settings.overlapped():
        assert overlap_settings.copies(7168, 2)
    choose("sometimes")
    with overlap_settings.overlapped(), pytest.raises(ValueError, match="sometimes. is not one of"):
        overlap_settings.copies(7168, 2)


def on_a_cpu(rank, num_ranks, group):
    exchange = weft.Exchange(group, hidden=8, num_experts=2, copy_engines=True)
    x = torch.randn(3, 8)
    with overlap_settings.overlapped():
        plan = exchange.plan(torch.tensor([[0], [1], [1]]))
        rows = weft.dispatch(plan, x, copy_engines=True).rows
        assert torch.equal(weft.combine(plan, rows, copy_engines=True).x, x)
    assert exchange.stats()["num_copied"] == 0

    def full(*_):
        raise weft.Error("no room", "out of memory")

    core, exchange._make = exchange.core, full
    with pytest.warns(UserWarning, match="no calls by copy engines: no room"):
        assert not exchange._make_copy_room(exchange.max_tokens, exchange.max_topk)
    assert exchange.core is core
    with pytest.raises(weft.InvalidArgument, match="copy_engines = "):
        weft.Exchange(group, hidden=8, num_experts=2, copy_engines=rank == 0)


def test_have_no_meaning_on_a_cpu(ranks, choose):
    choose("always")
    ranks(on_a_cpu, 2)
