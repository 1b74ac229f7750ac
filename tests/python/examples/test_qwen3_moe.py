# SPDX-License-Identifier: Apache-2.0
"""The benchmark of Qwen3's layers: what it makes of a trace, and a small run of it."""

import json
import os
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from weft.examples.qwen3_exposed import (
    Exposure,
    Kernel,
    exchange_times,
    exposure,
    is_exchange,
    read_trace,
    without_waits,
)
from weft.examples.qwen3_model import ROPE_BASE, Attention, QwenMoE, Shape
from weft.examples.qwen3_moe import complaints, layers_that_fit, rows_of, table
from weft.examples.qwen3_run import Result, busiest, micro_batch, token_ids, usual_modes

SEND = "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)"
PACK = "void weft::(anonymous namespace)::pack_rows<weft::BulkMover>(weft::DispatchLaunch)"
FAN_OUT = "void weft::(anonymous namespace)::fan_out_rows<weft::BulkMover>(weft::DispatchLaunch)"
PACK_SUMS = "void weft::(anonymous namespace)::pack_vector<__half, true>(weft::CombineLaunch)"
ADD_SUMS = "void weft::(anonymous namespace)::sum_vector<__half>(weft::CombineLaunch)"


@pytest.mark.parametrize(
    "kernels, expected",
    [
        ([], (0, 0, 0, 0)),
        ([Kernel(0, 4, "gemm", 7)], (4, 0, 0, 0)),
        ([Kernel(0, 4, SEND, 9)], (4, 4, 4, 0)),
        # Half hidden, then nothing for a while.
        ([Kernel(0, 4, SEND, 9), Kernel(2, 6, "gemm", 7), Kernel(8, 9, "add", 7)], (9, 4, 2, 2)),
        # Kernels of its own stream do not hide an exchange, whatever a trace says of their times.
        ([Kernel(0, 4, SEND, 9), Kernel(3, 6, "gemm", 9)], (6, 4, 4, 0)),
        # Nor does another exchange; what two of them expose counts once.
        ([Kernel(0, 4, SEND, 9), Kernel(2, 6, SEND, 11)], (6, 6, 6, 0)),
        ([Kernel(0, 4, SEND, 9), Kernel(0, 4, SEND, 11), Kernel(1, 9, "gemm", 7)], (9, 4, 1, 0)),
        # Copy engines carry what was packed, with nothing beside, and the GPU does not wait for
        # the host meanwhile.
        ([Kernel(0, 1, PACK, 9), Kernel(4, 6, FAN_OUT, 9)], (6, 6, 6, 0)),
        ([Kernel(0, 1, PACK_SUMS, 9), Kernel(4, 6, ADD_SUMS, 9)], (6, 6, 6, 0)),
        ([Kernel(4, 6, FAN_OUT, 9), Kernel(0, 1, PACK, 9), Kernel(2, 7, "gemm", 7)], (7, 6, 2, 0)),
        # Two streams' calls are two.
        ([Kernel(0, 1, PACK, 9), Kernel(4, 6, FAN_OUT, 7)], (6, 3, 3, 3)),
        # After the rows have been taken, the time until the next call is nobody's.
        ([Kernel(0, 1, FAN_OUT, 9), Kernel(4, 6, PACK, 9)], (6, 3, 3, 3)),
    ],
)
def test_exposure(kernels, expected):
    assert exposure(kernels) == Exposure(*expected)


