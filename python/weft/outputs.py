# SPDX-License-Identifier: Apache-2.0
"""What calls return, and the memory of it."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.utils.dlpack import to_dlpack

from weft import _core
from weft.pool import OutputPool
from weft.views import as_bytes, empty_like, view

Tensor = torch.Tensor
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


class Outputs:
    """Of one exchange, and of plans of those that it has grown out of."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._on_gpu = device.type == "cuda"  # to ask a device is slow
        self._calls: _core.Exchange | None = None
        self._pool: OutputPool | None = None  # of _calls

    def follow(self, calls: _core.Exchange | None) -> None:
        """From now on `calls` gives the memory; what it grew out of lives as long as its plans."""
        self._calls, self._pool = calls, None

    def of_dispatch(
        self,
        calls: _core.Exchange,
        size: tuple[int, int],
        x: Tensor,
        weights: Tensor | None,
        scales: Tensor | None,
        quantise: str,
    ) -> tuple[Dispatched, tuple]:
        """Memory for what a dispatch returns; size: rows, columns of their weights. Then views of
        what goes in and of what comes out."""
        num_rows, weight_cols = size
        cols = x.size(1) if x.dim() == 2 else 1
        dtype, given_scales = x.dtype, as_bytes(scales)
        if quantise != "none":
            dtype = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}[quantise]
        rows = self._rows(calls, num_rows, cols, dtype)
        row_weights = row_scales = None
        if weights is not None:
            row_weights = empty_like(x, num_rows, weight_cols, torch.float32)
        if given_scales is not None:
            row_scales = empty_like(x, num_rows, given_scales.size(1), torch.uint8)
        elif quantise != "none":
            row_scales = empty_like(x, num_rows, cols // 128, torch.float32)
        given = (view(x), view(weights), view(given_scales))
        made = (view(rows), view(row_weights), view(row_scales))
        return Dispatched(rows, row_weights, row_scales), given + made

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
        like = torch.empty((0, 1), dtype=torch.uint8 if dtype.itemsize == 1 else dtype)
        return calls.allocate(rows, cols, to_dlpack(like)).view(dtype)
