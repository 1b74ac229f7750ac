# SPDX-License-Identifier: Apache-2.0
"""What the flex dispatcher asks of a backend."""

from __future__ import annotations

import logging
from functools import cache
from typing import Any

import torch

Tensor = torch.Tensor

_logger = logging.getLogger(__name__)


class _DispatchManager:
    """Holds what the phases of one forward pass hand on to each other, beside the tensors.

    token_probs and dispatched_probs may be replaced between phases (a schedule detaches them).
    G: ranks of the group, E = experts of the group (each counted once for every TP rank).
    """

    group: Any
    token_probs: Tensor | None = None
    dispatched_probs: Tensor | None = None
    tokens_per_expert: Tensor | None = None
    handle: Any = None
    # Whether `get_permuted_...` hands on the rows of `dispatch`, which must be left valid then.
    experts_read_received_rows: bool = False

    def setup_metadata(self, routing_map: Tensor, probs: Tensor) -> None:
        """routing_map bool and probs, both [T, G, El] or [T, E]."""
        raise NotImplementedError

    def setup_metadata_from_indices(self, token_indices: Tensor, token_probs: Tensor) -> None:
        """token_indices int64 [T, K], -1 for no choice; token_probs [T, K]."""
        raise NotImplementedError

    def dispatch(
        self, hidden_states: Tensor, async_finish: bool = True, allocate_on_comm_stream: bool = True
    ) -> Tensor:
        """Collective. [T, H] -> received rows."""
        raise NotImplementedError

    def combine(
        self, hidden_states: Tensor, async_finish: bool = True, allocate_on_comm_stream: bool = True
    ) -> Tensor:
        """Collective. Rows like those of `dispatch` -> [T, H]."""
        raise NotImplementedError

    def get_dispatched_metadata(self) -> tuple[Tensor | None, Tensor | None]:
        raise NotImplementedError

    def get_permuted_hidden_states_by_experts(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        """Received rows -> rows by expert [P, H] and their probabilities [P]."""
        raise NotImplementedError

    def get_restored_hidden_states_by_experts(self, hidden_states: Tensor) -> Tensor:
        """Rows by expert -> rows like those of `dispatch`."""
        raise NotImplementedError

    def get_number_of_tokens_per_expert(self) -> Tensor:
        """int64 [El], padding included."""
        return self.tokens_per_expert


def as_float32(probs: Tensor, library: str | None) -> Tensor:
    """The probabilities in fp32; says so for half types if `library` is named."""
    if probs.dtype in (torch.bfloat16, torch.float16) and library is not None:
        _warn_once(library)
    return probs.float()


@cache
def _warn_once(library: str) -> None:
    _logger.warning("%s only supports float32 probs, please set --moe-router-dtype=fp32", library)


def chosen_experts(
    routing_map: Tensor | None, probs: Tensor, num_choices: int
) -> tuple[Tensor, Tensor]:
    """probs [T, E] -> probabilities and experts of each token's choices, [T, K], highest first.

    With a map, its entries are the choices (at most `num_choices` in a row), whatever their
    probability; without one, the highest probabilities that are not 0. What is left over of K is
    -1 with probability 0.
    """
    num_choices = min(num_choices, probs.shape[1])
    if routing_map is None:
        token_probs, indices = probs.topk(num_choices, dim=1)
        return token_probs, indices.masked_fill(token_probs == 0, -1)
    ranked = probs.detach().masked_fill(~routing_map, float("-inf"))
    indices = ranked.topk(num_choices, dim=1).indices
    is_chosen = routing_map.gather(1, indices)
    token_probs = probs.gather(1, indices).masked_fill(~is_chosen, 0)
    return token_probs, indices.masked_fill(~is_chosen, -1)
