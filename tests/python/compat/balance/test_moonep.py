# SPDX-License-Identifier: Apache-2.0
"""`weft.compat.moonep.Buffer` against the experts in one place; numbers are whole, sums exact."""

import contextlib
import resource
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from oracle import check_told
from weft.compat.moonep import Buffer

S, H, F, K, LOCAL = 40, 16, 8, 2, 2


def whole(gen, *shape):
    return torch.randint(-2, 3, shape, generator=gen).bfloat16()


def weights_of(rank, slots=0):
    gen = torch.Generator().manual_seed(1000 + rank)
    shapes = ((F, H), (F, H), (H, F))
    return [
        torch.cat([whole(gen, LOCAL, *shape), torch.full((slots, *shape), 7.0).bfloat16()])
        for shape in shapes
    ]


def expert(x, gate, up, down):
    return (((x @ gate.T).relu() % 3) * (x @ up.T) % 5) @ down.T


def tokens(rank, num_ranks):
    """Most go to the first experts; some nowhere."""
    gen = torch.Generator().manual_seed(rank)
    num = S - 5 * rank % S
    scores = torch.rand(num, num_ranks * LOCAL, generator=gen) - 0.3 * torch.arange(
        num_ranks * LOCAL
    )
    ids = scores.topk(K).indices
    ids[torch.rand(ids.shape, generator=gen) < 0.1] = -1
    return whole(gen, num, H), torch.rand(num, K, generator=gen), ids


