# SPDX-License-Identifier: Apache-2.0
"""Results of calls, plans included; and what the core (torch_tensor.cpp) leaves to Python when it
reads and makes tensors: what it refuses, and what it finds no entry points of torch for."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from weft import _core
from weft.errors import InvalidArgument

if TYPE_CHECKING:
    from weft.exchange import Exchange

_NEEDED = ("x", "rows")  # of dispatch and combine
_BYTE = _core.DTYPES["byte"]
_DTYPES = {getattr(torch, name): value for name, value in _core.DTYPES.items() if name != "byte"}
# torch's own numbers of the dtypes that the core knows.
NUMBERS = {
    torch.uint8: 0,
    torch.int8: 1,
    torch.int32: 3,
    torch.int64: 4,
    torch.float16: 5,
    torch.float32: 6,
    torch.bool: 11,
    torch.bfloat16: 15,
    torch.float8_e5m2: 23,
    torch.float8_e4m3fn: 24,
    torch.float8_e8m0fnu: 44,
}
_BY_NUMBER = {number: dtype for dtype, number in NUMBERS.items()}


def view(name: str, tensor: Tensor | None) -> tuple | None:
    """Returns what the core sees of a matrix, or of a vector as one column; any one-byte dtype is a
    byte to the core. The last item is torch's number of the dtype, None if the core does not know
    it. Raises InvalidArgument with `name` for what Weft cannot take."""
    if tensor is None and name not in _NEEDED:
        return None
    if not isinstance(tensor, Tensor):
        raise InvalidArgument(f"{name} is a {type(tensor).__name__} (a tensor is expected)")
    dtype, shape, gpu = _DTYPES.get(tensor.dtype), tensor.shape, tensor.get_device()
    if dtype is None:
        if tensor.itemsize != 1:
            raise InvalidArgument(
                f"{name} has dtype {tensor.dtype} (expected bfloat16, float16, float32 or one of a "
                "byte for rows, float32 for weights, int32 or int64 for indices)"
            )
        dtype = _BYTE
    if len(shape) not in (1, 2):
        raise InvalidArgument(f"{name} has {len(shape)} dimensions (1 or 2)")
    if not (tensor.is_cpu or tensor.is_cuda):
        raise InvalidArgument(f"{name} lies on a device that is neither CPU nor CUDA")
    if tensor.layout is not torch.strided:
        raise InvalidArgument(f"{name} has layout {tensor.layout} (torch.strided is expected)")
    if not tensor.is_contiguous():
        tensor = tensor.detach().contiguous()
    rows, cols = (*shape, 1)[:2]
    return tensor, tensor.data_ptr(), dtype, rows, cols, gpu, NUMBERS.get(tensor.dtype)


def at_place(name: str, tensor: Tensor, is_whole: bool, writes: bool) -> None:
    """Checks a caller's tensor before a call that `writes` it, or reads it while it is written.
    Raises InvalidArgument unless it is_whole: a copy of it would be of no use."""
    if not is_whole:
        raise InvalidArgument(f"{name} has gaps (contiguous memory is expected)")
    if writes and not tensor.is_inference():
        torch.autograd.graph.increment_version(tensor)


def empty(sizes: list[int], strides: list[int], number: int, gpu: int) -> Tensor:
    """Makes a tensor of a dtype by number, on a GPU or (-1) a CPU, contents undefined."""
    device = torch.device("cpu") if gpu < 0 else torch.device("cuda", gpu)
    return torch.empty_strided(sizes, strides, dtype=_BY_NUMBER[number], device=device)


def of_bytes(array: Tensor, rows: int, cols: int, number: int) -> Tensor:
    """Returns the core's bytes as [rows, cols] of dtype `number`."""
    return array.view(_BY_NUMBER[number]).reshape(rows, cols).detach()  # so that it is no view


def as_bytes(scales: Tensor | None) -> Tensor | None:
    """Returns scales as uint8 [rows, bytes], moved untouched."""
    if not isinstance(scales, Tensor):
        return scales
    if scales.dim() != 2:
        raise InvalidArgument(f"scales has {scales.dim()} dimensions (2 are expected)")
    flat = scales.detach().reshape(-1).contiguous()  # [T, 1] of any stride counts as contiguous
    cols = scales.size(1) * scales.element_size()
    return flat.view(torch.uint8).reshape(scales.size(0), cols)


