# SPDX-License-Identifier: Apache-2.0
"""Warnings that every rank comes to, and one of them gives."""

from __future__ import annotations

import logging
import os

import torch


def warn(logger: logging.Logger, text: str) -> None:
    """Logs `text` on rank 0 of the default process group, or of RANK where there is none."""
    if _rank() == 0:
        logger.warning(text)


def _rank() -> int:
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank()
    return int(os.environ.get("RANK", "0"))
