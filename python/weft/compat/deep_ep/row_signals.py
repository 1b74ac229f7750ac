# SPDX-License-Identifier: Apache-2.0
"""Single-batch overlap: the signals by which a matrix product tells a low-latency combine its
progress, in the two forms of callers, and how many multiprocessors the combine takes."""

from __future__ import annotations

import torch
from torch import Tensor

from weft.outputs import RowMarks

from .checks import NotInWeft, check, check_tensor
from .handles import LowLatencyHandle

_MOST_SMS = 32  # of a call by signals of experts


def by_expert(signals: Tensor, wanted: int, handle: LowLatencyHandle) -> tuple[RowMarks, int]:
    """Makes marks of src_signals: each of the `wanted` multiprocessors that compute adds one to an
    expert's signal; signals behind the experts' are not read (SGLang has one per row of NVFP4).
    Returns the marks and how many multiprocessors are left for the call, 0 on a CPU.
    """
    experts = handle.plan.exchange.num_local_experts
    check_tensor("src_signals", signals, (torch.uint32, torch.int32), ["experts"])
    has_all = signals.numel() >= experts
    check(has_all, f"src_signals has {signals.numel()} elements (expected at least {experts})")
    _check_unmasked(handle)
    marks = RowMarks(signals.view(torch.int32)[:experts], wanted)
    if not signals.is_cuda:
        return marks, 0
    sms = torch.cuda.get_device_properties(signals.device).multi_processor_count
    return marks, min(max(sms - wanted, 1), _MOST_SMS)


def by_block(
    counts: Tensor | None,
    signals: Tensor | None,
    block_m: int,
    threshold: int,
    num_sms: int,
    has_hook: bool,
    handle: LowLatencyHandle,
) -> tuple[RowMarks, int]:
    """Makes marks of comp_signal, one per block of block_m rows; see `by_expert`."""
    check(has_hook, "Overlap mode requires return_recv_hook=True")
    for name, value in {"block_m": block_m, "threshold": threshold, "num_sms": num_sms}.items():
        check(value > 0, f"{name} = {value} (expected at least 1)")
    experts = handle.plan.exchange.num_local_experts
    check_tensor("packed_recv_count", counts, torch.int32, [experts])
    check_tensor("comp_signal", signals, torch.int32, ["blocks"])
    needed = experts * -(-handle.stride // block_m)
    check(
        signals.numel() >= needed,
        f"comp_signal has {signals.numel()} elements (expected at least {needed}: {experts} "
        f"experts of {handle.stride} rows, block_m = {block_m})",
    )
    _check_unmasked(handle)
    marks = RowMarks(signals[:needed], threshold, block_m)
    return marks, num_sms if signals.is_cuda else 0


def _check_unmasked(handle: LowLatencyHandle) -> None:
    """Refuses masked ranks: their rows are put back first, so all rows must be whole."""
    if handle.order is not None:
        raise NotInWeft("low_latency_combine: overlap beside masked ranks (one of the two)")