def test_exposure_is_what_counting_gives():
    maker = torch.Generator().manual_seed(0)
    for _ in range(200):
        begins, lengths = torch.randint(9, (2, 8), generator=maker).tolist()
        kinds = torch.randint(4, (8,), generator=maker).tolist()
        kernels = [
            Kernel(begin, begin + length, (SEND, "gemm")[kind % 2], kind // 2)
            for begin, length, kind in zip(begins, lengths, kinds)
        ]
        cells = [[k for k in kernels if k.begin <= time < k.end] for time in range(18)]
        used = [time for time, cell in enumerate(cells) if cell]
        exchanging = [[k for k in cell if is_exchange(k.name)] for cell in cells]
        exposed = sum(
            any(all(is_exchange(o.name) or o.stream == k.stream for o in cell) for k in some)
            for cell, some in zip(cells, exchanging)
        )
        span = used[-1] - used[0] + 1
        counts = (span, sum(map(bool, exchanging)), exposed, span - len(used))
        assert exposure(kernels) == Exposure(*counts)


@pytest.mark.parametrize(
    "name, expected",
    [
        (SEND, True),
        ("ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)", True),
        ("ncclDevKernel_AllReduce_Sum_bf16_RING_LL(...)", False),  # gradients
        ("void weft::(anonymous namespace)::dispatch_rows<weft::BulkMover>(weft::Launch)", True),
        ("weft::(anonymous namespace)::combine_vector(weft::CombineLaunch)", True),
        ("weft::(anonymous namespace)::plan_kernel(weft::PlanLaunch)", True),
        (PACK, True),
        (FAN_OUT, True),
        (PACK_SUMS, True),
        (ADD_SUMS, True),
        ("sm90_xmma_gemm_bf16", False),
        ("void at::native::elementwise_kernel<128, 4>", False),
    ],
)
def test_exchanges_are_known_by_name(name, expected):
    assert is_exchange(name) is expected


def test_times_of_exchanges_in_their_order():
    kernels = [
        Kernel(10, 11, FAN_OUT, 9),
        Kernel(4, 6, PACK, 9),
        Kernel(0, 3, SEND, 7),
        Kernel(1, 9, "gemm", 5),
    ]
    assert exchange_times(kernels) == [3, 2, 4, 1]


def test_waits_are_what_a_rank_takes_longer_than_another(monkeypatch):
    others = [4.0, 1.0, 5.0]

    def all_reduce(tensor, op):
        assert op == torch.distributed.ReduceOp.MIN
        other = [3, -3] if tensor.dtype == torch.int64 else others
        tensor.copy_(tensor.minimum(torch.tensor(other)))

    monkeypatch.setattr(torch.distributed, "all_reduce", all_reduce)
    assert without_waits([2.0, 3.0, 6.0]) == 2.0 + 1.0 + 5.0
    assert without_waits([2.0, 3.0]) is None  # a trace may lack some
    assert without_waits([2.0, 3.0, 6.0, 1.0]) is None


def test_only_kernels_of_a_trace_count(tmp_path):
    kernel = {"ph": "X", "cat": "kernel", "name": "gemm", "ts": 5.5, "dur": 2.0, "pid": 0, "tid": 7}
    events = [
        kernel | {"args": {"stream": 7}},
        kernel | {"cat": "gpu_memcpy", "args": {"stream": 7}},
        {"ph": "s", "cat": "ac2g", "name": "ac2g", "ts": 1, "pid": 0, "tid": 0},
    ]
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"traceEvents": events}))
    assert read_trace(path) == [Kernel(5.5, 7.5, "gemm", 7)]


def test_layers_that_fit():
    shape = Shape(sequences=1)
    counts = [layers_that_fit(shape, 4, gib << 30) for gib in (1, 40, 78, 139, 10**4)]
    assert counts == sorted(counts) and counts[0] == 1 and counts[-1] == 48
    assert 10 < counts[2] < 48
    assert 1 < layers_that_fit(replace(shape, sequences=2), 4, 78 << 30) < counts[2]
    assert layers_that_fit(shape, 8, 78 << 30) > counts[2]


def test_text_goes_round(tmp_path):
    path = tmp_path / "text"
    path.write_bytes(b"abcde")
    tokens, labels = micro_batch(token_ids(path), 1, 3)
    assert bytes(tokens[0].tolist()) == b"dea" and bytes(labels[0].tolist()) == b"eab"
    tokens, labels = micro_batch(token_ids(path), 1, 2, sequences=2)
    assert [bytes(row.tolist()) for row in tokens] == [b"ea", b"bc"]
    assert [bytes(row.tolist()) for row in labels] == [b"ab", b"cd"]
    assert len(token_ids(None)) > 10_000


