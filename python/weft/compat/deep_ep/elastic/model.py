# SPDX-License-Identifier: Apache-2.0
"""The numbers that `ElasticBuffer` computes rather than measures: SMs, queue pairs, bytes.

Callers plan with these numbers. Weft uses none: it chooses SMs by a measured table, has no queue
pairs here and sizes its memory by itself.
"""

import math
from pathlib import Path
from typing import NamedTuple

import torch

from weft.compat import environment
from weft.fp8 import GROUP
from weft.overlap_settings import count_gpu_sms

from ..payload import round_up

ALIGNMENT = 2 << 20  # of buffer sizes
ANY_TOPK = 32  # counted where the number of choices is not known
_SMS_WITHOUT_GPU = 132
NVLINK_SHARE = 0.9  # of the links' rate that rows reach
_FAST_ATOMIC_NIC = "MT4131"


class Ranks(NamedTuple):
    """scaleup: ranks that a second hop can reach over NVLink; scaleout: groups of those."""

    num_ranks: int
    num_scaleout: int
    num_scaleup: int
    num_rdma: int
    num_nvlink: int


class Rates(NamedTuple):
    """GB/s: of the network and of NVLink (one direction of a GPU), and of one SM."""

    rdma: float
    nvlink: float
    sm_read: float = 200
    sm_write: float = 50


def expected_groups(num_experts: int, num_topk: int, num_groups: int) -> float:
    """Returns how many groups hold a token's `num_topk` random experts, on average."""
    each = num_experts // num_groups
    missed = math.comb(num_experts - each, num_topk) / math.comb(num_experts, num_topk)
    return num_groups * (1 - missed)


class Traffic(NamedTuple):
    """Traffic of a dispatch, in units of the rows that a rank receives. rows: the rate at which the
    slower of network and NVLink carries them; infinite where nothing travels."""

    read: float
    write: float
    nvlink: float
    rows: float


def traffic_of(num_experts: int, num_topk: int, ranks: Ranks, rates: Rates) -> Traffic:
    """Models random experts."""
    met = expected_groups(num_experts, num_topk, ranks.num_ranks)
    if ranks.num_scaleout > 1:
        out = expected_groups(num_experts, num_topk, ranks.num_scaleout)
        read = (1 + out) / met
        write = 1 / met + out / (met * ranks.num_scaleout) + 1
        rdma_traffic = out / met * (1 - 1 / ranks.num_scaleout)
        nvlink_traffic = 1 - 1 / ranks.num_scaleup
        is_rdma_bound = rdma_traffic / rates.rdma > nvlink_traffic / rates.nvlink
    else:
        local = ranks.num_nvlink / ranks.num_ranks
        read = 1 / met
        write = local + (1 / met if ranks.num_rdma > 1 else 0)
        rdma_traffic = 0.0
        nvlink_traffic = local * (1 - 1 / ranks.num_nvlink)
        is_rdma_bound = False
    rate, traffic = (rates.rdma, rdma_traffic) if is_rdma_bound else (rates.nvlink, nvlink_traffic)
    rows = rate / traffic if traffic > 0 else math.inf
    return Traffic(read, write, nvlink_traffic, rows)


def theoretical_num_sms(
    num_experts: int,
    num_topk: int,
    ranks: Ranks,
    rates: Rates,
    device_sms: int,
    prefer_overlap_with_compute: bool,
) -> int:
    """Returns SMs that keep the slower of network and NVLink busy, by the bytes an SM reads and
    writes in dispatch. Even, at least 4, at most the device's."""
    read, write, _, rows = traffic_of(num_experts, num_topk, ranks, rates)
    needed = float(device_sms)
    if rows < math.inf:
        needed = rows * max(read / rates.sm_read, write / rates.sm_write)
    num_sms = round_up(max(4, math.ceil(1.25 * needed)), 2)
    if not prefer_overlap_with_compute:
        num_sms = max(num_sms, 64)
    return min(device_sms, num_sms)


