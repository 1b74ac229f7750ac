# SPDX-License-Identifier: Apache-2.0
"""The interface of UCCL-EP, on Weft: `Buffer` and `UCCLBuffer`, which NeMo Automodel calls.

`weft.compat.install()` makes `import uccl` mean this package. Some promises that UCCL breaks are
kept here: an event is one on torch's current stream, a cached dispatch honours `previous_event`,
rebuilding a buffer does not abort.
"""

import torch
import torch.distributed as dist

from weft import Group, InvalidArgument
from weft.compat import environment
from weft.compat.deep_ep import EventOverlap, config
from weft.compat.deep_ep.buffer import Buffer as DeepEPBuffer
from weft.compat.deep_ep.runtime import timeout_of
from weft.compat.deep_ep.utils.event import EventHandle as CurrentStreamEvent

from .fabric import adopt_network

__all__ = ["Buffer", "EventHandle", "EventOverlap", "UCCLBuffer", "__version__"]

__version__ = "0.0.1.post4"  # of the package that has these classes

# UCCL's configurations by number of ranks are those of an older `deep_ep`.
_UNLISTED = (48, 96)


def _older(table: dict[int, config.Chunks], other: dict[int, config.Chunks]):
    return {size: chunks for size, chunks in (table | other).items() if size not in _UNLISTED}


DISPATCH = _older(
    config.DISPATCH,
    {
        24: (8, 288, 32, 128),
        32: (32, 288, 32, 128),
        64: (20, 288, 28, 128),
        128: (20, 560, 32, 128),
    },
)
COMBINE = _older(config.COMBINE, {64: (1, 288, 20, 128), 128: (1, 560, 12, 128)})


class Buffer(DeepEPBuffer):
    """The `Buffer` of `weft.compat.deep_ep`, which has the calls, with UCCL's arguments, tables."""

    num_sms = 20
    _DISPATCH, _COMBINE = DISPATCH, COMBINE
    _NEEDS_NO_RDMA_ON_ONE_HOST = False
    _IS_LOCAL_RDMA = True

    def __init__(
        self,
        group: dist.ProcessGroup,
        num_nvl_bytes: int = 0,
        num_rdma_bytes: int = 0,
        low_latency_mode: bool = False,
        num_qps_per_rank: int = 24,
        allow_nvlink_for_low_latency_mode: bool = True,
        allow_mnnvl: bool = False,
        explicitly_destroy: bool = False,
        is_intranode: bool | None = None,
    ) -> None:
        """Collective. is_intranode None: detected. Needs no environment variable; honours UCCL's
        choice of network.

        ValueError for is_intranode=True on a group that is larger than a host has ranks, or whose
        ranks do not all share memory.
        """
        adopt_network()
        # So few ranks may still be on several hosts.
        num_domains = len(Group.of(group).domains)
        on_one_host = group.size() <= local_world_size() and num_domains == 1
        if on_one_host and self._NEEDS_NO_RDMA_ON_ONE_HOST:
            num_rdma_bytes, is_intranode = 0, True
        if is_intranode and not on_one_host:
            raise InvalidArgument(
                f"Buffer: is_intranode = True with {group.size()} ranks in "
                f"{num_domains} domains "
                f"(expected at most {local_world_size()}, those of a host, in one)"
            )
        super().__init__(
            group,
            num_nvl_bytes,
            num_rdma_bytes,
            low_latency_mode,
            num_qps_per_rank,
            allow_nvlink_for_low_latency_mode,
            allow_mnnvl,
            explicitly_destroy=explicitly_destroy,
        )
        self.is_intranode = on_one_host if is_intranode is None else is_intranode

    def _timeout(self) -> float:
        return float(environment.number("UCCL_EP_CPU_TIMEOUT_SECS", default=0) or timeout_of())


class UCCLBuffer(Buffer):
    """Buffer of NeMo Automodel: num_rdma_bytes is 0 for a group on one host."""

    _NEEDS_NO_RDMA_ON_ONE_HOST = True


def local_world_size() -> int:
    """Returns a host's ranks: LOCAL_WORLD_SIZE, else GPUs, else 1."""
    return environment.number("LOCAL_WORLD_SIZE", default=max(torch.cuda.device_count(), 1))


class EventHandle(CurrentStreamEvent):
    """A point on torch's current CUDA stream, or on the stream with this handle (a number)."""

    def __init__(self, stream: int | None = None) -> None:
        super().__init__()
        if stream is not None and self._event is not None:
            self._event = torch.cuda.ExternalStream(stream).record_event()
