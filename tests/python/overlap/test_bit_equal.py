# SPDX-License-Identifier: Apache-2.0
"""Overlapped, sequential and plain training give the same bits."""

import overlap_cases as cases
import pytest
import torch

from weft.overlap import DelayedLinear, TransformerLayer

DISPATCHERS = ["alltoall", "hybridep", "deepep", "deepepv2", "ncclep"]


def _training(rank, num_ranks, group, num_batches, options):
    expected = cases.train(cases.model(group, **options), cases.plain, rank, num_batches)
    for way in (cases.overlapped, cases.sequential):
        made = cases.model(group, **options)
        cases.assert_same_bits(cases.train(made, way, rank, num_batches), expected)
    moved = [name for name in expected if name.startswith("2 weight")]
    assert any(not torch.equal(expected[name], expected["0" + name[1:]]) for name in moved)
    return [float(expected[f"2 loss {i}"]) for i in range(num_batches)]


@pytest.mark.parametrize("num_batches", [1, 2, 3, 4])
@pytest.mark.parametrize("dispatcher", DISPATCHERS)
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_training(ranks, num_ranks, dispatcher, num_batches):
    options = {"kinds": "dmm", "dispatcher": dispatcher, "shared": True}
    losses = ranks(_training, num_ranks, num_batches, options)
    if num_ranks == 2:
        assert losses[0] != losses[1]  # the ranks have data of their own


@pytest.mark.parametrize("kinds", ["d", "m", "dd", "mdm"])
def test_layers(ranks, kinds):
    ranks(_training, 2, 3, {"kinds": kinds})


@pytest.mark.parametrize("dispatcher", DISPATCHERS)
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_delayed_weight_gradients(ranks, num_ranks, dispatcher):
    options = {"kinds": "dm", "dispatcher": dispatcher, "shared": True, "delay": True}
    ranks(_training, num_ranks, 3, options)


def _delay_changes_nothing(rank, num_ranks, group):
    at_once = cases.train(cases.model(group, shared=True), cases.overlapped, rank, 3)
    delayed = cases.train(cases.model(group, shared=True, delay=True), cases.overlapped, rank, 3)
    cases.assert_same_bits(delayed, at_once)


def test_delay_changes_nothing(ranks):
    ranks(_delay_changes_nothing, 2)


class _SeveralTokens(TransformerLayer):
    """After its output a linear layer of its own, and one that the model's output layer has."""

    def mtp_post_process(self, x):
        return x + self.lent[0](self.predict(x))

    def forward(self, x, mask=None):
        return self.mtp_post_process(super().forward(x, mask))

    def slot(self, node):
        return super().slot(node) + (self.lent if node == "pre_dispatch" else [])


def _delayed_after_the_layer(rank, num_ranks, group, kinds):
    def made():
        model = cases.model(group, kinds, delay=True, shared="m" in kinds)
        layer = model.layers[-1]
        layer.__class__ = _SeveralTokens
        layer.predict = DelayedLinear(cases.H, cases.H, delay_wgrad_compute=True)
        model.output_layer.extra = DelayedLinear(cases.H, cases.H, delay_wgrad_compute=True)
        layer.lent = [model.output_layer.extra]
        return model

    expected = cases.train(made(), cases.plain, rank, 3)
    for way in (cases.overlapped, cases.sequential):
        cases.assert_same_bits(cases.train(made(), way, rank, 3), expected)


@pytest.mark.parametrize("kinds", ["m", "dm", "md"])
def test_delayed_weight_gradients_after_a_layer(ranks, kinds):
    """The gradients are those of mtp_post_process, which has no turn for them."""
    ranks(_delayed_after_the_layer, 2, kinds)


@pytest.mark.parametrize("dispatcher", ["alltoall", "hybridep"])
def test_one_expert_on_each_rank(ranks, dispatcher):
    ranks(_training, 2, 2, {"kinds": "m", "dispatcher": dispatcher, "num_experts": 2})


def test_early_release_of_attention(ranks):
    options = {"kinds": "md", "ep_overlap_early_attn_memory_release": True, "delay": True}
    ranks(_training, 2, 3, options)


def _recompute(rank, num_ranks, group, delay):
    options = {"kinds": "dm", "shared": True, "delay": delay}
    kept = cases.train(cases.model(group, **options), cases.plain, rank, 3)
    pieces = ("core_attn", "layernorm", "mlp", "shared_experts", "moe_act")
    made = cases.model(group, recompute=pieces, **options)
    cases.assert_same_bits(cases.train(made, cases.overlapped, rank, 3), kept)


@pytest.mark.parametrize("delay", [False, True])
def test_recompute(ranks, delay):
    ranks(_recompute, 2, delay)


def _calls(rank, num_ranks, group, recompute):
    """How often each recomputed piece runs in one forward and backward, by way."""
    made = cases.model(group, "dm", shared=True, recompute=recompute)
    dense, moe = made.layers
    pieces = {
        "core_attn": moe.attention,
        "layernorm": moe.pre_mlp_norm,
        "mlp": dense.mlp,
        "shared_experts": moe.shared_experts,
    }
    calls = dict.fromkeys(pieces, 0)

    def count(name):
        def hook(module, args):
            calls[name] += 1

        return hook

    for name, piece in pieces.items():
        piece.register_forward_pre_hook(count(name))
    cases.overlapped(made, [cases.batch(rank, 0)], 1.0)
    return calls


@pytest.mark.parametrize("name", ["core_attn", "layernorm", "mlp", "shared_experts"])
def test_only_the_named_piece_is_recomputed(ranks, name):
    calls = ranks(_calls, 1, (name,))[0]
    assert calls == {other: 1 + (other == name) for other in calls}