def theoretical_num_sms_of_both(
    num_experts: int,
    num_topk: int,
    ranks: Ranks,
    rates: Rates,
    device_sms: int,
    prefer_overlap_with_compute: bool,
) -> int:
    """Returns SMs that keep the slower of network and NVLink busy in dispatch and in combine, which
    reads what dispatch writes, save what stays over NVLink. A multiple of 4, or the device's
    largest even number."""
    read, write, nvlink, rows = traffic_of(num_experts, num_topk, ranks, rates)
    needed = float(device_sms)
    if rows < math.inf:
        by_dispatch = max(read / rates.sm_read, write / rates.sm_write)
        by_combine = max((write - nvlink) / rates.sm_read, (read + nvlink) / rates.sm_write)
        needed = rows * max(by_dispatch, by_combine)
    num_sms = round_up(max(4, math.ceil(1.3 * needed)), 4)
    if not prefer_overlap_with_compute:
        num_sms = max(num_sms, 64)
    return min(device_sms // 2 * 2, num_sms)


def buffer_bytes(
    num_ranks: int,
    num_max_tokens_per_rank: int,
    hidden: int,
    num_topk: int,
    use_fp8_dispatch: bool,
    allow_multiple_reduction: bool,
) -> int:
    """Returns `ElasticBuffer`'s most bytes at once: rows from every rank, and returning rows."""
    group = GROUP if use_fp8_dispatch else None
    received, returned = _bytes_of_token(
        num_ranks, hidden, num_topk, group, allow_multiple_reduction
    )
    return round_up(max(num_max_tokens_per_rank * (received + returned), 1), ALIGNMENT)


def larger_call_bytes(
    num_ranks: int,
    num_max_tokens_per_rank: int,
    hidden: int,
    num_topk: int,
    use_fp8_dispatch: bool,
    allow_multiple_reduction: bool,
) -> int:
    """Returns `EPBuffer`'s most bytes at once: rows from every rank, or returning rows."""
    group = 32 if use_fp8_dispatch else None
    either = _bytes_of_token(num_ranks, hidden, num_topk, group, allow_multiple_reduction)
    return round_up(num_max_tokens_per_rank * max(either), ALIGNMENT)


def _bytes_of_token(
    num_ranks: int, hidden: int, num_topk: int, group: int | None, allow_multiple_reduction: bool
) -> tuple[int, int]:
    """Returns bytes for a token of each rank: received from all, and returned to one.

    group: elements of FP8 that have a scale of four bytes; None for bf16.
    """
    topk = num_topk or ANY_TOPK
    elements = 2 * hidden if group is None else hidden + 4 * math.ceil(hidden / group)
    returns = min(topk, num_ranks) if allow_multiple_reduction else topk
    return num_ranks * (elements + topk * 12 + 16), returns * (hidden * 2 + topk * 4)


def device_sms() -> int:
    """Returns the current GPU's multiprocessors, or a usual number."""
    return count_gpu_sms() or _SMS_WITHOUT_GPU


def nvlink_gbs(share: float = NVLINK_SHARE) -> float:
    """Returns the rate of the GPU's generation: links times one's GB/s, less overhead."""
    major = torch.cuda.get_device_capability()[0] if torch.cuda.is_available() else 9
    links, rate = {8: (12, 25.0), 9: (18, 26.5625)}.get(major, (18, 53.125))
    return links * rate * share


def rdma_gbs(nic: str | None = None) -> float:
    """Returns a network card's rate by the system, or a usual one."""
    rate = _nic_file("ports/1/rate", nic).split()  # like: 400 Gb/sec (4X NDR)
    return float(rate[0]) / 8 if rate else 50.0


def allocated_qps(hybrid: bool) -> int:
    """Returns `deep_ep`'s allocated queue pairs."""
    if not hybrid:
        return 17
    return 65 if has_fast_atomics() else 129


def has_fast_atomics(nic: str | None = None) -> bool:
    """Returns whether `deep_ep` would count on fast atomics of a network card."""
    return _nic_file("hca_type", nic).strip() == _FAST_ATOMIC_NIC


def theoretical_num_qps(num_sms: int, hybrid: bool, allocated: int) -> int:
    """Returns queue pairs of a call by `num_sms`."""
    return min(16 * num_sms + 1 if hybrid else min(num_sms, 9), allocated)


def _nic_file(name: str, nic: str | None) -> str:
    """Reads a file of nic, else EP_NIC_NAME's."""
    nic = nic or environment.text("EP_NIC_NAME") or "mlx5_0"
    try:
        return Path("/sys/class/infiniband", nic, name).read_text()
    except OSError:
        return ""
