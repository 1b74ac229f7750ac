# SPDX-License-Identifier: Apache-2.0
import pytest

from weft.compat.deep_ep import Buffer, Config, get_low_latency_rdma_size_hint
from weft.compat.uccl import Buffer as UCCL

CHUNKS = (
    "num_max_nvl_chunked_send_tokens",
    "num_max_nvl_chunked_recv_tokens",
    "num_max_rdma_chunked_send_tokens",
    "num_max_rdma_chunked_recv_tokens",
)


def chunks(config):
    return tuple(getattr(config, name) for name in CHUNKS)


def test_defaults():
    config = Config()
    assert config.num_sms == 20 and chunks(config) == (6, 256, 6, 258)  # 256 rounded up to 6


def test_positions():
    config = Config(24, 8, 256)
    assert config.num_sms == 24 and chunks(config)[:2] == (8, 256)


@pytest.mark.parametrize(
    "arguments", [(-1,), (20, 0, 8), (20, 8, 8), (20, 6, 256, 0, 8), (20, 6, 256, 8, 8)]
)
def test_chunks_that_do_not_fit(arguments):
    with pytest.raises(AssertionError, match="expected"):
        Config(*arguments)


def test_tables():
    assert chunks(Buffer.get_dispatch_config(8)) == (6, 256, 6, 132)
    assert chunks(Buffer.get_combine_config(8)) == (4, 256, 6, 132)
    assert chunks(Buffer.get_dispatch_config(48)) == (32, 288, 8, 128)
    assert chunks(Buffer.get_combine_config(160)) == (2, 720, 8, 128)


def test_other_numbers_of_ranks_have_the_next_smaller_config():
    for num_ranks, listed in ((1, 2), (3, 2), (7, 4), (12, 8), (72, 64), (1000, 160)):
        for get in (Buffer.get_dispatch_config, Buffer.get_combine_config):
            assert chunks(get(num_ranks)) == chunks(get(listed))
    with pytest.raises(AssertionError, match="num_ranks = 0"):
        Buffer.get_dispatch_config(0)


def test_uccl_has_the_older_tables():
    assert chunks(UCCL.get_dispatch_config(32)) == (32, 288, 32, 128)
    assert chunks(UCCL.get_dispatch_config(48)) == (32, 288, 32, 128)
    assert chunks(UCCL.get_combine_config(64)) == (1, 288, 20, 140)
    assert chunks(UCCL.get_dispatch_config(8)) == chunks(Buffer.get_dispatch_config(8))


def test_set_num_sms_is_for_all_later_configs():
    before = Buffer.num_sms
    try:
        Buffer.set_num_sms(24)
        assert Buffer.num_sms == 24 == Buffer.get_dispatch_config(8).num_sms
        assert UCCL.num_sms == 20
        with pytest.raises(AssertionError, match="must be even"):
            Buffer.set_num_sms(23)
        assert Buffer.get_combine_config(8).num_sms == 24
    finally:
        Buffer.set_num_sms(before)


def test_size_hints():
    config, hidden, meta = Config(20, 8, 256), 14336, 8 + 128 * 8 + 128 * 4 + 128 * 4
    size = 10 * 8 * (20 + 256 * (hidden + meta))
    assert config.get_nvl_buffer_size_hint(hidden, 8) == -(-size // 128) * 128
    assert config.get_rdma_buffer_size_hint(hidden, 8) == 0
    size = 10 * 2 * (18 * 2 * 4 + 258 * 2 * (hidden + meta + 16))
    assert config.get_rdma_buffer_size_hint(hidden, 16) == -(-size // 128) * 128
    for num_ranks in (1, 2, 3, 8, 16, 24, 64):
        sizes = [config.get_nvl_buffer_size_hint(h, num_ranks) for h in (16, 32, 4096, 8192)]
        assert sizes == sorted(sizes) and sizes[0] > 0 and all(s % 128 == 0 for s in sizes)


def test_low_latency_size_hint():
    num_max, hidden, experts = 128, 7168, 256
    dispatch, combine = 16 + 2 * hidden, 4 * 56 + 2 * hidden
    rows = experts * num_max
    total = 2 * (rows * combine + rows * max(dispatch, combine) + 1024)
    want = (total + 128) // 128 * 128
    assert get_low_latency_rdma_size_hint(num_max, hidden, 8, experts) == want
    assert Buffer.get_low_latency_rdma_size_hint(num_max, hidden, 8, experts) == want
    assert Buffer.is_sm90_compiled() is True
