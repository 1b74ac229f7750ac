# SPDX-License-Identifier: Apache-2.0
"""How tensors come to the core and back: quickly by entry points of torch, or by Python."""

import os
import subprocess
import sys

import pytest
import torch

import weft
from oracle import inputs
from weft import _core
from weft.compat.deep_ep import checks
from weft.outputs import Beside

HIDDEN = 512


def tensors(x):
    """Tensors of the same values, each read in another way."""
    wide = torch.cat([x, x], dim=1)
    return (x, torch.nn.Parameter(x), wide[:, : x.size(1)], x.t().contiguous().t())


def any_tensor(rank, num_ranks, group):
    ex = weft.Exchange(group, hidden=HIDDEN, num_experts=2 * num_ranks)
    _, idx, weights = inputs(rank, 6, 2, 2 * num_ranks)
    plan = ex.plan(idx)
    x = torch.randn(6, HIDDEN)
    scales = torch.randn(6, 3)
    expected = ex.dispatch(plan, x, weights, scales)
    for one in tensors(x):
        out = ex.dispatch(plan, one, weights.t().contiguous().t(), scales.t().contiguous().t())
        assert all(torch.equal(a, b) for a, b in zip(out, expected))
        assert not any(part.requires_grad for part in out)
    payload = torch.randint(0, 127, (6, HIDDEN), dtype=torch.uint8)
    rows = ex.dispatch(plan, payload).rows
    # Two dtypes that the core has a number of, and one that it does not know.
    for dtype in (torch.int8, torch.float8_e4m3fn, torch.float8_e4m3fnuz):
        out = ex.dispatch(plan, payload.view(dtype), scales=scales.double()[:, :1])
        assert out.rows.dtype == dtype and torch.equal(out.rows.view(torch.uint8), rows)
        assert out.scales.dtype == torch.float64
        assert torch.equal(out.scales, expected.scales.double()[:, :1])


def test_any_tensor_comes_back_with_its_type(ranks):
    ranks(any_tensor, 2)


def as_blocks(rank, num_ranks, group, rule):
    ex = weft.Exchange(group, hidden=HIDDEN, num_experts=2 * num_ranks)
    _, idx, weights = inputs(rank, (5, 8)[rank], 2, 2 * num_ranks)
    x = torch.randn(len(idx), HIDDEN).bfloat16()
    options = {"layout": "expert_strided", "expert_stride": 16}
    kind = {"quantise": "e4m3", "scale_rule": rule, "scale_layout": "column"} if rule else {}
    sources = torch.zeros((2 * 16, 2), dtype=torch.int32)
    counts = torch.zeros(2, dtype=torch.int32)
    beside = Beside(sources, counts)
    _, flat = ex.plan_and_dispatch(idx, x, weights, beside=beside, **options, **kind)
    sums = torch.tensor([5, 7], dtype=torch.int32)
    _, made, from_where, how_many = ex.plan_and_dispatch(
        idx, x, weights, beside=Beside(count_sums=sums), blocks=True, **options, **kind
    )
    assert torch.equal(how_many, counts)
    assert torch.equal(sums, counts + torch.tensor([5, 7], dtype=torch.int32))
    assert made.rows.shape == (2, 16, HIDDEN) and made.weights.shape == (2, 16)
    for expert, count in enumerate(counts.tolist()):
        block = slice(expert * 16, expert * 16 + count)
        rows = (made.rows.view(torch.uint8)[expert, :count], flat.rows.view(torch.uint8)[block])
        assert torch.equal(*rows)
        assert torch.equal(made.weights[expert, :count], flat.weights[block, 0])
        assert torch.equal(from_where[expert, :count], sources[block])
        if rule:
            words = flat.scales.view(made.scales.dtype).view(2, -1, 16)
            assert made.scales.stride()[1:] == (1, 16)
            assert torch.equal(made.scales[expert, :count], words[expert].t()[:count])


@pytest.mark.parametrize("rule", [None, "exact", "ue8m0"])
def test_blocks_hold_what_matrices_do(ranks, rule):
    ranks(as_blocks, 2, rule)


