# SPDX-License-Identifier: Apache-2.0
"""Facts that rules depend on beside settings: the versions of torch and of Transformer Engine,
which is never imported, for it may be absent, and the rank, since only one rank warns."""

import logging
import os
from importlib import metadata

import torch
from torch.torch_version import TorchVersion


def get_torch_version() -> str:
    """Tells torch's version."""
    return str(torch.__version__)


def get_te_version() -> str | None:
    """Returns Transformer Engine's version, None if not installed."""
    try:
        return metadata.version("transformer-engine")
    except metadata.PackageNotFoundError:
        return None


def is_torch_min_version(minimum: str) -> bool:
    """Returns whether torch is `minimum` or newer. A pre-release of `minimum` is older."""
    return _at_least(get_torch_version(), minimum)


def is_te_min_version(minimum: str) -> bool:
    """Returns whether Transformer Engine is `minimum` or newer. An absent one is older than all."""
    version = get_te_version()
    return version is not None and _at_least(version, minimum)


def _at_least(version: str, minimum: str) -> bool:
    # torch's own type orders any Python package version, so that no other package is needed.
    return bool(TorchVersion(version) >= TorchVersion(minimum))


def warn_on_rank_0(logger: logging.Logger, text: str) -> None:
    """Logs `text` on rank 0 of the default process group, or of RANK where there is none."""
    if _rank() == 0:
        logger.warning(text)


def _rank() -> int:
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank()
    return int(os.environ.get("RANK", "0"))