def test_attention_is_that_of_the_formula():
    torch.manual_seed(0)
    shape = Shape(hidden=24, heads=4, kv_heads=2, head_dim=8, sequence=6)
    attention = Attention(shape, delay=False)
    x = torch.randn(2, 6, 24)
    q, k, v = attention.qkv(attention.norm(x)).split([32, 16, 16], dim=-1)
    frequency = ROPE_BASE ** -(torch.arange(4) / 4)
    turn = torch.polar(torch.ones(6, 4), torch.arange(6)[:, None] * frequency)
    heads = []
    for i in range(4):
        own, shared = slice(8 * i, 8 * i + 8), slice(8 * (i // 2), 8 * (i // 2) + 8)
        parts = attention.q_norm(q[..., own]), attention.k_norm(k[..., shared])
        a, b = (torch.complex(*part.chunk(2, dim=-1)) * turn for part in parts)
        scores = (a @ b.mH).real / 8**0.5
        scores = scores.masked_fill(torch.ones(6, 6, dtype=torch.bool).triu(1), float("-inf"))
        heads.append(scores.softmax(-1) @ v[..., shared])
    torch.testing.assert_close(attention(x), attention.out(torch.cat(heads, dim=-1)))


def test_router_weighs_the_best_only():
    torch.manual_seed(0)
    moe = QwenMoE.__new__(QwenMoE)
    torch.nn.Module.__init__(moe)
    moe.router, moe.topk = torch.nn.Linear(5, 8, bias=False), 3
    x = torch.randn(7, 5)
    routing_map, probs = moe.route(x)
    best = moe.router(x).topk(3)
    expected = torch.zeros(7, 8).scatter(1, best.indices, best.values.softmax(-1))
    assert torch.equal(routing_map, expected > 0)
    torch.testing.assert_close(probs, expected)


def test_balanced_experts_are_different_and_equally_busy():
    moe = QwenMoE.__new__(QwenMoE)
    torch.nn.Module.__init__(moe)
    moe.topk, moe.balance = 3, 5
    scores = torch.zeros(8000, 8)
    scores[:, 0] = 1.0  # the router knows but one
    first, second = moe.choose(scores), moe.choose(scores)
    assert all(len(set(row)) == 3 for row in first[:100].tolist())
    assert not torch.equal(first, second)
    counts = torch.bincount(first.flatten(), minlength=8)
    assert counts.min() > 0.9 * 3000 and counts.max() < 1.1 * 3000
    again = QwenMoE.__new__(QwenMoE)
    torch.nn.Module.__init__(again)
    again.topk, again.balance = 3, 5
    assert torch.equal(again.choose(scores), first) and torch.equal(again.choose(scores), second)


def test_busiest_rank_of_each_call(monkeypatch):
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda tensor: None)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    assert busiest([]) is None
    even, twice = torch.tensor([3, 1, 2, 2]), torch.tensor([8, 8, 0, 0])
    assert busiest([even, twice]) == (1.0 + 2.0) / 2


def test_rows_and_table():
    losses = torch.ones(2, 3)
    seen = Exposure(10, 4, 3, 1, moving=2.5)
    slow = Result(losses, [4.0, 2.0, 3.0], seen, (3 << 30, 1 << 29), 1.25)
    rows = rows_of({"alltoall": slow, "weft": Result(losses, [1.5])})
    assert [row["ratio"] for row in rows] == [1.0, 2.0]
    lines = table(rows).splitlines()
    shares = "40.0 % | 25.0 % | 75.0 % | 30.0 % | 10.0 % | 125.0 %"
    assert lines[2] == f"| alltoall | 3.0000 | 1.00 | {shares} | 3.0 | 0.5 |"
    assert lines[3] == "| weft | 1.5000 | 2.00 |" + " - |" * 8


def test_another_bit_is_found(monkeypatch):
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda tensor: None)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 1)
    losses = torch.tensor([[1.0, 2.0]])
    other = torch.tensor([[1.0000001, 2.0]])
    same = {"alltoall": losses, "weft": other, "weft-overlap": other.clone()}
    results = {name: Result(values, [1.0]) for name, values in same.items()}
    assert complaints(results) == []
    results["alltoall-overlap"] = Result(other, [1.0])
    assert complaints(results) == ["alltoall-overlap: 1 of 2 losses are not those of alltoall"]
    results = {"weft": Result(losses, [1.0], has_dropped=True)}
    assert complaints(results) == ["weft: tokens were dropped (try a larger --capacity)"]
    results = {"weft": Result(losses / 0, [1.0])}
    assert complaints(results) == ["weft: 2 of 2 losses are not finite (try a smaller --lr)"]


