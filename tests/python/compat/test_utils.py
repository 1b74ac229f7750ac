# SPDX-License-Identifier: Apache-2.0
"""Names that programs import from `deep_ep.utils`."""

import os
import socket
import subprocess
import sys

import pytest
import torch

import weft
from domain_cases import NUM_RANKS, two_domains
from weft import fp8
from weft.compat import deep_ep, uccl
from weft.compat.deep_ep import ElasticBuffer, utils
from weft.compat.deep_ep.utils import envs, math
from weft.compat.uccl import ep


def test_versions():
    assert deep_ep.__version__ == "2.5.0"
    assert ep.__version__ == uccl.__version__ and uccl.__version__.startswith("0.0.1")


def test_events_stand_in_both_places():
    assert utils.EventOverlap is utils.event.EventOverlap is deep_ep.EventOverlap
    assert utils.check_nvlink_connections is envs.check_nvlink_connections


@pytest.mark.parametrize("x, y, quotient", [(0, 4, 0), (1, 4, 1), (4, 4, 1), (9, 4, 3)])
def test_division_upwards(x, y, quotient):
    assert math.ceil_div(x, y) == quotient and math.align(x, y) == quotient * y


def test_division_of_nothing():
    assert math.safe_div(0, 0) == 0 and math.safe_div(3, 2) == 1.5
    with pytest.raises(ZeroDivisionError):
        math.safe_div(1, 0)


def test_difference():
    x = torch.tensor([0.0, 1.0, -3.0])
    assert math.calc_diff(x, x) == 0 == math.calc_diff(x * 0, x * 0)
    assert math.calc_diff(x, -2 - x) == 2  # one added: the same with the other sign
    assert math.calc_diff(x, x + 1) == pytest.approx(1 - 2 * (2 + 6 + 2) / (9 + 14))


