# SPDX-License-Identifier: Apache-2.0
"""ElasticBuffer's answers about itself: sizes, ranks, the model of SMs, and what it refuses."""

import inspect
import itertools
import math

import pytest
import torch

import weft
from weft.compat.deep_ep.elastic import ElasticBuffer, model
from weft.compat.deep_ep.utils import EventHandle

MIB2 = 2 << 20


def counted_groups(num_experts, num_topk, num_groups):
    """Mean number of groups that a token chooses, by going through every choice."""
    each = num_experts // num_groups
    choices = list(itertools.combinations(range(num_experts), num_topk))
    return sum(len({e // each for e in choice}) for choice in choices) / len(choices)


@pytest.mark.parametrize("shape", [(8, 1, 2), (8, 3, 4), (12, 5, 3), (12, 12, 6), (6, 2, 1)])
def test_expected_groups(shape):
    assert model.expected_groups(*shape) == pytest.approx(counted_groups(*shape), rel=1e-12)


def sms(experts, topk, ranks, nvlink, hybrid, rdma_gbs, nvlink_gbs, device, overlap):
    """Per row that a rank receives: how many rows an SM reads and writes, and what travels."""

    def groups(count):
        return count * (1 - math.comb(experts - experts // count, topk) / math.comb(experts, topk))

    outer = ranks // nvlink if hybrid else 1
    inner = ranks // outer
    p = groups(ranks)
    if outer == 1:
        read = 1 / p
        write = nvlink / ranks + (1 / p if ranks > nvlink else 0)
        over_nvlink, over_rdma = nvlink / ranks * (1 - 1 / nvlink), 0
    else:
        s = groups(outer)
        read = (1 + s) / p
        write = 1 / p + s / (p * outer) + 1
        over_nvlink, over_rdma = 1 - 1 / inner, s / p * (1 - 1 / outer)
    slowest = max((over_nvlink / nvlink_gbs, 0), (over_rdma / rdma_gbs, 1))
    needed = device if slowest[0] == 0 else max(read / 200, write / 50) / slowest[0]
    count = max(4, math.ceil(1.25 * needed))
    count += count % 2
    return min(device, count if overlap else max(count, 64))


@pytest.mark.parametrize("experts_topk", [(256, 8), (128, 1), (64, 6), (64, 64)])
@pytest.mark.parametrize("ranks_nvlink", [(1, 1), (4, 4), (8, 8), (16, 8), (32, 8), (16, 1)])
@pytest.mark.parametrize("hybrid", [True, False])
@pytest.mark.parametrize("overlap", [True, False])
def test_sm_model(experts_topk, ranks_nvlink, hybrid, overlap):
    (experts, topk), (ranks, nvlink) = experts_topk, ranks_nvlink
    outer = ranks // nvlink if hybrid else 1
    for rdma_gbs, nvlink_gbs, device in ((50, 430, 132), (400, 150, 78), (12.5, 860, 148)):
        got = model.theoretical_num_sms(
            experts,
            topk,
            model.Ranks(ranks, outer, ranks // outer, ranks // nvlink, nvlink),
            model.Rates(rdma_gbs, nvlink_gbs),
            device,
            overlap,
        )
        assert got == sms(
            experts, topk, ranks, nvlink, hybrid, rdma_gbs, nvlink_gbs, device, overlap
        )


def test_sm_model_by_hand():
    # 8 ranks of one domain, every expert chosen: p = 8, traffic 7/8, writes 1 row at 50 GB/s.
    ranks = model.Ranks(8, 1, 8, 1, 8)
    # 350 / (7/8) / 50 = 8 SMs, a quarter more is 10.
    assert model.theoretical_num_sms(8, 8, ranks, model.Rates(50, 350), 132, True) == 10
    assert model.theoretical_num_sms(8, 8, ranks, model.Rates(50, 350), 132, False) == 64
    alone = model.Ranks(1, 1, 1, 1, 1)
    assert model.theoretical_num_sms(8, 2, alone, model.Rates(50, 350), 78, True) == 78


def test_queue_pairs():
    assert model.theoretical_num_qps(4, True, 129) == 65
    assert model.theoretical_num_qps(24, True, 129) == 129
    assert model.theoretical_num_qps(24, False, 17) == 9
    assert model.theoretical_num_qps(4, False, 17) == 4


def test_buffer_bytes_grow_with_every_size():
    base = {
        "num_ranks": 8,
        "num_max_tokens_per_rank": 4096,
        "hidden": 4096,
        "num_topk": 4,
        "use_fp8_dispatch": False,
        "allow_multiple_reduction": True,
    }
    size = model.buffer_bytes(**base)
    assert size % MIB2 == 0
    for name in ("num_ranks", "num_max_tokens_per_rank", "hidden", "num_topk"):
        assert model.buffer_bytes(**{**base, name: 2 * base[name]}) > size
    assert model.buffer_bytes(**{**base, "num_topk": 0}) == model.buffer_bytes(
        **{**base, "num_topk": 32}
    )
    assert model.buffer_bytes(1, 0, 0, 0, False, True) == MIB2


def itself(rank, num_ranks, group):
    hint = ElasticBuffer.get_buffer_size_hint(group, 100, 7168, num_topk=8)
    buffer = ElasticBuffer(
        group, num_max_tokens_per_rank=100, hidden=7168, num_topk=8, explicitly_destroy=True
    )
    assert buffer.num_bytes == hint and hint % MIB2 == 0
    assert ElasticBuffer(group, num_bytes=MIB2 + 1).num_bytes == 2 * MIB2
    assert buffer.group is group and buffer.num_max_tokens_per_rank == 100
    assert (buffer.rank_idx, buffer.num_ranks) == (rank, num_ranks)
    assert buffer.get_physical_domain_size() == (1, num_ranks)
    assert buffer.get_logical_domain_size() == (1, num_ranks)
    assert (buffer.scaleout_rank_idx, buffer.scaleup_rank_idx) == (0, rank)
    assert (buffer.num_rdma_ranks, buffer.num_nvlink_ranks) == (1, num_ranks)
    assert (buffer.num_scaleout_ranks, buffer.num_scaleup_ranks) == (1, num_ranks)
    assert buffer.num_allocated_qps in (65, 129)
    assert ElasticBuffer(group, 0, allow_hybrid_mode=False).num_allocated_qps == 17
    assert ElasticBuffer(group, 0, num_allocated_qps=33).num_allocated_qps == 33
    assert buffer.get_theoretical_num_qps(2) == 33
    assert isinstance(ElasticBuffer.capture(), EventHandle)
    num_sms = buffer.get_theoretical_num_sms(64, 4, nvlink_gbs=400)
    assert num_sms == sms(64, 4, num_ranks, num_ranks, True, 50, 400, model.device_sms(), True)
    with pytest.raises(AssertionError, match="num_scaleout_topk = 2"):
        buffer.get_theoretical_num_sms(64, 4, 2)
    with pytest.raises(AssertionError, match="num_experts = 7"):
        buffer.get_theoretical_num_sms(7, 4)
    assert buffer.get_theoretical_num_sms(64, 4) >= 4
    buffer.barrier()
    buffer.barrier(use_comm_stream=False, with_cpu_sync=True)
    with pytest.raises(weft.Unsupported, match="num_cpu_bytes"):
        ElasticBuffer(group, num_bytes=MIB2, num_cpu_bytes=MIB2)
    for name in ("engram_write", "pp_send", "all_gather", "agrs_new_session"):
        with pytest.raises(weft.Unsupported, match=f"{name}: experimental"):
            getattr(buffer, name)(torch.zeros(1))
    with pytest.raises(weft.Unsupported):
        ElasticBuffer.get_pp_buffer_size_hint(1, 2)
    x, idx = torch.zeros(3, 8), torch.zeros(3, 1, dtype=torch.int64)
    _, _, _, handle, _ = buffer.dispatch(x, idx, num_experts=2 * num_ranks)
    buffer.destroy()
    with pytest.raises(weft.InvalidArgument, match="destroyed"):
        buffer.combine(x, handle)
    with pytest.raises(AssertionError, match="explicitly_destroy"):
        ElasticBuffer(group).destroy()


def test_attributes_models_and_refusals(ranks):
    ranks(itself, 2)


def two_domains(rank, num_ranks, group):
    """Ranks of several domains, were the group to have them."""
    import weft.compat.deep_ep.elastic.base as elastic

    found = elastic.found_ranks_per_domain
    elastic.found_ranks_per_domain = lambda _group: 2
    try:
        hybrid = ElasticBuffer(group, 0)
        direct = ElasticBuffer(group, 0, num_max_tokens_per_rank=4, allow_hybrid_mode=False)
    finally:
        elastic.found_ranks_per_domain = found
    assert hybrid.get_physical_domain_size() == hybrid.get_logical_domain_size() == (2, 2)
    assert (hybrid.scaleout_rank_idx, hybrid.scaleup_rank_idx) == (rank // 2, rank % 2)
    assert direct.get_physical_domain_size() == (2, 2)
    assert direct.get_logical_domain_size() == (1, 4)
    for buffer, mode in ((hybrid, True), (direct, False)):
        got = buffer.get_theoretical_num_sms(16, 3, rdma_gbs=50, nvlink_gbs=400)
        assert got == sms(16, 3, 4, 2, mode, 50, 400, model.device_sms(), True)
    x, idx = torch.zeros(1 + rank, 8), torch.zeros(1 + rank, 1, dtype=torch.int64)
    _, _, _, handle, _ = hybrid.dispatch(x, idx, num_experts=4, num_max_tokens_per_rank=4)
    # Rank 0 has it all: 1 + 3 tokens of the ranks that are first in their domain, 2 + 4 others.
    want = [4, 10] if rank == 0 else [0, 0]
    assert handle.psum_num_recv_tokens_per_scaleup_rank.tolist() == want


def test_ranks_of_two_domains(ranks):
    ranks(two_domains, 4)


def test_signatures():
    names = list(inspect.signature(ElasticBuffer.dispatch).parameters)
    assert names[1:6] == [
        "x",
        "topk_idx",
        "topk_weights",
        "cumulative_local_expert_recv_stats",
        "num_experts",
    ]
    assert names[-6:] == [
        "handle",
        "do_handle_copy",
        "do_cpu_sync",
        "do_expand",
        "do_zero_padding",
        "use_tma_aligned_col_major_sf",
    ]
    names = list(inspect.signature(ElasticBuffer.combine).parameters)
    assert names[1:7] == ["x", "handle", "topk_weights", "bias", "num_sms", "num_qps"]
    assert list(inspect.signature(ElasticBuffer).parameters) == [
        "group",
        "num_bytes",
        "num_cpu_bytes",
        "num_max_tokens_per_rank",
        "hidden",
        "num_topk",
        "use_fp8_dispatch",
        "deterministic",
        "allow_hybrid_mode",
        "allow_multiple_reduction",
        "prefer_overlap_with_compute",
        "sl_idx",
        "num_allocated_qps",
        "num_cpu_timeout_secs",
        "num_gpu_timeout_secs",
        "explicitly_destroy",
    ]