def no_blocks(rank, num_ranks, group):
    ex = weft.Exchange(group, hidden=HIDDEN, num_experts=2 * num_ranks)
    _, idx, _ = inputs(rank, 6, 2, 2 * num_ranks)
    x = torch.randn(6, HIDDEN)
    reasons = {"expert_major": "only expert_strided has", "expert_strided": ""}
    for layout, reason in reasons.items():  # a budget does not say how large blocks are
        with pytest.raises(weft.InvalidArgument, match=reason):
            ex.plan_and_dispatch(idx, x, layout=layout, row_budget=31, blocks=rank == 1)
    plan = ex.plan(idx)
    out = ex.combine(plan, ex.dispatch(plan, x).rows).x
    torch.testing.assert_close(out, x * (idx >= 0).sum(1, keepdim=True))


def test_other_layouts_have_no_blocks(ranks):
    ranks(no_blocks, 2)


SCRIPT = """
import os, sys, torch, torch.distributed as dist
is_slow = sys.argv[1] == "slow"
if is_slow:  # as with an older torch, before weft has looked
    del torch.Tensor.__dlpack_c_exchange_api__
    del torch._C._aoti.alloc_tensors_by_stealing_from_void_ptrs
import weft
from weft import outputs
seen = set()
for name in ("view", "empty"):
    def noting(*given, usual=getattr(outputs, name), name=name):
        seen.add(name)
        return usual(*given)
    setattr(outputs, name, noting)
dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
ex = weft.Exchange(hidden=256, num_experts=4)
torch.manual_seed(1)
x, idx, weights = torch.randn(9, 256), torch.randint(-1, 4, (9, 3)), torch.rand(9, 3)
plan, out = ex.plan_and_dispatch(idx, x, weights, torch.rand(9, 5))
blocks = ex.plan_and_dispatch(
    idx, x.bfloat16(), weights, quantise="e4m3", scale_layout="column", blocks=True,
    layout="expert_strided", expert_stride=32,
)
sums = ex.combine(plan, out.rows, out.weights)
for tensor in (*out, *sums, blocks[3]):
    print(tensor.dtype, list(tensor.shape), tensor.double().sum().item())
for expert, count in enumerate(blocks[3].tolist()):
    for tensor in (blocks[1].rows, blocks[1].weights, blocks[1].scales, blocks[2]):
        print(tensor.dtype, tensor.shape, tensor.stride(), tensor[expert, :count].double().sum())
assert seen == ({"view", "empty"} if is_slow else set()), seen
"""


def test_a_torch_without_entry_points_gives_the_same():
    found = []
    for how in ("quick", "slow"):
        ran = subprocess.run(
            [sys.executable, "-c", SCRIPT, how],
            capture_output=True,
            text=True,
            timeout=120,
            env={**os.environ, "WEFT_LOG": "error"},
        )
        assert ran.returncode == 0, ran.stderr
        found.append(ran.stdout)
    assert found[0] == found[1] and found[0].count("\n") > 10


@pytest.mark.parametrize(
    ("tensor", "is_good"),
    [
        (torch.zeros(3, 4, dtype=torch.int32), True),
        (torch.zeros(4, 3, dtype=torch.int32).t(), True),
        (torch.nn.Parameter(torch.zeros(3, 4, dtype=torch.int32), requires_grad=False), True),
        (torch.zeros(3, 4), False),
        (torch.zeros(3, 4, dtype=torch.int16), False),
        (torch.zeros(3, 5, dtype=torch.int32), False),
        (torch.zeros(12, dtype=torch.int32), False),
        (torch.zeros(3, 4, 1, dtype=torch.int32), False),
        (torch.zeros(3, 4, dtype=torch.int32, device="meta"), False),
        (None, False),
        ([[0]], False),
    ],
)
def test_a_check_says_the_same_with_and_without_the_core(monkeypatch, tensor, is_good):
    def say():
        try:
            checks.check_tensor("x", tensor, (torch.int32, torch.int64), ["any", 4])
        except weft.InvalidArgument as error:
            return str(error)
        return None

    quick = say()
    assert (quick is None) == is_good
    monkeypatch.setattr(_core, "suits", lambda *_: False)
    assert say() == quick
