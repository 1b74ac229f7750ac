# SPDX-License-Identifier: Apache-2.0
"""Megatron-Core's pretraining over Weft: the losses of its own all-to-all, and the same bits by
both backends, run after run, and across a checkpoint. Ranks have texts of different lengths."""

import pytest

from packages import skip_without

skip_without("megatron", "megatron-core")  # not imported here: over_weft.py is to come first

BACKENDS = ("deepep", "hybridep")
WOVEN = {"overlap_moe_expert_parallel_comm": True, "bf16": True}  # the combined schedule


def trained(rank, num_ranks, group, run):
    import pretrain

    @pretrain.on_this_machine
    def call(rank, num_ranks, group):
        trainer = pretrain.Trainer(rank, num_ranks, pretrain.Run(*run))
        return [trainer.step() for _ in range(run[1])]

    return call(rank, num_ranks, group)


def resumed(rank, num_ranks, group, backend, folder):
    """Four steps; and two, a checkpoint, and two of another trainer."""
    import pretrain

    @pretrain.on_this_machine
    def call(rank, num_ranks, group):
        run, path = pretrain.Run(backend), f"{folder}/{rank}"
        whole = pretrain.Trainer(rank, num_ranks, run)
        steps = [whole.step() for _ in range(4)]
        first = pretrain.Trainer(rank, num_ranks, run)
        parts = [first.step() for _ in range(2)]
        first.save(path)
        second = pretrain.Trainer(rank, num_ranks, run)
        second.load(path)
        return steps, parts + [second.step() for _ in range(2)]

    return call(rank, num_ranks, group)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
        {"moe_router_pre_softmax": True, "moe_router_topk_scaling_factor": 2.5},
        WOVEN,
    ],
    ids=["plain", "recomputed", "scaled", "woven"],
)
def test_losses_are_those_of_all_to_all(ranks, settings):
    others = {} if settings is WOVEN else settings
    want = ranks(trained, 2, ("alltoall", 4, others))
    found = [ranks(trained, 2, (backend, 4, settings)) for backend in (*BACKENDS, BACKENDS[0])]
    assert found[0] == found[1] == found[2]
    for steps, others in zip(found[0], want, strict=True):
        for (losses, norm), (wanted, wanted_norm) in zip(steps, others, strict=True):
            assert losses == pytest.approx(wanted, rel=2e-4)
            assert norm == pytest.approx(wanted_norm, rel=2e-3)
    assert found[0][0][0][0] == pytest.approx(want[0][0][0], rel=1e-6)  # before any step


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_run_goes_on_from_a_checkpoint_with_the_same_bits(ranks, backend, tmp_path):
    for steps, parts in ranks(resumed, 2, backend, str(tmp_path)):
        assert len(steps) == 4 and steps == parts