@pytest.mark.parametrize("hidden", [256, 200, 8])
def test_fp8_and_back(hidden):
    x = torch.randn(5, hidden, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    x[0] = 0
    rows, scales = math.per_token_cast_to_fp8(x)
    assert rows.dtype == torch.float8_e4m3fn and rows.shape == x.shape and rows.is_contiguous()
    assert scales.shape == (5, -(-hidden // 128)) and scales.dtype == torch.float32
    for token in range(5):
        for group in range(scales.size(1)):
            largest = x[token, 128 * group : 128 * group + 128].float().abs().max()
            assert float(scales[token, group]) == pytest.approx(max(float(largest), 1e-4) / 448)
    padded = torch.nn.functional.pad(x.float(), (0, -hidden % 128)).view(5, -1, 128)
    largest = padded.abs().amax(2, keepdim=True).clamp(1e-4)
    # A tensor divided by a tensor: torch multiplies 448 by the rounded reciprocal of a tensor.
    factor = torch.full_like(largest, 448) / largest
    multiplied = (padded * factor).to(torch.float8_e4m3fn).view(5, -1)[:, :hidden]
    assert torch.equal(rows.view(torch.uint8), multiplied.view(torch.uint8))
    assert torch.equal(scales, largest.squeeze(2) * (torch.ones(1) / 448))
    back = math.per_token_cast_back(rows, scales)
    assert back.dtype == torch.bfloat16 and back.shape == x.shape
    torch.testing.assert_close(back, x, rtol=1 / 14, atol=1e-3)
    assert math.per_token_cast_back(rows[:0], scales[:0]).shape == (0, hidden)
    assert [one.size(0) for one in math.per_token_cast_to_fp8(x[:0])] == [0, 0]


def test_back_from_packed_exponents():
    x = torch.randn(3, 512, generator=torch.Generator().manual_seed(2)).to(torch.bfloat16)
    rows, scales = fp8.to_fp8(x, round_scale=True)
    packed = (scales.view(torch.int32) >> 23).to(torch.uint8).view(torch.int32)
    assert packed.shape == (3, 1) and torch.equal(fp8.from_ue8m0(packed), scales)
    want = math.per_token_cast_back(rows, scales)
    assert torch.equal(math.per_token_cast_back(rows, packed), want)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize("num_slots, width", [(4, 6), (7, 3)])
def test_each_number_of_a_row_once(dtype, num_slots, width):
    gen = torch.Generator().manual_seed(num_slots)
    x = torch.randint(-2, num_slots, (20, width), generator=gen).to(dtype)
    want = []
    for row in x.tolist():
        once = sorted({number for number in row if number >= 0}, reverse=True)
        want.append(once + [-1] * (width - len(once)))
    math.inplace_unique(x, num_slots)
    assert x.dtype == dtype and x.tolist() == want


def test_scores_of_some_groups():
    scores = torch.arange(1.0, 13.0).view(2, 6)
    kept = math.create_grouped_scores(scores, torch.tensor([[0, 2], [1, 1]]), 3)
    assert kept.tolist() == [[1, 2, 0, 0, 5, 6], [0, 0, 9, 10, 0, 0]]


def test_hashes_and_bytes():
    a, b = torch.arange(6, dtype=torch.int32), torch.ones(3, dtype=torch.float16)
    assert math.hash_tensor(a) == 15 == math.hash_tensor(a.view(2, 3).t())
    assert math.hash_tensor(b) == 3 * 0x3C
    assert math.hash_tensors(a, (None, [b])) == 15 ^ 3 * 0x3C and math.hash_tensors() == 0
    assert math.count_bytes(a, (None, [b, b])) == 24 + 6 + 6


def sizes(rank, num_ranks, group):
    assert deep_ep.get_physical_domain_size(group) == (1, num_ranks)
    assert deep_ep.get_logical_domain_size(group) == (1, num_ranks)
    with two_domains() as hosts:
        assert envs.get_physical_domain_size(hosts) == (2, 2)
        assert envs.get_logical_domain_size(hosts) == (2, 2)
        assert envs.get_logical_domain_size(hosts, False) == (1, 4)
        for is_hybrid, logical in ((True, (2, 2)), (False, (1, 4))):
            buffer = ElasticBuffer(hosts, 1, allow_hybrid_mode=is_hybrid)
            assert envs.get_physical_domain_size(buffer) == (2, 2)
            assert envs.get_logical_domain_size(buffer) == logical
    envs.check_nvlink_connections(group)


def test_sizes_of_domains(ranks):
    ranks(sizes, NUM_RANKS)


def test_environment_for_a_while(monkeypatch):
    monkeypatch.setenv("EP_A", "before")
    monkeypatch.delenv("EP_B", raising=False)
    with envs.EnvOverride([("EP_A", "1", True), ("EP_B", "2", True), ("EP_C", "3", False)]):
        assert os.environ["EP_A"] == "1" and os.environ["EP_B"] == "2"
        assert "EP_C" not in os.environ
    assert os.environ["EP_A"] == "before" and "EP_B" not in os.environ


def test_torch_must_not_fill_memory():
    envs.check_torch_deterministic()
    torch.use_deterministic_algorithms(True)
    try:
        with pytest.raises(AssertionError, match="fill_uninitialized_memory"):
            envs.check_torch_deterministic()
    finally:
        torch.use_deterministic_algorithms(False)


def test_rates():
    assert (envs.get_sm_read_gbs(), envs.get_sm_write_gbs()) == (180, 45)
    assert envs.get_nvlink_gbs(1) == pytest.approx(envs.get_nvlink_gbs() / 0.9) and (
        envs.get_nvlink_gbs() > 0
    )
    assert envs.get_rdma_gbs("no_such_card") == 50
    assert not envs.check_fast_rdma_atomic_support("no_such_card")


HOST = """
import torch
import torch.distributed as dist
from weft.compat.deep_ep.utils.envs import dist_print, init_dist
try:
    dist_print("too early")
except AssertionError as error:
    assert "init_dist first" in str(error)
else:
    raise SystemExit("it printed")
torch.cuda.is_available = lambda: False
rank, num_ranks, group = init_dist(0, 1, seed=7)
assert torch.get_default_dtype() == torch.bfloat16 and torch.initial_seed() == 7 + rank
found = [None] * num_ranks
dist.all_gather_object(found, rank, group=group)
dist_print(f"rank {rank} of {num_ranks}: {found}")
dist_print("once", once_in_node=True)
dist.destroy_process_group()
"""


def test_ranks_of_two_hosts_meet():
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port = one.getsockname()[1]
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", HOST],
            env={**os.environ, "WORLD_SIZE": "2", "RANK": str(host), "MASTER_PORT": str(port)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for host in range(2)
    ]
    for host, process in enumerate(processes):
        told, _ = process.communicate(timeout=60)
        assert process.returncode == 0
        assert told.splitlines() == [f"rank {host} of 2: [0, 1]", "once"]


def test_what_is_not_a_row_is_refused():
    with pytest.raises(weft.InvalidArgument, match="x has shape"):
        math.per_token_cast_to_fp8(torch.zeros(4))
