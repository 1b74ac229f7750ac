# SPDX-License-Identifier: Apache-2.0
"""Counterpart of `deep_ep.comm`: barriers, the communication stream, communicators."""

from __future__ import annotations

import weakref
from typing import Any

import torch
import torch.distributed as dist

from weft import Group
from weft.streams import CommStream

from .checks import NotInWeft
from .utils import envs

__all__ = [
    "NCCLCommHandle",
    "barrier",
    "destroy_all_managed_nccl_comm",
    "get_comm_stream",
    "get_logical_domain_size",
    "get_nccl_comm_handle",
    "get_physical_domain_size",
]

STREAM = CommStream()  # of every `EPBuffer` of the process


def barrier(
    buffer: Any,
    wait_comm_stream: bool = True,
    with_cpu_sync: bool = False,
    sequential: bool = True,
    context_idx: int | None = None,
) -> None:
    """Collective. Calls `EPBuffer.barrier`. buffer may also be a group of torch.distributed, whose
    ranks wait on the host."""
    del sequential, context_idx
    if isinstance(buffer, dist.ProcessGroup):
        Group.of(buffer).all_gather(b"barrier")
    else:
        buffer.barrier(wait_comm_stream, with_cpu_sync)


def get_physical_domain_size(group_or_buffer: Any) -> tuple[int, int]:
    """Returns what `utils.envs.get_physical_domain_size` returns."""
    return envs.get_physical_domain_size(group_or_buffer)


def get_logical_domain_size(
    group_or_buffer: Any, allow_hybrid_mode: bool | None = None
) -> tuple[int, int]:
    """Returns what `utils.envs.get_logical_domain_size` does. allow_hybrid_mode None: True, or the
    buffer's."""
    return envs.get_logical_domain_size(group_or_buffer, allow_hybrid_mode in (None, True))


def get_comm_stream(buffer: Any = None) -> torch.cuda.Stream:
    """Returns the stream of every `EPBuffer`'s calls on the current GPU. RuntimeError without a
    GPU."""
    del buffer
    return STREAM.of(torch.device("cuda", torch.cuda.current_device()))


class NCCLCommHandle:
    """nccl_comm: a communicator's address. managed: whether it was made for the handle."""

    def __init__(self, nccl_comm: int, managed: bool) -> None:
        self.nccl_comm = nccl_comm
        self.managed = managed

    def get(self) -> int:
        return self.nccl_comm


_handles: weakref.WeakKeyDictionary[dist.ProcessGroup, NCCLCommHandle] = weakref.WeakKeyDictionary()


def get_nccl_comm_handle(group: dist.ProcessGroup, force_new_comm: bool = False) -> NCCLCommHandle:
    """Returns torch's communicator, if every rank has one. Collective at a group's first call.
    Weft makes none: Unsupported if a new communicator is needed or asked for."""
    if group in _handles and not force_new_comm:
        return _handles[group]
    address = 0 if force_new_comm else _torch_communicator(group)
    if not all(known for (known,) in Group.of(group).gather_numbers(address)):
        raise NotInWeft("get_nccl_comm_handle: not every rank has one (Weft makes no communicator)")
    _handles[group] = NCCLCommHandle(address, managed=False)
    return _handles[group]


def _torch_communicator(group: dist.ProcessGroup) -> int:
    """Returns its address, or 0."""
    if not torch.cuda.is_available():
        return 0
    try:
        backend = group._get_backend(torch.device("cuda"))
    except RuntimeError:
        return 0
    return backend._comm_ptr() if hasattr(backend, "_comm_ptr") else 0


def destroy_all_managed_nccl_comm() -> None:
    """Forgets all handles. There is no communicator of Weft's to destroy."""
    _handles.clear()
