# SPDX-License-Identifier: Apache-2.0
"""`Config`, the configurations by number of ranks, and the sizes that callers compute from them.

Only a configuration's `num_sms` has an effect in Weft: the most GPU multiprocessors a call may
occupy. Sizes in bytes are for callers to compute and compare; Weft takes its own memory.
"""

from dataclasses import dataclass

from weft.fp8 import GROUP

from .checks import check, check_least
from .payload import round_up

Chunks = tuple[int, int, int, int]  # nvl send, nvl recv, rdma send, rdma recv

_ALIGNMENT = 128  # bytes
_DOMAIN_RANKS = 8  # ranks that the hints count as one host
_SOURCE_META_BYTES = 8
_MAX_TOPK_BYTES = 128 * 8 + 128 * 4  # an index and a weight each
_MAX_SCALES_BYTES = 128 * 4
_ROW_META_BYTES = _SOURCE_META_BYTES + _MAX_TOPK_BYTES + _MAX_SCALES_BYTES

_CHUNKS: dict[int, tuple[Chunks, Chunks]] = {  # by ranks: of dispatch, of combine
    2: ((24, 256, 6, 128), (10, 256, 6, 128)),
    4: ((6, 256, 6, 128), (9, 256, 6, 128)),
    8: ((6, 256, 6, 128), (4, 256, 6, 128)),
    16: ((36, 288, 20, 128), (4, 288, 12, 128)),
    24: ((32, 288, 8, 128), (1, 288, 8, 128)),
    32: ((32, 288, 8, 128), (1, 288, 8, 128)),
    48: ((32, 288, 8, 128), (1, 288, 8, 128)),
    64: ((32, 288, 8, 128), (1, 288, 8, 128)),
    96: ((20, 480, 12, 128), (1, 480, 8, 128)),
    128: ((20, 560, 12, 128), (1, 560, 8, 128)),
    144: ((32, 720, 12, 128), (2, 720, 8, 128)),
    160: ((28, 720, 12, 128), (2, 720, 8, 128)),
}
DISPATCH, COMBINE = ({ranks: both[i] for ranks, both in _CHUNKS.items()} for i in range(2))


@dataclass(eq=False)
class Config:
    """How much of a GPU a call takes, and chunk sizes that Weft only keeps.

    num_max_rdma_chunked_recv_tokens is rounded up to a multiple of the send tokens. AssertionError
    for negative num_sms and for chunks that do not fit each other.
    """

    num_sms: int = 20
    num_max_nvl_chunked_send_tokens: int = 6
    num_max_nvl_chunked_recv_tokens: int = 256
    num_max_rdma_chunked_send_tokens: int = 6
    num_max_rdma_chunked_recv_tokens: int = 256

    def __post_init__(self) -> None:
        check_least("Config: num_sms", self.num_sms, 0)
        send, recv = self.num_max_nvl_chunked_send_tokens, self.num_max_nvl_chunked_recv_tokens
        check(
            0 < send < recv,
            f"Config: num_max_nvl_chunked_send_tokens = {send} "
            f"(expected 1 to {recv - 1}, less than num_max_nvl_chunked_recv_tokens)",
        )
        send = self.num_max_rdma_chunked_send_tokens
        check_least("Config: num_max_rdma_chunked_send_tokens", send)
        recv = self.num_max_rdma_chunked_recv_tokens = round_up(
            self.num_max_rdma_chunked_recv_tokens, send
        )
        check(
            2 * send <= recv,
            f"Config: num_max_rdma_chunked_send_tokens = {send} "
            f"(expected at most {recv // 2}, half of num_max_rdma_chunked_recv_tokens)",
        )

    def get_nvl_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        """Returns bytes for rows of `hidden_bytes`: a positive, growing multiple of 128."""
        ranks, hosts = min(num_ranks, _DOMAIN_RANKS), max(num_ranks // _DOMAIN_RANKS, 1)
        row = self.num_max_nvl_chunked_recv_tokens * (hidden_bytes + _ROW_META_BYTES)
        size = self.num_sms // 2 * ranks * ((2 * hosts + 3) * 4 + row)
        return max(round_up(size, _ALIGNMENT), _ALIGNMENT)

    def get_rdma_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        """Returns bytes for ranks of other hosts (see the NVL hint): 0 for up to 8 ranks."""
        if num_ranks <= _DOMAIN_RANKS:
            return 0
        row = hidden_bytes + _ROW_META_BYTES + 16
        size = (_DOMAIN_RANKS * 2 + 2) * 2 * 4 + self.num_max_rdma_chunked_recv_tokens * 2 * row
        return round_up(self.num_sms // 2 * (num_ranks // _DOMAIN_RANKS) * size, _ALIGNMENT)


def config_of(table: dict[int, Chunks], num_ranks: int, num_sms: int) -> Config:
    """Returns the configuration of the largest listed number up to `num_ranks`, at least 2."""
    check_least("config: num_ranks", num_ranks)
    listed = max((size for size in table if size <= num_ranks), default=min(table))
    return Config(num_sms, *table[listed])


def get_low_latency_rdma_size_hint(
    num_max_dispatch_tokens_per_rank: int, hidden: int, num_ranks: int, num_experts: int
) -> int:
    """Returns RDMA buffer bytes for such low-latency calls; Weft needs none."""
    del num_ranks  # the size does not depend on it
    num_scales = hidden // GROUP
    dispatch = 16 + max(2 * hidden, hidden + 4 * num_scales)
    combine = 4 * num_scales + 2 * hidden
    rows = num_experts * num_max_dispatch_tokens_per_rank
    send = max(num_max_dispatch_tokens_per_rank * dispatch, rows * combine)
    recv = rows * max(dispatch, combine)
    signals = round_up(4 * num_experts, _ALIGNMENT)
    return (2 * (send + recv + signals) + _ALIGNMENT) // _ALIGNMENT * _ALIGNMENT