class OutputPool:
    """A torch.cuda.MemPool whose segments an exchange gives.

    torch keeps book of the streams that still use a tensor and hands memory out again in their
    order; the exchange recognises its own memory and has no need to stage rows. device: the
    exchange's, which need not be the current one. epoch: of the ranks that can reach the memory
    (`CallReport`).
    """

    def __init__(self, device: torch.device, epoch: int) -> None:
        self.epoch = epoch
        allocator = torch.cuda.memory.CUDAPluggableAllocator(
            _core.__file__, "weft_pool_malloc", "weft_pool_free"
        )
        self._allocator = allocator  # as long as the pool
        with torch.cuda.device(device):
            self._pool = torch.cuda.MemPool(allocator.allocator())
        self.id: tuple[int, int] = self._pool.id


class Beside(NamedTuple):
    """Memory on this rank for what a dispatch may tell beside its rows, int32; None: not wanted.

    sources [num_rows, 2]: the rank that a row comes from, and its token there; left as it was for
    rows without a token. Not with "rank_major": counts [El], `Plan.rows_per_expert`, and count_sums
    [El], what they are added to.
    """

    sources: Tensor | None = None
    counts: Tensor | None = None
    count_sums: Tensor | None = None


class RowMarks(NamedTuple):
    """Marks that tell a combine when rows, still being written as it begins, are whole.

    marks int32 [El * blocks], by expert, then block: a block is whole when its mark equals
    `wanted`, which the rows' writer stores after them, with release semantics. block_rows:
    of a block; 0: an expert has one mark for all its rows. Only with "expert_strided".
    """

    marks: Tensor | None = None
    wanted: int = 0
    block_rows: int = 0


class Dispatched(NamedTuple):
    """Result of `dispatch`; what was not sent is None."""

    rows: Tensor
    weights: Tensor | None
    scales: Tensor | None


class Load(NamedTuple):
    """Numbers of routes that ranks get."""

    busiest: int  # the rank that gets most
    unbalanced: int  # `busiest` without replicas
    mean: float
    if_free: int  # what the busiest would be if replicas cost nothing (`Balancing.replica_rows`)

    @property
    def is_forgone(self) -> bool:
        """True if there are no replicas because they would have cost more than they spare."""
        return self.if_free < self.busiest

    @property
    def of_mean(self) -> float:
        """Busiest over mean rank."""
        return self.busiest / self.mean if self.mean else 1.0


class Combined(NamedTuple):
    """Result of `combine`; weights are None if none were sent."""

    x: Tensor
    weights: Tensor | None


class SkippedPlan:
    """Stand-in for the plan of a call that was left out (`Exchange.plan_and_dispatch` with
    is_skipped): no row goes anywhere, and no call can be made by it."""

    core = None
    era = 0  # as a plan's

    def __init__(
        self, exchange: Exchange, calls: _core.Exchange, num_calls: int, num_tokens: int, rows: int
    ) -> None:
        """num_calls: how many `CallReport.calls_behind` counts."""
        self.exchange, self.calls, self.num_calls = exchange, calls, num_calls
        self.num_tokens, self.num_rows = num_tokens, rows

    @property
    def rows_per_expert(self) -> Tensor:
        """int64 [El] on the exchange's device: zeros."""
        exchange = self.exchange
        return torch.zeros(exchange.num_local_experts, dtype=torch.int64, device=exchange.device)


def _of_core(name: str, doc: str) -> property:
    return property(lambda plan: getattr(plan.core, name), doc=doc)


def _on_device(name: str, doc: str) -> property:
    return property(lambda plan: plan._numbers()[name], doc=doc)