def balanced(rank, num_ranks, group, padding, dtype):
    buffer = Buffer(
        S=S, H=H, K=K, E=num_ranks * LOCAL, num_ep_ranks=num_ranks, token_padding=padding,
        group=group, explicitly_destroy=True,
    )  # fmt: skip
    assert buffer.B == LOCAL
    x, weights, ids = tokens(rank, num_ranks)
    counts = ids[ids >= 0].bincount(minlength=num_ranks * LOCAL)
    rows, route_weights, cu_seqlens, plan = buffer.dispatch(x, weights, ids.to(dtype), counts)
    assert plan.experts_to_copy.shape == (num_ranks, LOCAL)
    assert cu_seqlens.dtype == torch.int32 and len(cu_seqlens) == 2 * LOCAL + 1
    assert (cu_seqlens % padding == 0).all() and len(rows) == buffer.NvS == len(route_weights)
    used = int((route_weights > 0).sum())
    full = weights_of(rank, LOCAL)
    gate, up, down = full
    buffer.prefetch_weight(
        plan=plan, full_gate_weight=gate, full_up_weight=up, full_down_weight=down
    )
    everybody = [weights_of(other) for other in range(num_ranks)]
    for slot, one in enumerate(plan.experts_to_copy[rank].tolist()):
        for part, mine in enumerate(full):
            found = mine[LOCAL + slot]
            assert (
                torch.equal(found, everybody[one // LOCAL][part][one % LOCAL])
                if one >= 0
                else (found == 7).all()
            )
    made = torch.zeros_like(rows)
    for group_of, (begin, end) in enumerate(zip(cu_seqlens[:-1].tolist(), cu_seqlens[1:].tolist())):
        made[begin:end] = expert(rows[begin:end], *(one[group_of] for one in full))
    assert not rows[int(cu_seqlens[-1]) :].any() and not route_weights[int(cu_seqlens[-1]) :].any()
    out, back, _ = buffer.combine(plan=plan, hidden_nvsh=made, route_weights_nvs=route_weights)
    want = torch.zeros(len(x), H)
    for t, k in ids.ge(0).nonzero().tolist():
        chosen = int(ids[t, k])
        parts = (one[chosen % LOCAL] for one in everybody[chosen // LOCAL])
        want[t] += expert(x[t], *parts).float()
    assert torch.equal(out.float(), want)
    assert torch.equal(back, torch.where(ids >= 0, weights, 0.0))
    assert buffer.combine(plan=plan, hidden_nvsh=made)[1] is None
    buffer.destroy()
    with pytest.raises(AssertionError, match="was destroyed"):
        buffer.dispatch(x, weights, ids)
    return used


@pytest.mark.parametrize(("padding", "dtype"), [(1, torch.int64), (16, torch.int32)])
@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_all_ranks_get_as_many_rows(ranks, num_ranks, padding, dtype):
    used = ranks(balanced, num_ranks, padding, dtype)
    routes = sum(int((tokens(rank, num_ranks)[2] >= 0).sum()) for rank in range(num_ranks))
    assert sum(used) == routes and max(used) <= routes / num_ranks * 1.02 + 1


@contextlib.contextmanager
def memory_limited():
    """A GiB more than now."""
    now = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    usual = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (now + (1 << 30), usual[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, usual)


def refused(rank, num_ranks, group):
    sizes = {"S": 8, "H": 16, "K": 2, "E": 4, "num_ep_ranks": 2, "group": group}
    texts = []

    def refuses(call, *args, **given):
        with pytest.raises(AssertionError) as told:
            call(*args, **given)
        texts.append(str(told.value))

    for wrong in ({"num_ep_ranks": 3}, {"E": 5}, {"B": 17}, {"K": 33}, {"S": 8 + rank}):
        refuses(Buffer, **(sizes | wrong))
    buffer = Buffer(**sizes)
    x, weights = torch.ones(3, 16, dtype=torch.bfloat16), torch.ones(3, 2)
    ids = torch.zeros(3, 2, dtype=torch.int64)
    for args in (
        (x.float(), weights, ids),
        (x[:2], weights, ids),
        (x.repeat(3, 1), weights, ids),
        (x, weights, ids + 4),
        (x, weights, ids + 10**9),
    ):
        with memory_limited(), pytest.raises(ValueError) as told:
            buffer.dispatch(*(args if rank == 1 else (x, weights, ids)))
        texts.append(str(told.value))
    rows, route_weights, _, plan = buffer.dispatch(x, weights, ids)
    *_, other = buffer.dispatch(x, weights, ids + 2)
    full = dict.fromkeys(
        ("full_gate_weight", "full_up_weight", "full_down_weight"), torch.zeros(4, 8)
    )
    for call, right, wrong in (
        (buffer.combine, {"plan": plan, "hidden_nvsh": rows}, {"hidden_nvsh": rows[:1]}),
        (buffer.combine, {"plan": plan, "hidden_nvsh": rows}, {"plan": None}),
        (buffer.prefetch_weight, {"plan": plan, **full}, {"full_up_weight": torch.zeros(3, 8)}),
        (buffer.prefetch_weight, {"plan": plan, **full}, {"plan": rows}),
        (buffer.prefetch_weight, {"plan": plan, **full}, {"plan": other}),
    ):
        with pytest.raises(ValueError) as told:
            call(**(right | (wrong if rank == 1 else {})))
        texts.append(str(told.value))
    assert torch.equal(buffer.combine(plan=plan, hidden_nvsh=rows)[0], 2 * x)  # still usable
    return texts


REASONS = [
    "num_ep_ranks = 3 of a group of 2",
    "E = 5 (expected a multiple of 2 ranks)",
    "B = 17 (expected 0 to 16)",
    "K = 33 (expected at most 32)",
    "differ between ranks: [(8, 16, 2, 4, 2, 1), (9, 16, 2, 4, 2, 1)]",
    "x has dtype torch.float32",
    "ids has shape [3, 2]",
    "x has 9 tokens (expected at most S = 8)",
    "ids has experts outside -1 to 3",
    "ids has experts outside -1 to 3",
    "hidden_nvsh has shape [1, 16]",
    "plan is a NoneType",
    "full_up_weight is not a tensor of 4 experts",
    "plan is a Tensor",
    "prefetch_weight: ranks differ in the call, its placement",
]


def test_all_ranks_hear_what_one_refuses(ranks):
    check_told(ranks(refused, 2), REASONS)


def unbalanced(rank, num_ranks, group):
    """Without slots a rank may have more rows than NvS; nothing is lost."""
    buffer = Buffer(S=8, H=16, K=2, E=2, num_ep_ranks=2, B=0, group=group)
    x = torch.full((8, 16), 1.0 + rank).bfloat16()
    ids = torch.tensor([[0, 0]] * 8)
    rows, _, cu_seqlens, plan = buffer.dispatch(x, torch.ones(8, 2), ids)
    assert len(rows) == (32 if rank == 0 else buffer.NvS) and buffer.NvS == 16
    assert cu_seqlens.tolist() == [0, 32 if rank == 0 else 0]
    full = torch.zeros(1, 8)
    buffer.prefetch_weight(
        plan=plan, full_gate_weight=full, full_up_weight=full, full_down_weight=full
    )
    assert torch.equal(buffer.combine(plan=plan, hidden_nvsh=rows)[0], 2 * x)


def test_rows_beyond_the_usual_number_are_kept(ranks):
    ranks(unbalanced, 2)


def test_the_question_before_a_buffer_is_answered_under_its_name():
    code = """
import weft.compat
weft.compat.install("moonep")
from moonep import Buffer
from moonep._C import nvl_multicast_supported
assert nvl_multicast_supported() is True
assert Buffer is weft.compat.moonep.Buffer
"""
    subprocess.run([sys.executable, "-c", code], check=True)
