# SPDX-License-Identifier: Apache-2.0
"""Weft in place of MSCCL++'s EP buffer, by the calls that its benchmark makes."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
import torch

FILE = Path(__file__).resolve().parents[3] / "examples/benchmarks/mscclpp/ep_weft.py"
TOKENS, HIDDEN, TOPK, EXPERTS = 16, 128, 3, 8


def buffer_class():
    spec = importlib.util.spec_from_file_location("mscclpp_ep_weft", FILE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.Buffer


def paired_calls(rank, num_ranks, group, has_hook):
    """The benchmark's loop, with sums that are looked at."""
    gen, local = torch.Generator().manual_seed(rank), EXPERTS // num_ranks
    buffer_of = buffer_class()
    size = buffer_of.get_low_latency_rdma_size_hint(TOKENS, HIDDEN, num_ranks, EXPERTS)
    buffer = buffer_of(
        group,
        num_nvl_bytes=0,
        num_rdma_bytes=size,
        low_latency_mode=True,
        num_qps_per_rank=max(1, local),
    )
    assert buffer.is_available()
    x = torch.randint(-8, 8, (TOKENS, HIDDEN), generator=gen).to(torch.bfloat16)
    idx = torch.rand(TOKENS, EXPERTS, generator=gen).topk(TOPK).indices
    weights = 2.0 ** torch.randint(-2, 1, (TOKENS, TOPK), generator=gen)
    stride = num_ranks * TOKENS
    given = [torch.empty(local, stride, HIDDEN, dtype=torch.bfloat16), None]
    given += [torch.empty(local, stride, dtype=torch.int32)]
    given += [torch.empty(local, num_ranks, dtype=torch.int64)]
    given += [torch.empty(local, dtype=torch.int32)]
    out = torch.empty(TOKENS, HIDDEN, dtype=torch.bfloat16)
    for _ in range(3):
        got = buffer.low_latency_dispatch(x, idx, TOKENS, EXPERTS, False, False, has_hook, *given)
        if has_hook:
            got[6]()
        assert len(got) == 7 and got[0].shape == given[0].shape and got[1] is None
        assert got[2].shape == given[4].shape
        made = buffer.low_latency_combine(
            got[0], idx, weights, got[3], got[4], TOKENS, EXPERTS, False, False, has_hook, out
        )
        if has_hook:
            made[2]()
        assert made[0].data_ptr() == out.data_ptr()
        assert torch.equal(out, (x.float() * weights.sum(1, keepdim=True)).to(torch.bfloat16))
        out.zero_()


@pytest.mark.parametrize("has_hook", [False, True])
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_its_pairs_of_calls(ranks, num_ranks, has_hook):
    ranks(paired_calls, num_ranks, has_hook)


def test_a_program_finds_it_under_their_name(tmp_path):
    program = tmp_path / "bench.py"
    program.write_text("import sys\nfrom mscclpp.ext import ep\nprint(ep.Buffer.__doc__, sys.argv)")
    command = [sys.executable, FILE, program, "-e", "8"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert (
        done.stdout == f"`mscclpp.ext.ep.Buffer`: low-latency calls. {[str(program), '-e', '8']}\n"
    )
