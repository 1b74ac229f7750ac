# SPDX-License-Identifier: Apache-2.0
"""Moves tokens to their experts and back: torch tensors around the C++ exchange."""

from __future__ import annotations

import struct
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.utils.dlpack import to_dlpack

from weft import _core
from weft.beside import usual_sms
from weft.errors import InvalidArgument
from weft.group import Group
from weft.planned import Plan
from weft.pool import OutputPool
from weft.views import as_bytes, empty_like, view

Tensor = torch.Tensor
_FLOATS = (torch.bfloat16, torch.float16, torch.float32)
_Shape = struct.Struct("<qq")  # max_tokens, max_topk


class Dispatched(NamedTuple):
    """What `dispatch` returns; what was not sent is None."""

    rows: Tensor
    weights: Tensor | None
    scales: Tensor | None


class Combined(NamedTuple):
    """What `combine` returns; weights are None if none were sent."""

    x: Tensor
    weights: Tensor | None


class Exchange:
    """One rank's end of the exchange. Collective: all ranks make the same calls in the same order.

    hidden: elements of a token, whose bytes must be a multiple of 16. num_experts: E, divisible by
    the number of ranks; expert e lives on rank e // (E / R). max_tokens, max_topk: a capacity to
    begin with; a `plan` call in which some rank needs more makes all ranks grow. (In budget mode
    on a GPU the host does not wait and cannot know: give the largest T beforehand.)
    device: of all tensors. num_sms: GPU multiprocessors a call may occupy, 0 by the measured
    table. num_threads: CPU workers of this rank, 0 to share the host's cores. timeout: seconds,
    of every wait. Raises InvalidArgument on every rank if any rank's arguments are wrong or differ.
    """

    def __init__(
        self,
        group: Group | dist.ProcessGroup | None = None,
        *,
        hidden: int,
        num_experts: int,
        max_tokens: int = 4096,
        max_topk: int = 8,
        device: torch.device | str = "cpu",
        num_sms: int = 0,
        num_threads: int = 0,
        transport: str = "auto",
        timeout: float = 30.0,
    ) -> None:
        self.group = group if isinstance(group, Group) else Group.of(group)
        self.hidden = hidden
        self.num_experts = num_experts
        self.max_tokens = max_tokens
        self.max_topk = max_topk
        device = torch.device(device)
        if device.type == "cuda" and device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        self.device = device
        self._on_gpu = device.type == "cuda"  # to ask a device is slow
        self._settings = {
            "hidden": hidden,
            "num_experts": num_experts,
            "device": device.index if self._on_gpu else -1,
            "transport": transport,
            "num_threads": num_threads,
            "num_sms": num_sms,
            "timeout": timeout,
        }
        self._core: _core.Exchange | None = self._make()
        self._pools: dict[_core.Exchange, OutputPool] = {}  # of this exchange and grown-out ones

    def _make(self) -> _core.Exchange:
        return _core.Exchange(
            self.group.core, max_tokens=self.max_tokens, max_topk=self.max_topk, **self._settings
        )

    @property
    def rank(self) -> int:
        return self.group.rank

    @property
    def num_ranks(self) -> int:
        return self.group.num_ranks

    @property
    def num_local_experts(self) -> int:
        return self.num_experts // self.group.num_ranks

    @property
    def core(self) -> _core.Exchange:
        """Raises InvalidArgument after `close`."""
        if self._core is None:
            raise InvalidArgument("exchange: it was closed (make a new one)", rank=self.rank)
        return self._core

    def close(self) -> None:
        """Lets go of the memory. Plans that are alive can still be used."""
        self._core = None
        self._pools.clear()

    def plan(
        self,
        topk_idx: Tensor | None = None,
        weights: Tensor | None = None,
        *,
        routing_map: Tensor | None = None,
        layout: str = "expert_major",
        pad_multiple: int = 1,
        expert_stride: int = 0,
        row_budget: int | None = None,
        overflow: str = "drop",
        num_sms: int = 0,
    ) -> Plan:
        """Collective. Where every token goes.

        topk_idx [T, K] int64 or int32, -1 = no route, any other value outside [0, E) is refused;
        or routing_map [T, E] bool, at most 32 set in a row. T may differ between ranks and be 0.
        weights fp32, [T, K] or [T, E]: kept for `combine(scale="plan")` alone.
        layout "rank_major": a row for each (token, rank), by source rank, then token;
        "expert_major": a row for each route, by local expert (rounded up to pad_multiple rows),
        source rank, token, k; "expert_strided": the same with expert e's block at
        e * expert_stride (0: the largest block of the group).
        row_budget: rows of this rank's output, fixed; no wait for a GPU. Routes that do not fit
        are dropped, last slots first, and give zeros (overflow="drop"), or every rank raises
        ("error").
        """

        def make() -> Plan:
            core = self.core
            made = core.plan(
                view(topk_idx),
                view(routing_map),
                view(weights),
                layout,
                pad_multiple,
                expert_stride,
                row_budget,
                overflow,
                self._stream(),
                num_sms,
            )
            return Plan(self, made, core)

        try:
            return make()
        except InvalidArgument:
            has_size = row_budget is not None or expert_stride > 0
            if self._on_gpu and has_size and overflow == "drop":
                raise  # nobody waited, so the others do not know yet
            if not self._grow(topk_idx, routing_map):
                raise
        return make()

    def _grow(self, topk_idx: Tensor | None, routing_map: Tensor | None) -> bool:
        """Collective, after a call that every rank refused. True if size was the reason."""
        tokens, topk = self.max_tokens, self.max_topk
        if topk_idx is not None and topk_idx.dim() == 2:
            tokens, topk = max(tokens, topk_idx.size(0)), max(topk, topk_idx.size(1))
        if routing_map is not None and routing_map.dim() == 2:
            tokens = max(tokens, routing_map.size(0))
            most = int(routing_map.sum(1).max()) if routing_map.numel() > 0 else 0
            topk = max(topk, most)
        needs = [_Shape.unpack(block) for block in self.group.all_gather(_Shape.pack(tokens, topk))]
        tokens = max(need[0] for need in needs)
        topk = min(max(need[1] for need in needs), 32)
        if tokens <= self.max_tokens and topk <= self.max_topk:
            return False
        self.max_tokens = max(self.max_tokens, 1 << max(tokens - 1, 0).bit_length())
        self.max_topk = max(self.max_topk, topk)
        self._core = self._make()
        return True

    def dispatch(
        self,
        plan: Plan,
        x: Tensor,
        weights: Tensor | None = None,
        scales: Tensor | None = None,
        *,
        quantise: str = "none",
        num_sms: int = 0,
    ) -> Dispatched:
        """Collective. Without gradients; `weft.dispatch` has them and says what goes in and out."""
        calls = plan.calls
        cols = x.size(1) if x.dim() == 2 else 1
        dtype, row_scales = x.dtype, as_bytes(scales)
        if quantise != "none":
            dtype = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}[quantise]
        rows = self._allocate(calls, plan.num_rows, cols, dtype)
        row_weights = out_scales = None
        if weights is not None:
            row_weights = empty_like(x, plan.num_rows, plan.row_weight_cols, torch.float32)
        if row_scales is not None:
            out_scales = empty_like(x, plan.num_rows, row_scales.size(1), torch.uint8)
        elif quantise != "none":
            out_scales = empty_like(x, plan.num_rows, cols // 128, torch.float32)
        calls.dispatch(
            plan.core,
            view(x),
            view(weights),
            view(row_scales),
            view(rows),
            view(row_weights),
            view(out_scales),
            quantise,
            self._stream(),
            self._sms(num_sms),
        )
        if scales is not None and out_scales is not None:
            out_scales = out_scales.view(scales.dtype)
        return Dispatched(rows, row_weights, out_scales)

    def combine(
        self,
        plan: Plan,
        rows: Tensor,
        row_weights: Tensor | None = None,
        *,
        scale: str = "none",
        source_weights: Tensor | None = None,
        num_sms: int = 0,
    ) -> Combined:
        """Collective. Without gradients; `weft.combine` has them and says what goes in and out."""
        cols = rows.size(1) if rows.dim() == 2 else 1
        x = empty_like(rows, plan.num_tokens, cols, rows.dtype)
        weights = None
        if row_weights is not None:
            weights = empty_like(rows, plan.num_tokens, plan.weight_cols, torch.float32)
        plan.calls.combine(
            plan.core,
            view(rows),
            view(row_weights),
            view(source_weights),
            view(x),
            view(weights),
            scale,
            self._stream(),
            self._sms(num_sms),
        )
        return Combined(x, weights)

    def _sms(self, num_sms: int) -> int:
        return num_sms or (usual_sms() if self._on_gpu else 0)

    def _stream(self) -> int:
        """The current stream as a number. torch's default stream is CUDA's legacy one, whose
        handle is 1: 0 would stand for none."""
        if not self._on_gpu:
            return 0
        return torch._C._cuda_getCurrentRawStream(self.device.index) or 1

    def _allocate(self, calls: _core.Exchange, rows: int, cols: int, dtype: torch.dtype) -> Tensor:
        """Rows of an output, in memory that peers can write, so that they are not staged.

        Inside a capture from the graph's own memory: its addresses must stay the graph's."""
        is_payload = dtype.itemsize == 1 or dtype in _FLOATS  # anything else will be refused
        if self._on_gpu and is_payload:
            if not torch.cuda.is_current_stream_capturing():
                if calls not in self._pools:
                    self._pools[calls] = OutputPool(calls)
                return self._pools[calls].empty(rows, cols, dtype, self.device)
            is_payload = False
        if not is_payload:
            return torch.empty_strided((rows, cols), (cols, 1), dtype=dtype, device=self.device)
        like = torch.empty((0, 1), dtype=torch.uint8 if dtype.itemsize == 1 else dtype)
        return calls.allocate(rows, cols, to_dlpack(like)).view(dtype)

    def check(self) -> None:
        """Raises what a call that has finished on the GPU found; nothing on a CPU."""
        self.core.check()

    def stats(self) -> dict:
        """Calls so far, the seconds this rank waited for each peer, and (CPU) the bytes of rows
        that it put to other domains: what crossed, and what would have with a row for each rank
        there.
        """
        return self.core.stats()

    def footprint(self) -> dict:
        """Bytes held: control, staging, buffers in use, and pooled for the next ones."""
        return self.core.footprint()

    def release_pooled(self) -> None:
        """Gives unused memory back. On a GPU while no rank runs or begins a call."""
        self.core.release_pooled()
