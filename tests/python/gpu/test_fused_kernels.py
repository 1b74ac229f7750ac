# SPDX-License-Identifier: Apache-2.0
"""Kernels of the model around the exchange against the formulas they stand for, in fp32."""

import pytest
import torch
from torch.nn import functional

from weft.examples.qwen3_rotary import rotate
from weft.overlap.swiglu import swiglu

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
pytest.importorskip("triton")

ROUNDING = 2.0**-8  # of bf16, relative


def close(value, expected, scale=0.0):
    """scale: of values that were rounded and then became these."""
    bound = ROUNDING * (expected.abs() + scale) + 1e-5
    assert ((value.float() - expected).abs() <= bound).all()


@pytest.mark.parametrize("rows,used,width", [(1, 1, 8), (37, 37, 768), (64, 41, 24), (16, 0, 768)])
def test_swiglu_is_its_formula_up_to_the_last_end(rows, used, width):
    gen = torch.Generator("cuda").manual_seed(rows)
    inner = torch.randn(rows, 2 * width, generator=gen, device="cuda").bfloat16()
    grad = torch.randn(rows, width, generator=gen, device="cuda").bfloat16()
    probs = torch.rand(rows, generator=gen, device="cuda")
    ends = torch.tensor([used // 2, used], dtype=torch.int32, device="cuda")
    mine = [t.clone().requires_grad_() for t in (inner, probs)]
    out = swiglu(*mine, ends)
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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", [(1, 1, 1, 2), (2, 37, 3, 128), (1, 64, 32, 24)])
def test_rotation_turns_and_its_gradient_turns_back(shape, dtype):
    gen = torch.Generator("cuda").manual_seed(shape[1])
    t = torch.randn(shape, generator=gen, device="cuda").to(dtype)
    angles = torch.randn(shape[1], shape[3] // 2, generator=gen, device="cuda")
    mine = t.clone().requires_grad_()
    out = rotate(mine, angles.cos(), angles.sin())
    left, right = t.float().chunk(2, dim=-1)
    pairs = torch.complex(left, right) * torch.polar(torch.ones_like(angles), angles)[:, None]
    expected = torch.cat((pairs.real, pairs.imag), dim=-1)
    assert out.dtype == dtype
    close(out, expected)
    out.backward(out.detach())
    close(mine.grad, t.float(), scale=t.abs().max().item())


def test_no_rows_are_no_launch():
    empty = torch.zeros(0, 16, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    ends = torch.zeros(3, dtype=torch.int32, device="cuda")
    out = swiglu(empty, torch.zeros(0, device="cuda"), ends)
    out.sum().backward()
    assert out.shape == (0, 8) and empty.grad.shape == (0, 16)
