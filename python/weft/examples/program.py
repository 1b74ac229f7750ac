# SPDX-License-Identifier: Apache-2.0
"""Of what a file of results was measured: the head of every file in bench/results."""

from __future__ import annotations

import os
import subprocess
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch


def machine(commit: str | None) -> dict[str, Any]:
    """commit: that the build is of; None asks git about the current folder."""

    def git(*command):
        return subprocess.run(["git", *command], capture_output=True, text=True).stdout.strip()

    lines = Path("/proc/cpuinfo").read_text().splitlines()
    cpu = next((line.split(":")[1].strip() for line in lines if "model name" in line), "?")
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 10**9
    return {
        "commit": commit or git("rev-parse", "--short=12", "HEAD"),
        "dirty": False if commit else bool(git("status", "--porcelain")),
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "machine": f"{cpu}, {os.cpu_count()} cores, {memory} GB",
        "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
        "driver": torch.version.cuda,
        "cuda": torch.version.cuda,
        "limit_gbps": 0.0,
        "gather_gbps": 0.0,
    }
