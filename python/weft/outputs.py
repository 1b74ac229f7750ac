# SPDX-License-Identifier: Apache-2.0
"""What calls take and return, and the memory of it. exchange.py asks for it.

Every call makes some tensors, so they go the ways of torch that take the fewest microseconds.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.cuda.memory import (
    _cuda_beginAllocateCurrentThreadToPool,
    _cuda_endAllocateToPool,
    _cuda_releasePool,
)
from torch.utils.dlpack import to_dlpack

from weft import _core, fp8
from weft.errors import Error


def view(tensor: Tensor | None):
    """A contiguous view without gradient, as a DLPack capsule; one-byte floats as bytes."""
    if tensor is None:
        return None
    if tensor.requires_grad:
        tensor = tensor.detach()
    if not tensor.is_contiguous():
        tensor = tensor.contiguous()
    if tensor.element_size() == 1 and tensor.dtype not in (torch.uint8, torch.bool):
        tensor = tensor.view(torch.uint8)
    return to_dlpack(tensor)


def views(*tensors: Tensor | None) -> tuple:
    return tuple(view(tensor) for tensor in tensors)


def empty_like(tensor: Tensor, rows: int, cols: int, dtype: torch.dtype) -> Tensor:
    """[rows, cols] where `tensor` is; torch reads strides sooner than it sees there are none."""
    return tensor.new_empty_strided((rows, cols), (cols, 1), dtype=dtype)


def as_bytes(tensor: Tensor | None) -> Tensor | None:
    """[rows, bytes] uint8: payload that nobody computes with."""
    if tensor is None:
        return None
    flat = tensor.detach().reshape(-1).contiguous()  # [T, 1] of any stride counts as contiguous
    cols = tensor.size(1) * tensor.element_size()
    return flat.view(torch.uint8).reshape(tensor.size(0), cols)


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


class Dispatched(NamedTuple):
    """What `dispatch` returns; what was not sent is None."""

    rows: Tensor
    weights: Tensor | None
    scales: Tensor | None

    def with_scales_of(self, scales: Tensor | None) -> Dispatched:
        """Scale rows come as bytes; with the dtype that they were given in."""
        if scales is None or self.scales is None:
            return self
        return self._replace(scales=self.scales.view(scales.dtype))


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

    def views(self) -> tuple:
        return views(self.x, self.weights, as_bytes(self.scales))


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

    def of_dispatch(
        self, calls: _core.Exchange, size: tuple[int, int], wanted: Wanted
    ) -> Dispatched:
        """Memory for what a dispatch returns. size: rows, columns of their weights."""
        num_rows, weight_cols = size
        x, weights, scales, quantise = wanted
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
            row_scales = empty_like(x, num_rows, cols // fp8.GROUP, torch.float32)
        return Dispatched(rows, row_weights, row_scales)

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
        kind = torch.uint8 if dtype.itemsize == 1 else dtype
        like = torch.empty((0, 1), dtype=kind, device=self._device)
        return calls.allocate(rows, cols, to_dlpack(like)).view(dtype)


class OutputsAhead:
    """Outputs of a dispatch whose plan is still to be made, so that a GPU that has counted waits
    for little more than the launch. If nobody gave the number of rows, the memory is that of the
    last such call and a little more.
    """

    def __init__(self, outputs: Outputs, wanted: Wanted, num_rows: int | None) -> None:
        self._outputs, self._wanted = outputs, wanted
        self._is_open = num_rows is None
        if num_rows is None and outputs.last_rows is not None:
            num_rows = outputs.last_rows + outputs.last_rows // 64
        self._num_rows = num_rows
        self._calls: _core.Exchange | None = None
        self._made = Dispatched(None, None, None)

    def views(self, calls: _core.Exchange, weight_cols: int) -> tuple:
        """What goes in, and what comes out: None if there is no last call or no memory for as much.
        Again for an exchange that has grown."""
        if calls is not self._calls and self._num_rows is not None:
            self._made, self._calls = Dispatched(None, None, None), calls
            size = (self._num_rows, weight_cols)
            try:
                self._made = self._outputs.of_dispatch(calls, size, self._wanted)
            except (torch.cuda.OutOfMemoryError, Error):
                if not self._is_open:
                    raise
        return self._wanted.views(), views(*self._made)

    def cut(self, num_rows: int) -> Dispatched:
        """What `views` were of, with the rows that there are."""
        if self._is_open:
            self._outputs.last_rows = num_rows
            for tensor in self._made:
                if tensor is not None:
                    tensor.resize_(num_rows, tensor.size(1))
        return self._made

    def other(self, calls: _core.Exchange, size: tuple[int, int]) -> Dispatched:
        """Memory of that size instead, where that does not suit."""
        self._outputs.last_rows = size[0]
        self._made = Dispatched(None, None, None)  # gives it back first
        return self._outputs.of_dispatch(calls, size, self._wanted)