def example(options):
    return subprocess.run(
        [sys.executable, "-m", "weft.examples.qwen3_moe", "--gpus", "2", *options.split()],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
    )


@pytest.mark.parametrize("balanced", [False, True])
def test_all_modes_on_two_cpu_ranks(tmp_path, balanced):
    modes = usual_modes(None)
    found, traces = tmp_path / "found.json", tmp_path / "traces"
    sizes = "--layers 2 --hidden 16 --experts 4 --width 16 --sequence 16 --micro-batches 3"
    steps = f"--steps 2 --warmup 0 --json {found} --trace {traces}"
    routing = "--capacity 2 --balanced" if balanced else "--capacity 2"
    done = example(f"--device cpu {sizes} {steps} {routing}")
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [line for line in done.stdout.splitlines() if line.startswith("| ")]
    assert [line.split()[1] for line in lines[2:]] == modes
    assert done.stdout.rstrip().endswith("losses equal bit for bit")
    result = json.loads(found.read_text())
    assert result["losses_equal"] and result["ranks"] == 2 and result["balanced"] is balanced
    assert len({row["busiest_of_mean"] for row in result["rows"][2:]}) == 1
    assert all(1.0 <= row["busiest_of_mean"] < 2.0 for row in result["rows"])
    assert [row["mode"] for row in result["rows"]] == modes
    assert all(row["seconds"] > 0 and row["exposed_of_step"] is None for row in result["rows"])
    assert len(set(result["rows"][0]["losses"])) > 1
    assert {path.stem for path in traces.iterdir()} == set(modes)


def test_replicas_change_no_loss(tmp_path):
    """The program itself compares the losses of all modes of a dispatcher, and fails otherwise."""
    found = tmp_path / "found.json"
    sizes = "--layers 2 --hidden 16 --experts 4 --width 16 --sequence 512 --micro-batches 2"
    modes = usual_modes(2)
    assert {"weft", "weft-overlap", "weft-balance", "weft-balance-overlap"} < set(modes)
    traces = tmp_path / "traces"  # without these nobody counts rows
    options = f"--balance 2 --capacity 2 --steps 3 --warmup 0 --json {found} --trace {traces}"
    done = example(f"--device cpu {sizes} {options}")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.rstrip().endswith("losses equal bit for bit")
    result = json.loads(found.read_text())
    rows = {row["mode"]: row for row in result["rows"]}
    assert list(rows) == modes and result["losses_equal"] and result["replicas"] == 2
    losses = rows["weft"]["losses"]
    assert len(set(losses)) == len(losses) > 1
    assert rows["weft-balance"]["losses"] == rows["weft"]["losses"]
    assert rows["weft-balance"]["busiest_of_mean"] < rows["weft"]["busiest_of_mean"]


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ("--device cpu --balance -1", "--balance -1: expected at least 0"),
        ("--device cpu --modes weft-balance", "--modes weft-balance: how many replicas?"),
        (
            "--device cpu --balance 1 --modes weft-overlap-wgrad",
            "--balance with --modes weft-overlap-wgrad: its gradients are not of blocks",
        ),
    ],
)
def test_replicas_where_they_cannot_be(options, reason):
    done = example(options)
    assert done.returncode == 1 and reason in done.stderr
