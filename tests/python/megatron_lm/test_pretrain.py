# SPDX-License-Identifier: Apache-2.0
"""Megatron-Core's pretraining over Weft: the losses of its own all-to-all, and the same bits by all
backends, run after run, and across a checkpoint. Ranks have texts of different lengths.

Megatron-Core 0.16.1 is installed; `make consumers` does the same with 0.19.2, or the newest
release, out of its wheel. Stand-ins: on CPUs CUDA's streams and tensors, its generator's state and
the move of counts to the host (pretrain.py); random numbers for dropout, which is off; one name of
Transformer Engine that an import asks for, `weft.fused_a2a` for its own module with `ncclep`, and
the norm of split sequences (over_weft.py); the core of attention where texts are packed. The last
two Megatron-Core has by Transformer Engine only: "Packed sequence is not supported by
DotProductAttention", "sequence parallel not supported by torch LayerNorm".
"""

import os

import pytest
import torch

from packages import skip_without, wheel

skip_without("megatron", "megatron-core")  # not imported here: over_weft.py is to come first

WOVEN = {"overlap_moe_expert_parallel_comm": True, "bf16": True}  # the combined schedule
RECOMPUTED = {
    "recompute_granularity": "full",
    "recompute_method": "uniform",
    "recompute_num_layers": 1,
}
SCALED = {"moe_router_pre_softmax": True, "moe_router_topk_scaling_factor": 2.5}
SPLIT = {  # tensor and sequence parallelism
    "tensor_model_parallel_size": 2,
    "sequence_parallel": True,
    "expert_tensor_parallel_size": 1,
}
SPLIT_EXPERTS = {"expert_tensor_parallel_size": 2, "expert_model_parallel_size": 2}
EVEN = {"lengths": (16, 8)}  # parts of a sequence are equal
BF16 = {"bf16": True, "params_dtype": torch.bfloat16}
LARGE = pytest.mark.skipif("CONSUMERS" not in os.environ, reason="make consumers runs it")


class Core:
    """Ranks with a Megatron-Core, the installed one where folder is empty."""

    def __init__(self, ranks, folder=""):
        self.ranks, self.folder = ranks, folder
        self.backends = ("deepep", "hybridep", "ncclep")[: 3 if folder else 2]

    def __call__(self, body, num_ranks, *args):
        return self.ranks(body, num_ranks, self.folder, *args, seconds=150)  # four import long


@pytest.fixture(scope="module", params=["installed", pytest.param("newest", marks=LARGE)])
def core(request):
    if request.param == "installed":
        return Core(request.getfixturevalue("ranks"))
    folder = str(wheel("megatron-core 0.19.2"))
    return Core(request.getfixturevalue("newer_ranks"), folder)


def trained(rank, num_ranks, group, folder, backend, run):
    import pretrain

    @pretrain.on_this_machine
    def call(rank, num_ranks, group):
        trainer = pretrain.Trainer(rank, pretrain.Run(backend, **run))
        return [trainer.step() for _ in range(4)]

    return call(rank, num_ranks, group, folder)


def resumed(rank, num_ranks, group, folder, backend, run, path):
    """Four steps; and two, a checkpoint, and two of another trainer."""
    import pretrain

    @pretrain.on_this_machine
    def call(rank, num_ranks, group):
        whole, first, second = (
            pretrain.Trainer(rank, pretrain.Run(backend, **run)) for _ in range(3)
        )
        steps = [whole.step() for _ in range(4)]
        parts = [first.step() for _ in range(2)]
        first.save(f"{path}/{rank}")
        second.load(f"{path}/{rank}")
        return steps, parts + [second.step() for _ in range(2)]

    return call(rank, num_ranks, group, folder)


def by_all(core, num_ranks, run):
    """Returns what every backend gives, and the first one twice: all the same."""
    backends = (*core.backends, core.backends[0])
    found = [core(trained, num_ranks, backend, run) for backend in backends]
    assert all(one == found[0] for one in found)
    return found[0]


@pytest.mark.parametrize(
    "num_ranks, run",
    [
        (2, {}),
        (2, {"settings": RECOMPUTED}),
        (2, {"settings": SCALED}),
        (2, {"settings": WOVEN}),
        (2, {"packed": True}),
        (2, {"packed": True, "settings": WOVEN}),
        (2, {"settings": SPLIT, **EVEN}),
        pytest.param(
            4, {"settings": SPLIT | {"expert_model_parallel_size": 2}, **EVEN}, marks=LARGE
        ),
        pytest.param(4, {"settings": SPLIT | SPLIT_EXPERTS, **EVEN}, marks=LARGE),
    ],
    ids=[
        *("plain", "recomputed", "scaled", "woven", "packed", "packed-woven"),
        *("split", "split-4-ranks", "split-experts"),
    ],
)
def test_losses_are_those_of_all_to_all(core, num_ranks, run):
    plain = run | {"settings": run.get("settings", {})}
    if plain["settings"] is WOVEN:
        plain["settings"] = {}
    if SPLIT_EXPERTS.items() <= plain["settings"].items():
        # It gathers rows of unequal numbers, which gloo cannot; whole experts compute the same.
        plain["settings"] = plain["settings"] | {"expert_tensor_parallel_size": 1}
    want = core(trained, num_ranks, "alltoall", plain)
    found = by_all(core, num_ranks, run)
    for steps, others in zip(found, want, strict=True):
        for (losses, norm), (wanted, wanted_norm) in zip(steps, others, strict=True):
            assert losses == pytest.approx(wanted, rel=2e-4)
            assert norm == pytest.approx(wanted_norm, rel=2e-3)
        assert steps[0][0] == pytest.approx(others[0][0], rel=1e-6)  # before any step


@pytest.mark.parametrize("settings", [{}, SPLIT, WOVEN], ids=["plain", "split", "woven"])
def test_losses_in_bf16_begin_as_those_of_all_to_all(core, settings):
    run = {"settings": settings | BF16, **EVEN}
    want = core(trained, 2, "alltoall", run)
    for steps, others in zip(by_all(core, 2, run), want, strict=True):
        assert steps[0][0] == pytest.approx(others[0][0], rel=2**-8)


@pytest.mark.parametrize("settings", [{}, SPLIT, SPLIT | BF16], ids=["plain", "split", "bf16"])
def test_a_run_goes_on_from_a_checkpoint_with_the_same_bits(core, settings, tmp_path):
    for backend in core.backends:
        run = {"settings": settings, **EVEN}
        for steps, parts in core(resumed, 2, backend, run, str(tmp_path)):
            assert len(steps) == 4 and steps == parts
