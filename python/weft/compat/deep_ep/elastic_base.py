# SPDX-License-Identifier: Apache-2.0
"""What the calls of an `ElasticBuffer` share."""

from __future__ import annotations

from typing import Any

import torch

from weft.streams import CommStream

from .checks import BadCall, check
from .exchange_pool import ExchangePool

Tensor = torch.Tensor


class ElasticBase:
    """The attributes are set by `ElasticBuffer`."""

    num_ranks: int
    num_scaleup_ranks: int
    rank_idx: int
    num_max_tokens_per_rank: int
    num_allocated_qps: int
    allow_multiple_reduction: bool
    runtime: ExchangePool | None
    _comm: CommStream

    def pool(self, verb: str) -> ExchangePool:
        """The exchanges, while the buffer has them."""
        if self.runtime is None:
            raise BadCall(f"{verb}: the buffer was destroyed (make a new one)")
        return self.runtime

    def check_call(
        self, verb: str, num_qps: int, previous_event: Any, allocate_on_comm_stream: bool
    ) -> None:
        self.pool(verb)
        check(
            num_qps <= self.num_allocated_qps,
            f"{verb}: num_qps = {num_qps} (at most {self.num_allocated_qps} are allocated)",
        )
        check(
            previous_event is None or allocate_on_comm_stream,
            f"{verb}: previous_event without allocate_on_comm_stream (expected both)",
        )


def sms_of(x: Tensor, num_sms: int) -> int:
    return num_sms if x.is_cuda else 0


def wait_for(event: Any, x: Tensor) -> None:
    """Everything waits for it: the part that moves rows has no later half that alone could."""
    if event is not None and x.is_cuda:
        event.current_stream_wait()
