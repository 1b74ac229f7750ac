# SPDX-License-Identifier: Apache-2.0
"""What calls take and return, plans included, and the memory of it. exchange.py asks for it.

Every call makes some tensors, so they go the ways of torch that take the fewest microseconds.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.cuda.memory import (
    _cuda_beginAllocateCurrentThreadToPool,
    _cuda_endAllocateToPool,
    _cuda_releasePool,
)

from weft import _core, fp8
from weft.errors import Error, InvalidArgument

if TYPE_CHECKING:
    from weft.exchange import Exchange

_NEEDED = ("x", "rows")  # of dispatch and combine
_BYTE = _core.DTYPES["byte"]
_DTYPES = {getattr(torch, name): value for name, value in _core.DTYPES.items() if name != "byte"}


def view(name: str, tensor: Tensor | None) -> tuple | None:
    """What the core sees of a matrix, or of a vector as one column; no float of one byte is more to
    it than a byte. Raises InvalidArgument with `name` for what Weft cannot take."""
    if tensor is None and name not in _NEEDED:
        return None
    if not isinstance(tensor, Tensor):
        raise InvalidArgument(f"{name} is a {type(tensor).__name__} (a tensor is expected)")
    dtype, shape, gpu = _DTYPES.get(tensor.dtype), tensor.shape, tensor.get_device()
    if dtype is None:
        if tensor.itemsize != 1:
            raise InvalidArgument(
                f"{name} has dtype {tensor.dtype}, which Weft cannot move (bfloat16, float16, "
                "float32, int32, int64, bool or one byte wide)"
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
    return tensor, tensor.data_ptr(), dtype, rows, cols, gpu


def views(names: tuple[str, ...], tensors: Iterable[Tensor | None]) -> tuple:
    return tuple(map(view, names, tensors))


def empty_like(tensor: Tensor, rows: int, cols: int, dtype: torch.dtype) -> Tensor:
    """[rows, cols] where `tensor` is; torch reads strides sooner than it sees there are none."""
    return tensor.new_empty_strided((rows, cols), (cols, 1), dtype=dtype)


def as_bytes(scales: Tensor | None) -> Tensor | None:
    """[rows, bytes] uint8: payload that nobody computes with."""
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
    order; the exchange recognises its own memory and has no need to stage rows.
    """

    def __init__(self, calls: _core.Exchange) -> None:
        self._calls = calls
        allocator = torch.cuda.memory.CUDAPluggableAllocator(
            _core.__file__, "weft_pool_malloc", "weft_pool_free"
        )
        self._allocator = allocator  # as long as the pool
        self._pool = torch.cuda.MemPool(allocator.allocator())
        self._id = self._pool.id

    def empty(self, rows: int, cols: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """[rows, cols], contents undefined, for the current stream.

        The memory is up to a sixteenth larger: numbers of rows that differ from call to call find
        what earlier calls left, where a new segment takes milliseconds and all ranks.
        """
        step = 1 << max(rows.bit_length() - 5, 0)
        roomy = -(-rows // step) * step
        _core.give_segments(self._calls)
        # This is torch.cuda.use_mem_pool, whose context manager costs as much as the allocation.
        _cuda_beginAllocateCurrentThreadToPool(device.index, self._id)
        try:
            # torch.empty() takes longer to read its arguments.
            tensor = torch.empty_strided((roomy, cols), (cols, 1), dtype=dtype, device=device)
        finally:
            _cuda_endAllocateToPool(device.index, self._id)
            _cuda_releasePool(device.index, self._id)
            _core.give_segments(None)
        # Not a view: it may be changed in place.
        return tensor if roomy == rows else tensor.resize_(rows, cols)


_FLOATS = (torch.bfloat16, torch.float16, torch.float32)


class Beside(NamedTuple):
    """Memory for what a dispatch may tell beside its rows, int32, on this rank; None is not wanted.

    sources [num_rows, 2]: the rank that a row comes from, and its token there; left as it was for
    rows without a token. Not with "rank_major": counts [El], `Plan.rows_per_expert`, and count_sums
    [El], what they are added to.
    """

    sources: Tensor | None = None
    counts: Tensor | None = None
    count_sums: Tensor | None = None


class Dispatched(NamedTuple):
    """What `dispatch` returns; what was not sent is None."""

    rows: Tensor
    weights: Tensor | None
    scales: Tensor | None


class Written(NamedTuple):
    """The memory of what a dispatch writes of every row; None is not wanted."""

    rows: Tensor | None = None
    weights: Tensor | None = None
    scales: Tensor | None = None
    experts: Tensor | None = None

    def views(self, beside: Beside | None) -> tuple:
        named = ("out", "out_weights", "out_scales", "experts", *Beside._fields)
        return views(named, (*self, *(beside or Beside())))

    def cut(self, num_rows: int) -> Written:
        """The first rows, in place."""
        for tensor in self:
            if tensor is not None and tensor.size(0) != num_rows:
                tensor.resize_(num_rows, tensor.size(1))
        return self

    def returned(self, scales: Tensor | None) -> Dispatched:
        """scales: those that were sent, if any. They have come as bytes."""
        row_scales = self.scales
        if scales is not None and row_scales is not None:
            row_scales = row_scales.view(scales.dtype)
        return Dispatched(self.rows, self.weights, row_scales)


class Combined(NamedTuple):
    """What `combine` returns; weights are None if none were sent."""

    x: Tensor
    weights: Tensor | None


class Wanted(NamedTuple):
    """What a dispatch sends, and so what it returns but for the number of rows."""

    x: Tensor
    weights: Tensor | None
    scales: Tensor | None
    quantise: str
    scale_rule: str = "exact"
    scales_by_column: bool = False
    beside: Beside | None = None
    experts: bool = False

    @property
    def choices(self) -> dict[str, Any]:
        """Those of its options that say how it is stored."""
        names = ("quantise", "scale_rule", "scales_by_column")
        return {name: getattr(self, name) for name in names}

    def views(self) -> tuple:
        return views(("x", "weights", "scales"), (self.x, self.weights, as_bytes(self.scales)))


class Outputs:
    """The outputs of one exchange, and of the plans of those that it has grown out of."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._on_gpu = device.type == "cuda"  # to ask a device is slow
        self._calls: _core.Exchange | None = None
        self._pool: OutputPool | None = None  # of _calls
        self.last_rows: int | None = None  # of a dispatch whose plan told the number

    def follow(self, calls: _core.Exchange | None) -> None:
        """From now on `calls` gives the memory; what it grew out of lives as long as its plans."""
        self._calls, self._pool = calls, None

    def of_dispatch(self, calls: _core.Exchange, size: tuple[int, int], wanted: Wanted) -> Written:
        """Memory for what a dispatch returns. size: rows, columns of their weights."""
        num_rows, weight_cols = size
        x, weights, scales, quantise, scale_rule, *_ = wanted
        cols = x.size(1) if x.dim() == 2 else 1
        dtype = fp8.DTYPES.get(quantise, x.dtype)  # the call refuses another name
        rows = self._rows(calls, num_rows, cols, dtype)
        row_weights = row_scales = None
        if weights is not None:
            row_weights = empty_like(x, num_rows, weight_cols, torch.float32)
        if scales is not None:
            scale_bytes = scales.size(1) * scales.element_size()
            row_scales = empty_like(x, num_rows, scale_bytes, torch.uint8)
        elif quantise in fp8.DTYPES:
            scale_dtype = torch.uint8 if scale_rule == "ue8m0" else torch.float32
            row_scales = empty_like(x, num_rows, cols // fp8.GROUP, scale_dtype)
        experts = empty_like(x, num_rows, weight_cols, torch.int64) if wanted.experts else None
        return Written(rows, row_weights, row_scales, experts)

    def _rows(self, calls: _core.Exchange, rows: int, cols: int, dtype: torch.dtype) -> Tensor:
        """Rows of an output, in memory that peers can write, so that they are not staged.

        Inside a capture from the graph's own memory: its addresses must stay the graph's. By an
        outgrown exchange from torch's, or a pool would keep that exchange."""
        is_payload = dtype.itemsize == 1 or dtype in _FLOATS  # anything else will be refused
        if self._on_gpu and is_payload:
            if calls is self._calls and not torch.cuda.is_current_stream_capturing():
                if self._pool is None:
                    self._pool = OutputPool(calls)
                return self._pool.empty(rows, cols, dtype, self._device)
            is_payload = False
        if not is_payload:
            return torch.empty_strided((rows, cols), (cols, 1), dtype=dtype, device=self._device)
        made = calls.allocate(rows, cols, _DTYPES.get(dtype, _BYTE))
        return made.view(dtype).reshape(rows, cols).detach()  # so that it is no view

    def ahead(
        self, calls: _core.Exchange, wanted: Wanted, given_rows: int | None, weight_cols: int
    ) -> Written:
        """Memory for a dispatch whose plan is still to be made, so that a GPU that has counted
        waits for little more than the launch. If nobody gave the number of rows, as much as the
        last such call took and a little more; none, if there is no last call or not as much."""
        num_rows = given_rows
        if num_rows is None and self.last_rows is not None:
            num_rows = self.last_rows + self.last_rows // 64
        if num_rows is not None:
            try:
                return self.of_dispatch(calls, (num_rows, weight_cols), wanted)
            except (torch.cuda.OutOfMemoryError, Error):
                if given_rows is not None:
                    raise
        return Written()


def _of_core(name: str, doc: str) -> property:
    return property(lambda plan: getattr(plan.core, name), doc=doc)


def _on_device(name: str, doc: str) -> property:
    return property(lambda plan: plan._numbers()[name], doc=doc)


class Plan:
    """Immutable; any number may be alive, used in any order and as often as wanted.

    Holds the exchange that it was made with, and no tensor of the caller's. `Exchange.plan`
    makes it. T: tokens of this rank, K: choices of a token, El: experts of this rank.
    """

    def __init__(self, exchange: Exchange, core: _core.Plan, calls: _core.Exchange) -> None:
        self.exchange = exchange
        self.core = core
        self.calls = calls  # the exchange may have grown since
        self.num_tokens: int = core.num_tokens
        self.num_rows: int = core.num_rows  # to allocate, padding and slack included
        self.topk: int = core.topk
        self.from_map: bool = core.from_map
        self.layout: str = core.layout
        self.row_weight_cols: int = core.row_weight_cols  # K with rank_major, else 1
        self.moved: Dispatched | None = None  # until ops.py hands it on
        self._on_device: dict[str, torch.Tensor] | None = None

    num_experts = _of_core("num_experts", "Of all ranks.")
    num_local_experts = _of_core("num_local_experts", "Of this rank.")
    pad_multiple = _of_core("pad_multiple", "What the rows of each expert are rounded up to.")

    @property
    def weight_cols(self) -> int:
        """Columns of weights at the source: K, or E with a routing map."""
        return self.num_experts if self.from_map else self.topk

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

    def __repr__(self) -> str:
        return repr(self.core)

    def _numbers(self) -> dict[str, torch.Tensor]:
        if self._on_device is None:
            device, core = self.exchange.device, self.core
            if device.type == "cuda":
                kinds = {"overflow": torch.int32}
                self._on_device = {
                    name: data.view(kinds.get(name, torch.int64))
                    for name, data in core.on_device(device.index).items()
                }
                return self._on_device
            names = ("rows_per_expert", "padded_rows_per_expert", "expert_begin")
            made = {name: torch.tensor(getattr(core, name), dtype=torch.int64) for name in names}
            made["required_rows"] = torch.tensor([core.required_rows], dtype=torch.int64)
            made["overflow"] = torch.tensor([int(core.overflow)], dtype=torch.int32)
            self._on_device = {name: numbers.to(device) for name, numbers in made.items()}
        return self._on_device
