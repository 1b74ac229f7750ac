# SPDX-License-Identifier: Apache-2.0
"""Functions of `deep_ep` about ranks and links that programs call: set-up, domains, rates."""

from __future__ import annotations

import os
import random
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist

from weft import Group
from weft.compat import environment

from ..checks import check
from ..elastic import model
from ..layout import found_ranks_per_domain

__all__ = [
    "EnvOverride",
    "check_fast_rdma_atomic_support",
    "check_nvlink_connections",
    "check_torch_deterministic",
    "dist_print",
    "get_logical_domain_size",
    "get_nvlink_gbs",
    "get_physical_domain_size",
    "get_rdma_gbs",
    "get_sm_read_gbs",
    "get_sm_write_gbs",
    "init_dist",
    "init_seed",
]

_PORT = 8361  # default of MASTER_PORT

_local_rank: int | None = None  # since `init_dist`


class EnvOverride:
    """Sets environment variables within `with`: triples of name, value, and whether to."""

    def __init__(self, envs: Iterable[tuple[str, str, bool]]) -> None:
        self.envs = {name: value for name, value, is_wanted in envs if is_wanted}

    def __enter__(self) -> EnvOverride:
        before = dict(os.environ)
        self._before = {name: before[name] for name in self.envs if name in before}
        os.environ.update(self.envs)
        return self

    def __exit__(self, *_error: Any) -> None:
        for name in self.envs:
            os.environ.pop(name, None)
        os.environ.update(self._before)


def init_dist(
    local_rank: int, num_local_ranks: int, seed: int = 0
) -> tuple[int, int, dist.ProcessGroup]:
    """Collective. Starts torch.distributed with num_local_ranks processes on each of WORLD_SIZE
    hosts, of which this is number RANK, at MASTER_ADDR and MASTER_PORT.

    With GPUs over NCCL, and this process takes GPU `local_rank` and makes tensors there; else over
    gloo. Tensors are bf16 by default from then on. Returns this rank, the ranks, and a group.
    """
    global _local_rank
    _local_rank = local_rank
    num_hosts = environment.number("WORLD_SIZE", default=1)
    host = environment.number("RANK", default=0, least=0)
    address = environment.text("MASTER_ADDR") or "127.0.0.1"
    port = environment.number("MASTER_PORT", default=_PORT)
    has_gpu = torch.cuda.is_available()
    if has_gpu:
        torch.cuda.set_device(local_rank)
        torch.set_default_device("cuda")
    torch.set_default_dtype(torch.bfloat16)
    dist.init_process_group(
        "nccl" if has_gpu else "gloo",
        init_method=f"tcp://{address}:{port}",
        rank=host * num_local_ranks + local_rank,
        world_size=num_hosts * num_local_ranks,
    )
    init_seed(seed)
    num_ranks = dist.get_world_size()
    return dist.get_rank(), num_ranks, dist.new_group(list(range(num_ranks)))


def init_seed(global_seed: int) -> None:
    """Seeds torch and Python with `global_seed` plus this rank."""
    seed = global_seed + dist.get_rank()
    torch.manual_seed(seed)
    random.seed(seed)


def dist_print(s: str = "", once_in_node: bool = False) -> None:
    """Prints on every rank, or with once_in_node on a host's first, then does a barrier.
    Collective, after `init_dist`."""
    check(_local_rank is not None, "dist_print: there are no ranks yet (call init_dist first)")
    if _local_rank == 0 or not once_in_node:
        print(s, flush=True)
    dist.barrier()


def get_physical_domain_size(group: Any) -> tuple[int, int]:
    """Returns the number of domains, ranks that can map each other's memory, of a group or buffer,
    and a domain's ranks. Collective at a group's first call."""
    if hasattr(group, "get_physical_domain_size"):
        return group.get_physical_domain_size()
    ranks = Group.of(group)
    num_nvlink_ranks = found_ranks_per_domain(ranks)
    return ranks.num_ranks // num_nvlink_ranks, num_nvlink_ranks


def get_logical_domain_size(group: Any, allow_hybrid_mode: bool = True) -> tuple[int, int]:
    """Returns what `get_physical_domain_size` returns; one and all ranks without hybrid mode. A
    buffer knows its own mode."""
    if hasattr(group, "get_logical_domain_size"):
        return group.get_logical_domain_size()
    return get_physical_domain_size(group) if allow_hybrid_mode else (1, group.size())


def check_nvlink_connections(group: dist.ProcessGroup) -> None:
    """Does nothing: ranks can exchange without NVLink, too."""


def check_torch_deterministic() -> None:
    """Raises AssertionError if torch fills new tensors while streams use their memory: with
    deterministic algorithms and `torch.utils.deterministic.fill_uninitialized_memory`."""
    fills = torch.utils.deterministic.fill_uninitialized_memory
    check(
        not (torch.are_deterministic_algorithms_enabled() and fills),
        "torch.utils.deterministic.fill_uninitialized_memory = True beside deterministic "
        "algorithms (one of the two)",
    )


# Rates in GB/s, by which callers plan; Weft chooses by measured tables.


def get_sm_read_gbs() -> float:
    """Returns one SM's read rate."""
    return 180


def get_sm_write_gbs() -> float:
    """Returns one SM's write rate."""
    return 45


def get_nvlink_gbs(factor: float = model.NVLINK_SHARE) -> float:
    """Returns `factor` of this GPU generation's NVLink rate, one direction."""
    return model.nvlink_gbs(factor)


def get_rdma_gbs(nic_name: str | None = None) -> float:
    """Returns a network card's rate, by default EP_NIC_NAME's."""
    return model.rdma_gbs(nic_name)


def check_fast_rdma_atomic_support(nic_name: str | None = None) -> bool:
    """Returns whether `deep_ep` would count on fast atomics of that card."""
    return model.has_fast_atomics(nic_name)