class Plan:
    """Immutable; any number may be alive, used in any order and as often as wanted.

    Holds the exchange that it was made with, and no tensor of the caller's. `Exchange.plan`
    makes it. T: tokens of this rank, K: choices of a token, El: experts of this rank.
    """

    moved: Dispatched | None = None  # until ops.py hands it on
    wants_weight_gradient = False  # of its own weights
    era = 0  # of weft/compat/deep_ep/steps.py: how often ranks were lost before
    _there: dict[str, torch.Tensor] | None = None  # the numbers on the device

    def __init__(self, exchange: Exchange, core: _core.Plan, calls: _core.Exchange) -> None:
        self.exchange = exchange
        self.core = core
        self.calls = calls  # the exchange may have grown since

    num_tokens = _of_core("num_tokens", "T.")
    num_rows = _of_core("num_rows", "To allocate, padding and slack included.")
    topk = _of_core("topk", "K.")
    from_map = _of_core("from_map", "Whether the routing was a map.")
    layout = _of_core("layout", "The name of the layout.")
    order = _of_core("order", 'Of the sums of `combine`: "rank" or "topk".')
    row_weight_cols = _of_core(
        "row_weight_cols", "Of the rows' weights: K with rank_major, else 1."
    )
    num_experts = _of_core("num_experts", "E, of all ranks.")
    num_local_experts = _of_core(
        "num_local_experts", "Of this rank: its own, then its R places for replicas."
    )
    num_physical_experts = _of_core("num_physical_experts", "The same of all ranks.")
    num_replicas = _of_core("num_replicas", "R, places for replicas on each rank.")
    pad_multiple = _of_core("pad_multiple", "What the rows of each expert are rounded up to.")

    @property
    def weight_cols(self) -> int:
        """Columns of the source's weights: K, or E with a routing map."""
        return self.num_experts if self.from_map else self.topk

    @functools.cached_property
    def placement(self) -> Tensor:
        """int32 [ranks, R] on the CPU: the expert of each replica, -1: none."""
        found = torch.tensor(self.core.placement, dtype=torch.int32, device="cpu")
        return found.reshape(-1, self.num_replicas) if self.num_replicas else found

    @functools.cached_property
    def routes_per_expert(self) -> Tensor:
        """int64 [E] on the CPU: routes of all ranks, before dropping."""
        return torch.tensor(self.core.routes_per_expert, device="cpu")

    @functools.cached_property
    def load(self) -> Load:
        """How even ranks are, before dropping."""
        return Load(*self.core.load)

    # Numbers where the tokens are: no wait on a GPU.

    @property
    def num_rows_used(self) -> torch.Tensor:
        """int64 [1] on the exchange's device: rows in use, at most `num_rows`."""
        required = self.num_rows_required
        if self.layout == "expert_strided":  # its budget is the stride
            return torch.full_like(required, self.num_rows)
        return required.clamp(max=self.num_rows)

    num_rows_required = _on_device(
        "required_rows", "int64 [1] on the exchange's device: `required_rows` without a wait."
    )
    overflow = _on_device(
        "overflow",
        "int32 [1] on the exchange's device: 1 if a route to or from this rank was dropped.",
    )
    rows_per_expert = _on_device(
        "rows_per_expert",
        "int64 [El] on the exchange's device: rows that carry a token (rank_major: routes).",
    )
    padded_rows_per_expert = _on_device(
        "padded_rows_per_expert",
        "int64 [El] on the exchange's device: rows of each expert's block, padding included.",
    )
    expert_begin = _on_device(
        "expert_begin", "int64 [El] on the exchange's device: first row of each expert's block."
    )

    def without_slack(self, rows: Tensor) -> Tensor:
        """Returns a dispatch's rows [num_rows, any], zeroed behind the rows in use."""
        if not self.core.may_have_slack:
            return rows
        if self.layout == "expert_strided":
            used, per = self.padded_rows_per_expert.unsqueeze(1), self.num_local_experts
        else:
            used, per = self.num_rows_used, 1
        places = torch.arange(self.num_rows // per, device=rows.device)
        return rows.masked_fill((places >= used).view(-1, 1), 0)

    # Numbers on the host. In budget mode on a GPU the first question copies the plan, and waits.

    rows_per_expert_list = _of_core("rows_per_expert", "[El] rows that carry a token.")
    padded_rows_per_expert_list = _of_core(
        "padded_rows_per_expert", "[El] rows of each expert's block, padding included."
    )
    required_rows = _of_core(
        "required_rows",
        "Rows that would hold every route: the budget that would not have dropped.",
    )
    received_arrivals = _of_core("received_arrivals", "[R] tokens that each rank sends here.")
    sent_arrivals = _of_core("sent_arrivals", "[R] tokens that this rank sends to each.")

    def wire_bytes(self, row_bytes: int) -> int:
        """Returns the bytes that this rank sends to others in a dispatch, by bytes of a row."""
        return self.core.wire_bytes(row_bytes)

    def returned_bytes(self, row_bytes: int) -> int:
        """Returns the bytes that `combine` brings back to this rank: more with order="topk"."""
        return self.core.returned_bytes(row_bytes)

    def __repr__(self) -> str:
        return repr(self.core)

    def _numbers(self) -> dict[str, torch.Tensor]:
        if self._there is None:
            device, core = self.exchange.device, self.core
            if device.type == "cuda":
                kinds = {"overflow": torch.int32}
                self._there = {
                    name: data.view(kinds.get(name, torch.int64))
                    for name, data in core.on_device(device.index).items()
                }
                return self._there
            names = ("rows_per_expert", "padded_rows_per_expert", "expert_begin")
            told = {name: getattr(core, name) for name in names}
            told["required_rows"] = [core.required_rows]
            kind = {"dtype": torch.int64, "device": device}
            self._there = {name: torch.tensor(numbers, **kind) for name, numbers in told.items()}
            overflow = torch.tensor([int(core.overflow)], dtype=torch.int32, device=device)
            self._there["overflow"] = overflow
        return self._there
