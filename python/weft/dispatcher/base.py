# SPDX-License-Identifier: Apache-2.0
"""Interface of every token dispatcher for the layer around it, and process groups."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .config import expect, option


@dataclass(frozen=True)
class DispatcherGroups:
    """Groups under Megatron-LM's names. None stands for a group of only this rank;
    the flex dispatcher needs a real `tp_ep`.

    Rank r of `tp_ep` is rank r // TP of `ep` and rank r % TP of `expt_tp`.
    """

    ep: dist.ProcessGroup | None
    expt_tp: dist.ProcessGroup | None
    tp_ep: dist.ProcessGroup | None


def groups_of(source: Any) -> DispatcherGroups:
    """Reads groups from a collection of either generation of names, or from one group.

    A collection has `ep`, `expt_tp`, `tp_ep`, or the same names with `_group` behind. A process
    group is the expert-parallel group; there is no tensor parallelism then.
    Raises TypeError for anything else.
    """
    if isinstance(source, dist.ProcessGroup):
        return DispatcherGroups(source, None, source)
    for suffix in ("", "_group"):
        names = [name + suffix for name in ("ep", "expt_tp", "tp_ep")]
        if all(hasattr(source, name) for name in names):
            return DispatcherGroups(*(getattr(source, name) for name in names))
    raise TypeError(
        f"dispatcher: {type(source).__name__} has no groups "
        "(expected a process group, or an object with ep, expt_tp and tp_ep)"
    )


def size_of(group: Any) -> int:
    return 1 if group is None else group.size()


def rank_in(group: Any) -> int:
    return 0 if group is None else group.rank()


class MoETokenDispatcher:
    """Moves tokens to their experts and back in six phases, called in this order.

        hidden, probs = dispatch_preprocess(hidden, routing_map, probs)
        rows, row_probs = token_dispatch(hidden, probs)
        rows, tokens_per_expert, row_probs = dispatch_postprocess(rows, row_probs)
        ... experts on `rows`, times row_probs ...
        rows = combine_preprocess(rows)
        hidden = token_combine(rows)
        hidden = combine_postprocess(hidden)

    hidden [..., H] with T tokens in all; routing_map bool [T, E]; probs [T, E] of any float dtype.
    T may differ on every rank and be zero, but every rank of the group calls every phase.
    The two token phases are collective; a schedule may run them on a stream of their own, and may
    hand detached tensors from phase to phase.
    With tensor parallelism every TP rank of an expert gets the token, and the results are summed.
    """

    shared_experts: Any = None

    def __init__(self, config: Any, pg_collection: Any) -> None:
        """config: any object with (some of) the attributes of DispatcherConfig.
        pg_collection: see `groups_of`."""
        groups = groups_of(pg_collection)
        self.config = config
        self.ep_group = groups.ep
        self.tp_group = groups.expt_tp  # the tensor parallelism of the experts
        self.tp_ep_group = groups.tp_ep
        self.ep_size = size_of(self.ep_group)
        self.ep_rank = rank_in(self.ep_group)
        self.tp_size = size_of(self.tp_group)
        self.tp_rank = rank_in(self.tp_group)
        self.use_nccl_stream = False
        self.hidden_shape: torch.Size | None = None
        # Attributes that the phases after dispatch_preprocess read, for schedules that replay it.
        self.cudagraph_attrs: list[str] = []
        self.valid_cudagraph_attrs: list[str] | None = None  # Megatron-LM notes which are tensors

    def _take_experts(self, num_local_experts: int, local_expert_indices: list[int]) -> None:
        """Raises AssertionError unless these are `num_local_experts` consecutive experts."""
        expect(num_local_experts > 0, "Expected at least one expert")
        expect(len(local_expert_indices) == num_local_experts, "Invalid local expert indices")
        first = local_expert_indices[0]
        expect(
            list(local_expert_indices) == list(range(first, first + num_local_experts)),
            "local_expert_indices must be continuous",
        )
        self.num_local_experts = num_local_experts
        self.local_expert_indices = local_expert_indices
        self.num_experts: int = self.config.num_moe_experts

    def set_shared_experts(self, shared_experts: Any) -> None:
        """Has the dispatcher run these experts beside its communication.

        They have pre_forward_comm, linear_fc1_forward_and_act, linear_fc2_forward,
        post_forward_comm and get_output; for the flex dispatcher also wait_current_stream, and
        pre_forward_comm takes wait_current_stream=False there. Raises AssertionError without
        moe_shared_expert_overlap.
        """
        expect(
            option(self.config, "moe_shared_expert_overlap"),
            "set_shared_experts: the overlap is off (set moe_shared_expert_overlap)",
        )
        self.shared_experts = shared_experts
        self.use_nccl_stream = True

    def get_expert_zero_copy_buffers(self) -> tuple[None, None]:
        """Returns communication memory for experts' writes: none."""
        return None, None

    def _flatten(self, hidden_states: Tensor) -> Tensor:
        """Flattens to [T, H]; `_restore` undoes that."""
        self.hidden_shape = hidden_states.shape
        hidden = hidden_states.shape[-1]
        return hidden_states.reshape(hidden_states.numel() // max(hidden, 1), hidden)

    def _restore(self, hidden_states: Tensor) -> Tensor:
        """Gives [T, H] the input's shape, and adds the shared experts' output."""
        hidden_states = hidden_states.reshape(self.hidden_shape)
        if self.shared_experts is None:
            return hidden_states
        return hidden_states + self.shared_experts.get_output().reshape(self.hidden_shape)
