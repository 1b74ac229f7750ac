# SPDX-License-Identifier: Apache-2.0
"""Kernels of the model around the exchange against the formulas they stand for, in fp32."""

import os
import subprocess
import sys

import pytest
import torch
from torch.nn import functional

pytest.importorskip("triton")

from weft.examples.qwen3_rotary_triton import Rotate  # noqa: E402
from weft.overlap.swiglu_triton import Swiglu  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


NUM_TESTS = 11  # below

# Without a GPU in Triton's interpreter, which must be asked for before anybody imports Triton.
IS_ELSEWHERE = DEVICE == "cpu" and os.environ.get("TRITON_INTERPRET") != "1"
here = pytest.mark.skipif(IS_ELSEWHERE, reason="runs in a process of its own")


@pytest.mark.skipif(not IS_ELSEWHERE, reason="the tests below run in this process")
def test_all_in_the_interpreter():
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{NUM_TESTS} passed, 1 skipped" in done.stdout


# Of bf16, relative. Triton's interpreter cuts off where a GPU rounds.
ROUNDING = 2.0**-8 if DEVICE == "cuda" else 2.0**-7


def close(value, expected, scale=0.0):
    """scale: of values that were rounded and then became these."""
    bound = ROUNDING * (expected.abs() + scale) + 1e-5
    assert ((value.float() - expected).abs() <= bound).all()


@here
@pytest.mark.parametrize("rows,used,width", [(1, 1, 8), (37, 37, 768), (64, 41, 24), (16, 0, 768)])
def test_swiglu_is_its_formula_up_to_the_last_end(rows, used, width):
    gen = torch.Generator(DEVICE).manual_seed(rows)
    inner = torch.randn(rows, 2 * width, generator=gen, device=DEVICE).bfloat16()
    grad = torch.randn(rows, width, generator=gen, device=DEVICE).bfloat16()
    probs = torch.rand(rows, generator=gen, device=DEVICE)
    ends = torch.tensor([used // 2, used], dtype=torch.int32, device=DEVICE)
    mine = [t.clone().requires_grad_() for t in (inner, probs)]
    out = Swiglu.apply(*mine, ends)
    out.backward(grad)

    plain = [t.float().requires_grad_() for t in (inner, probs)]
    gate, value = plain[0].chunk(2, dim=-1)
    expected = functional.silu(gate) * value * plain[1].unsqueeze(-1)
    expected[:used].backward(grad[:used].float())
    assert out.dtype == torch.bfloat16
    close(out[:used], expected[:used])
    close(mine[0].grad[:used], plain[0].grad[:used])
    assert torch.allclose(mine[1].grad, plain[1].grad, rtol=1e-4, atol=1e-3)
    assert (mine[1].grad[used:] == 0).all()


@here
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", [(1, 1, 1, 2), (2, 37, 3, 128), (1, 64, 32, 24)])
def test_rotation_turns_and_its_gradient_turns_back(shape, dtype):
    gen = torch.Generator(DEVICE).manual_seed(shape[1])
    t = torch.randn(shape, generator=gen, device=DEVICE).to(dtype)
    angles = torch.randn(shape[1], shape[3] // 2, generator=gen, device=DEVICE)
    mine = t.clone().requires_grad_()
    out = Rotate.apply(mine, angles.cos(), angles.sin())
    left, right = t.float().chunk(2, dim=-1)
    pairs = torch.complex(left, right) * torch.polar(torch.ones_like(angles), angles)[:, None]
    expected = torch.cat((pairs.real, pairs.imag), dim=-1)
    assert out.dtype == dtype
    close(out, expected)
    out.backward(out.detach())
    close(mine.grad, t.float(), scale=t.abs().max().item())


@here
def test_no_rows_are_no_launch():
    empty = torch.zeros(0, 16, dtype=torch.bfloat16, device=DEVICE, requires_grad=True)
    ends = torch.zeros(3, dtype=torch.int32, device=DEVICE)
    out = Swiglu.apply(empty, torch.zeros(0, device=DEVICE), ends)
    out.sum().backward()
    assert out.shape == (0, 8) and empty.grad.shape == (0, 16)
