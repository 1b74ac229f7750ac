# SPDX-License-Identifier: Apache-2.0
"""Wheels of other packages that are read and not installed."""

from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DOWNLOADS = ROOT / "build/read"  # scripts/python fills it
LARGE = ("flashinfer-python", "nixl-cu12", "vllm")  # `make consumers` downloads them


def wheel(package: str) -> Path:
    """The wheel of "name version", which was only downloaded: it may have the name of what Weft
    stands for. Skips the test without it."""
    name, wanted = package.split()
    wheels = list(DOWNLOADS.glob(f"{name.replace('-', '_')}-{wanted}-*.whl"))
    if not wheels:
        who = "make consumers" if name in LARGE else "scripts/python"
        pytest.skip(f"{package} is not in {DOWNLOADS} ({who} downloads it)")
    return wheels[0]
