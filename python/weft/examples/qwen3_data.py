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


def micro_batch(
    ids: Tensor, index: int, sequence: int, sequences: int = 1
) -> tuple[Tensor, Tensor]:
    """Windows of a text that goes round, from `index * sequences` on, and what follows each of
    their tokens. [sequences, sequence]."""
    first = torch.arange(index * sequences, (index + 1) * sequences)[:, None] * sequence
    windows = ids[(first + torch.arange(sequence + 1)) % len(ids)]
    return windows[:, :-1], windows[:, 1:]
