# SPDX-License-Identifier: Apache-2.0
"""What callers give as `x`: a tensor, or FP8 or NVFP4 rows with their scaling factors.

Rows that nobody computes with travel as bytes. The factors of a row travel beside it, together
with whatever else the receiver wants to know of the row.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from weft import Dispatched

from .checks import check
from .received import pack_columns, row_major, unpack_columns

Tensor = torch.Tensor

_FLOATS = (torch.bfloat16, torch.float16, torch.float32)
_ROW_ALIGNMENT = 16  # bytes


class Payload:
    """`x` taken apart. hidden: elements of a token, whatever they are packed in."""

    def __init__(self, verb: str, x: Tensor | tuple[Tensor, ...]) -> None:
        self._is_tuple = not isinstance(x, torch.Tensor)
        parts = tuple(x) if self._is_tuple else (x,)
        check(
            1 <= len(parts) <= 3,
            f"{verb}: x has {len(parts)} parts (expected a tensor, two of FP8 or three of NVFP4)",
        )
        rows, self.scales = parts[0], parts[1:]
        _check_rows(verb, rows)
        if len(parts) == 2:
            _check_fp8(verb, rows, self.scales[0])
        elif len(parts) == 3:
            _check_nvfp4(verb, rows, self.scales)
        for scales in self.scales:
            check(
                scales.dim() == 2 and scales.size(0) == rows.size(0),
                f"{verb}: scales have shape {list(scales.shape)} (expected [{rows.size(0)}, any])",
            )
        self.num_tokens = rows.size(0)
        self.device = rows.device
        self.hidden = rows.size(1) * (8 if len(parts) == 3 else 1)
        self._dtype = rows.dtype
        self._rows = rows

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return (self._rows, *self.scales)

    def send(
        self,
        dispatch: Callable[[Tensor, Tensor | None, Tensor | None], Dispatched],
        weights: Tensor | None = None,
        beside: tuple[Tensor, ...] = (),
    ) -> tuple[Tensor | tuple[Tensor, ...], Tensor | None, tuple[Tensor, ...]]:
        """Gives `dispatch` rows, weights [T, K], and scales that hold the columns of `beside` too.

        Returns `x` as received (a tuple if a tuple was given), row weights, and `beside` as
        received.
        """
        is_known = self._rows.element_size() == 1 or self._dtype in _FLOATS
        rows = self._rows if is_known else row_major(self._rows).view(torch.uint8)
        columns = (*self.scales, *beside)
        packed = pack_columns(*columns) if columns else None
        out = dispatch(rows, weights, packed)
        received = unpack_columns(out.scales, *columns) if columns else ()
        scales, others = received[: len(self.scales)], received[len(self.scales) :]
        x = out.rows.view(self._dtype)
        return (x, *scales) if self._is_tuple else x, out.weights, others


def _check_rows(verb: str, rows: Tensor) -> None:
    check(rows.dim() == 2, f"{verb}: x has shape {list(rows.shape)} (expected [T, H])")
    row_bytes = rows.size(1) * rows.element_size()
    check(
        row_bytes > 0 and row_bytes % _ROW_ALIGNMENT == 0,
        f"{verb}: x has rows of {row_bytes} bytes (expected multiples of {_ROW_ALIGNMENT})",
    )


def _check_fp8(verb: str, rows: Tensor, scales: Tensor) -> None:
    check(
        rows.element_size() == 1,
        f"{verb}: x with scales has dtype {rows.dtype} (expected one of one byte)",
    )
    check(
        scales.dtype in (torch.float32, torch.int32),
        f"{verb}: scales have dtype {scales.dtype} (expected torch.float32 or torch.int32)",
    )


def _check_nvfp4(verb: str, rows: Tensor, scales: tuple[Tensor, ...]) -> None:
    dtypes = [part.dtype for part in (rows, *scales)]
    check(
        dtypes == [torch.int32, torch.int32, torch.float32],
        f"{verb}: the three parts of x have dtypes {dtypes} (expected int32, int32, float32)",
    )
