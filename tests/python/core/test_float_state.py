# SPDX-License-Identifier: Apache-2.0
"""A thread may flush subnormal numbers and round as it likes: the bits are the same."""

import contextlib
import ctypes
import platform

import pytest
import torch

import weft
from weft import _core, block_formats, fp8

TOKENS, HIDDEN, EXPERTS = 300, 1024, 2
UPWARD = {"x86_64": 0x800, "aarch64": 0x400000}


def quotients():
    """One that is subnormal, and one that is rounded down to the nearest."""
    return torch.tensor([2.0**-126, 1.0]) / torch.tensor([2.0, 25.0])


@contextlib.contextmanager
def odd_floats(way):
    """This thread, and those that it makes meanwhile, with the state that `way` names."""
    libm = ctypes.CDLL("libm.so.6")
    nearest, standard = libm.fegetround(), quotients()
    if way == "flushed":
        torch.set_flush_denormal(True)
    else:
        libm.fesetround(UPWARD[platform.machine()])
    try:
        same = (quotients().view(torch.int32) == standard.view(torch.int32)).tolist()
        assert same == [way != "flushed", way == "flushed"]
        yield
    finally:
        torch.set_flush_denormal(False)
        libm.fesetround(nearest)


def bits(tensors):
    return [t.detach().contiguous().view(torch.uint8) for t in tensors if t is not None]


def made(exchange, x, idx, weights, small):
    """Results of calls: rows of every format, and sums of every kind."""
    plan = exchange.plan(idx)
    for kind in ("e4m3", "e5m2", "mxfp8", "nvfp4"):
        yield from exchange.dispatch(plan, x, quantise=kind)
    rows = exchange.dispatch(plan, x).rows
    scaled = {"scale": "source", "source_weights": weights}
    for one in (rows, *(each[: plan.num_rows] for each in small)):
        yield exchange.combine(plan, one).x
        yield exchange.combine(plan, one, **scaled).x
    for wire in ("fp8", "logfmt10"):
        yield exchange.combine(plan, rows, wire=wire).x
    yield from _core.spread_routing(idx, weights, EXPERTS, 0)


def same_bits(rank, num_ranks, group, way):
    gen = torch.Generator().manual_seed(rank)
    x = torch.randn(TOKENS, HIDDEN, generator=gen) * 0.02  # NVFP4 has small scales then
    x = x.bfloat16()
    x[1] *= 2.0**-126
    idx = torch.randint(EXPERTS, (TOKENS, 2), generator=gen)
    weights = torch.rand(TOKENS, 2, generator=gen)
    small = torch.full((2 * num_ranks * TOKENS, HIDDEN), 2.0**-130)  # sums are subnormal, too
    given = (x, idx, weights, (small, small.bfloat16()))
    options = {"hidden": HIDDEN, "num_experts": EXPERTS, "num_threads": 3}
    want = bits(made(weft.Exchange(group, **options), *given))
    with odd_floats(way):
        found = list(made(weft.Exchange(group, **options), *given))
    for one, other in zip(bits(found), want, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("way", ["flushed", "rounds up"])
def test_calls_have_the_bits_of_any_other_thread(ranks, way):
    ranks(same_bits, 2, way)


@pytest.mark.parametrize("way", ["flushed", "rounds up"])
def test_formats_in_torch_have_the_bits_of_any_other_thread(way):
    gen = torch.Generator().manual_seed(1)
    powers = 2.0 ** torch.randint(-130, 20, (4, HIDDEN // 16), generator=gen).repeat_interleave(
        16, 1
    )
    x = (torch.randn(4, HIDDEN, generator=gen) * powers).bfloat16()

    def formats():
        for to, back in (
            (block_formats.to_mxfp8, block_formats.from_mxfp8),
            (block_formats.to_nvfp4, block_formats.from_nvfp4),
        ):
            stored = to(x)
            yield from (*stored, back(*stored))
        yield from fp8.to_fp8(x)

    want = bits(formats())
    with odd_floats(way):
        found = list(formats())
    for one, other in zip(bits(found), want, strict=True):
        assert torch.equal(one, other)
