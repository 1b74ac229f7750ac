# SPDX-License-Identifier: Apache-2.0
"""Interface between the flex dispatcher and its backends, and the functions of `weft.fused_a2a`
that a backend moves tokens by. flex.py asks; deepep.py, deepepv2.py, hybridep.py and ncclep.py
answer."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

if TYPE_CHECKING:
    from weft.fused_a2a.rank_rows import Functions

_logger = logging.getLogger(__name__)


class _DispatchManager:
    """Holds what the phases of one forward pass hand on to each other, beside the tensors.

        setup_metadata(routing_map, probs)     bool and float, both [T, G, El] or [T, E]
        setup_metadata_from_indices(indices, probs)     [T, K]; index -1 for no choice
        rows = dispatch(hidden, async_finish, allocate_on_comm_stream)     collective; [T, H]
        rows, probs = get_permuted_hidden_states_by_experts(rows)     by expert: [P, H], [P]
        rows = get_restored_hidden_states_by_experts(rows)     as they were received
        hidden = combine(rows, async_finish, allocate_on_comm_stream)     collective; [T, H]

    token_probs and dispatched_probs may be replaced between phases (a schedule detaches them).
    G: ranks of the group, E = experts of the group (each counted once for every TP rank).
    """

    group: Any
    token_probs: Tensor | None = None
    dispatched_probs: Tensor | None = None
    tokens_per_expert: Tensor | None = None
    handle: Any = None
    # True if `get_permuted_...` hands on the rows of `dispatch`, which must be left valid then.
    experts_read_received_rows: bool = False

    def get_number_of_tokens_per_expert(self) -> Tensor:
        """int64 [El], padding included."""
        return self.tokens_per_expert


class Backend(NamedTuple):
    dispatch: Callable[..., Any] | None
    combine: Callable[..., Any] | None
    set_num_sms: Callable[[int], None] | None
    by_expert: Functions | None = None  # has the same and the permutes around it in one step


# Names of `weft.fused_a2a`: dispatch, combine, and what sets the number of SMs.
FUNCTIONS = {
    "deepep": ("fused_dispatch", "fused_combine", "set_deepep_num_sms"),
    "uccl_ep": ("uccl_fused_dispatch", "uccl_fused_combine", "set_uccl_num_sms"),
    "hybridep": ("hybrid_ep_dispatch", "hybrid_ep_combine", None),
    "ncclep": ("nccl_ep_dispatch", "nccl_ep_combine", None),
    "deepepv2": ("deepepv2_dispatch", "deepepv2_combine", None),
}


def backend(name: str) -> Backend:
    """The functions of a backend, one of `FUNCTIONS`."""
    # Looked up at each call, so that one that was replaced counts, in either module.
    from weft import dispatcher, fused_a2a
    from weft.compat.deep_ep import Buffer
    from weft.fused_a2a import rank_rows

    dispatch, combine, set_num_sms = FUNCTIONS[name]
    functions = getattr(dispatcher, dispatch), getattr(dispatcher, combine)
    if name in ("hybridep", "ncclep"):  # rows of these always arrive by expert
        return Backend(*functions, None)
    by_expert, buffers = rank_rows.DEEPEP, fused_a2a.Buffer
    if name == "uccl_ep":
        by_expert, buffers = rank_rows.UCCL, fused_a2a.UCCLBuffer
    # Buffers of another class, which the module was given, have no exchange of Weft.
    is_own = isinstance(buffers, type) and issubclass(buffers, Buffer)
    if name == "deepepv2":
        own = (rank_rows.deepepv2_dispatch, rank_rows.deepepv2_combine)
        return Backend(*functions, None, by_expert if is_own and functions == own else None)
    sets_num_sms = getattr(dispatcher, set_num_sms)
    return Backend(*functions, sets_num_sms, by_expert if is_own else None)


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


def indices_to_multihot(indices: Tensor, probs: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """indices int [N, K], probs [N, K] -> map bool [N, E], probs [N, E] in the dtype of `probs`.

    A negative index is no choice: it sets nothing, and its probability gets gradient 0. An expert
    that a token names twice gets the sum. Differentiable in `probs`; no wait for a GPU.
    Raises RuntimeError for an index of num_experts or more; on a GPU an assertion fails then.
    """
    is_choice = indices >= 0
    column = indices.long().masked_fill(~is_choice, 0)  # where a choice that is none adds 0
    empty = probs.new_zeros((indices.shape[0], num_experts))
    counts = empty.int().scatter_add(1, column, is_choice.int())
    return counts > 0, empty.scatter_add(1, column, probs.masked_fill(~is_choice, 0))


# The name that Megatron-LM and NeMo Automodel use.
fused_indices_to_multihot = indices_to_multihot
