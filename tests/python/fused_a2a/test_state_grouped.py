# SPDX-License-Identifier: Apache-2.0
"""The hybrid and elastic buffers that the module keeps, with stand-ins for them."""

from unittest.mock import MagicMock, Mock

import pytest
import torch

import weft.fused_a2a as fa
from weft.fused_a2a import buffers


@pytest.fixture(autouse=True)
def no_state(monkeypatch):
    monkeypatch.setattr(fa, "_hybrid_ep_buffer", None)
    monkeypatch.setattr(fa, "_elastic_buffer", None)
    monkeypatch.setattr(buffers, "parked", {})


def group_of(size=2):
    group = Mock()
    group.size.return_value = size
    return group


def test_init_hybrid_passes_what_is_given(monkeypatch):
    kind = MagicMock()
    monkeypatch.setattr(fa, "HybridEPBuffer", kind)
    group = group_of()
    fa.init_hybrid_ep_buffer(group, 64, 128, 4, 20, 22, False)
    kind.assert_called_once_with(
        group=group,
        hidden_dim=64,
        max_num_of_tokens_per_rank=128,
        num_local_experts=4,
        use_fp8=False,
        num_sms_dispatch_api=20,
        num_sms_combine_api=22,
    )
    assert fa._hybrid_ep_buffer is kind.return_value
    kind.reset_mock()
    fa.init_hybrid_ep_buffer(
        group=group,
        hidden_dim=64,
        num_tokens=128,
        num_local_experts=4,
        num_blocks_permute=5,
        num_blocks_unpermute=6,
        num_sms_preprocessing_api=7,
    )
    kind.assert_called_once_with(
        group=group,
        hidden_dim=64,
        max_num_of_tokens_per_rank=128,
        num_local_experts=4,
        use_fp8=False,
        num_blocks_permute=5,
        num_blocks_unpermute=6,
        num_sms_preprocessing_api=7,
    )
    fa.reset_hybrid_ep_buffer()
    assert fa._hybrid_ep_buffer is None


def test_init_hybrid_refuses(monkeypatch):
    monkeypatch.setattr(fa, "HybridEPBuffer", MagicMock())
    with pytest.raises(AssertionError, match="does not support fp8 dispatch"):
        fa.init_hybrid_ep_buffer(group_of(), 64, 128, 4, 24, 24, True)
    for sizes in ({}, {"seq_len": 1, "num_tokens": 1}):
        with pytest.raises(TypeError, match="seq_len"):
            fa.init_hybrid_ep_buffer(group_of(), 64, num_local_experts=4, **sizes)
    with pytest.raises(TypeError, match="num_local_experts"):
        fa.init_hybrid_ep_buffer(group_of(), 64, 128)
    fa.HybridEPBuffer.assert_not_called()


def test_elastic_grows_and_never_shrinks(monkeypatch):
    class Elastic:
        def __init__(self, group, num_bytes=None, num_max_tokens_per_rank=0, hidden=0, num_topk=0):
            self.group, self.num_max_tokens_per_rank = group, num_max_tokens_per_rank
            hint = self.get_buffer_size_hint(group, num_max_tokens_per_rank, hidden, num_topk)
            self.num_bytes = num_bytes or hint

        @staticmethod
        def get_buffer_size_hint(group, num_max_tokens_per_rank, hidden, num_topk=0):
            return num_max_tokens_per_rank * hidden

    monkeypatch.setattr(fa, "ElasticBuffer", Elastic)
    group = group_of()
    first = fa.get_elastic_buffer(group, 128, 64, 8)
    assert fa._elastic_buffer is first
    assert fa.get_elastic_buffer(group, 64, 128, 8) is first
    second = fa.get_elastic_buffer(group, 256, 16, 8)
    assert second is not first
    assert second.num_max_tokens_per_rank == 256 and second.num_bytes == 128 * 64
    assert fa.get_elastic_buffer(group, 128, 64, 8) is second
    assert fa.get_elastic_buffer(group_of(), 128, 64, 8) is not second


def test_hybrid_is_kept_for_its_group(monkeypatch):
    monkeypatch.setattr(fa, "HybridEPBuffer", Mock(side_effect=lambda **sizes: Mock(**sizes)))
    one, other = group_of(), group_of()
    x = torch.zeros(3, 8)
    first = buffers.get_hybrid_ep_buffer(one, x, 4, {"num_blocks_permute": None})
    assert fa._hybrid_ep_buffer is first
    assert (first.hidden_dim, first.max_num_of_tokens_per_rank) == (8, 3)
    assert buffers.get_hybrid_ep_buffer(one, torch.zeros(90, 64), 8, {}) is first
    second = buffers.get_hybrid_ep_buffer(other, x, 4, {})
    assert second is not first and second.group is other
    stand_in = object()
    fa._hybrid_ep_buffer = stand_in
    assert buffers.get_hybrid_ep_buffer(one, x, 4, {}) is stand_in
