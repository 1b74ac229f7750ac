# SPDX-License-Identifier: Apache-2.0
"""Tokens of a real text: the bytes of a file."""

from __future__ import annotations

from pathlib import Path

import torch

Tensor = torch.Tensor


def token_ids(path: str | None) -> Tensor:
    """int64: the bytes of a file, or of this package's own source."""
    if path is None:
        files = sorted(Path(__file__).parents[1].rglob("*.py"))
        text = b"".join(file.read_bytes() for file in files)
    else:
        text = Path(path).read_bytes()
    return torch.frombuffer(bytearray(text), dtype=torch.uint8).long()


def micro_batch(ids: Tensor, index: int, sequence: int) -> tuple[Tensor, Tensor]:
    """Window `index` of a text that goes round, and what follows each of its tokens. [1, S]."""
    places = (index * sequence + torch.arange(sequence + 1)) % len(ids)
    window = ids[places][None]
    return window[:, :-1], window[:, 1:]
