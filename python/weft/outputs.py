# SPDX-License-Identifier: Apache-2.0
"""What calls return, and the memory of it."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.utils.dlpack import to_dlpack

from weft import _core
from weft.errors import Error
from weft.pool import OutputPool
from weft.views import as_bytes, empty_like, view

Tensor = torch.Tensor
_FLOATS = (torch.bfloat16, torch.float16, torch.float32)
_FP8 = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}


class Dispatched(NamedTuple):
    """What `dispatch` returns; what was not sent is None."""

    rows: Tensor
    weights: Tensor | None
    scales: Tensor | None

    def views(self) -> tuple:
        return view(self.rows), view(self.weights), view(self.scales)

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
        return view(self.x), view(self.weights), view(as_bytes(self.scales))


class Outputs:
    """Of one exchange, and of plans of those that it has grown out of."""

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
        dtype = _FP8.get(quantise, x.dtype)  # the call refuses another name
        rows = self._rows(calls, num_rows, cols, dtype)
        row_weights = row_scales = None
        if weights is not None:
            row_weights = empty_like(x, num_rows, weight_cols, torch.float32)
        if scales is not None:
            scale_bytes = scales.size(1) * scales.element_size()
            row_scales = empty_like(x, num_rows, scale_bytes, torch.uint8)
        elif quantise in _FP8:
            row_scales = empty_like(x, num_rows, cols // 128, torch.float32)
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
        return self._wanted.views(), self._made.views()

    def cut(self, num_rows: int) -> Dispatched:
        """What `views` were of, with the rows that there are."""
        if self._is_open:
            self._outputs.last_rows = num_rows
            for tensor in self._made:
                if tensor is not None:
                    tensor.resize_(num_rows, tensor.size(1))
        return self._made

    def other(self, calls: _core.Exchange, size: tuple[int, int]) -> tuple[Dispatched, tuple]:
        """Memory of that size instead, where that does not suit, and views of what goes in and
        comes out."""
        self._outputs.last_rows = size[0]
        self._made = Dispatched(None, None, None)  # gives it back first
        out = self._outputs.of_dispatch(calls, size, self._wanted)
        return out, (self._wanted.views(), out.views())
