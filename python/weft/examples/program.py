# SPDX-License-Identifier: Apache-2.0
"""Begin and end of the programs here, and the machine of their results."""

import gc
import os
import subprocess
import tempfile
import time
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from weft.group import PATIENCE


def machine(commit: str | None) -> dict[str, Any]:
    """Describes the machine. commit: the build's; None: the current folder's."""

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


def leave() -> None:
    """Leaves the default process group, long enough before the interpreter ends for gloo to let go
    of the last collective's tensors (weft/group.py, which does so for Weft's own)."""
    dist.destroy_process_group()
    gc.collect()
    time.sleep(PATIENCE)


def finish(device: torch.device) -> None:
    """Waits for a GPU."""
    if device.type == "cuda":
        torch.cuda.synchronize()


def join(is_gpu: bool) -> torch.device:
    """Joins the group that torchrun describes, or makes one of this process alone."""
    device = torch.device("cpu")
    if is_gpu:
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    backend = "cpu:gloo,cuda:nccl" if is_gpu else "gloo"
    if "RANK" in os.environ:
        dist.init_process_group(backend)
    else:
        store = dist.FileStore(os.path.join(tempfile.mkdtemp(prefix="weft_"), "store"), 1)
        dist.init_process_group(backend, store=store, rank=0, world_size=1)
    return device
