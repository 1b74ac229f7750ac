# SPDX-License-Identifier: Apache-2.0
"""The token dispatcher over Weft: one exchange over all ranks of TP x EP. Its backends are in
deepep.py, deepepv2.py, hybridep.py and ncclep.py."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from . import manager
from .base import MoETokenDispatcher
from .by_expert import ByExpertManager
from .config import Settings, check_own_exchange, has_own_exchange, num_sms
from .deepep import _DeepepManager
from .deepepv2 import _DeepepV2Manager
from .hybridep import _HybridEPManager, _HybridEPMetadataProcessor
from .initializer import HybridEPPipelineRuntimeInitializer
from .manager import _DispatchManager
from .ncclep import _NCCLEPManager
from .on_exchange import _ExchangeManager
from .replicas import ReplicatedExperts


class MoEFlexTokenDispatcher(MoETokenDispatcher):
    """Serves Megatron-LM's layer, and by further names of its phases NeMo Automodel's.

    Backends (moe_flex_dispatcher_backend): "deepep", "deepepv2" and "uccl_ep" move top-k choices
    and give what one row per token and rank and a permute would; "hybridep" moves a routing map;
    "ncclep" moves choices, too, and gives what "hybridep" does. All of them, but the first three
    with padding of the router, write rows straight to their place by expert. All take different T
    on every rank, zero included, with no all-reduce, no wait and no padding for it (but "deepepv2"
    where it permutes, see `_DeepepV2Manager`); moe_hybridep_pad_uneven_dispatch_inputs and
    moe_hybridep_pad_variable_tokens have an effect only with row budgets and drop-and-pad, see
    `_HybridEPManager`. All of them work with one rank, which the references refuse for "deepep". A
    token has at most 32 routes, TP ranks counted.

    A token goes to every TP rank of an expert (rank EP * TP + TP rank of the group), with its
    probability; combine adds up what the TP ranks computed.
    """

    # NeMo Automodel shares one manager among layers: the last one made for each backend.
    shared_deepep_manager: ClassVar[_DispatchManager | None] = None
    shared_hybridep_manager: ClassVar[_DispatchManager | None] = None
    shared_uccl_manager: ClassVar[_DispatchManager | None] = None
    shared_ncclep_manager: ClassVar[_DispatchManager | None] = None
    shared_deepepv2_manager: ClassVar[_DispatchManager | None] = None

    def __init__(
        self,
        num_local_experts: int,
        local_expert_indices: list[int],
        config: Any,
        pg_collection: Any = None,
        *,
        ep_group: Any = None,
    ) -> None:
        """pg_collection: Megatron-LM's groups (ep, expt_tp, tp_ep), or NeMo Automodel's process
        group, which may also be given as `ep_group`.

        Raises ValueError for an unknown backend, TypeError without a group of TP x EP, ImportError
        where the backend's functions are missing.
        """
        super().__init__(config, ep_group if pg_collection is None else pg_collection)
        self._take_experts(num_local_experts, local_expert_indices)
        if self.tp_ep_group is None:
            raise TypeError("dispatcher: tp_ep is None (expected the process group of TP x EP)")
        self.group = self.tp_ep_group
        self.hybridep_metadata_processor: _HybridEPMetadataProcessor | None = None
        self._options = Settings(config)
        name = self._options.moe_flex_dispatcher_backend
        if name not in manager.FUNCTIONS:
            raise ValueError(
                f"Invalid backend: {name}. Please set moe_flex_dispatcher_backend='deepep', "
                "'deepepv2', 'hybridep', 'ncclep', or 'uccl_ep'"
            )
        self._comm_manager = self._manager(name)
        self._replicated: ReplicatedExperts | None = None
        routing = "routing_map" if name == "hybridep" else "token_indices"
        self.cudagraph_attrs = ["_comm_manager.token_probs", f"_comm_manager.{routing}"]

    def _manager(self, name: str) -> _DispatchManager:
        arguments = {
            "group": self.tp_ep_group,
            "router_topk": self.tp_size * self._options.moe_router_topk,
            "num_experts": self.tp_size * self.num_experts,
            "num_local_experts": self.num_local_experts,
            "config": self.config,
        }
        shared_name = f"shared_{name.removesuffix('_ep')}_manager"
        if has_own_exchange(self._options):
            check_own_exchange(self._options, name)
            kind, self.hybridep_metadata_processor = _ExchangeManager, None
        elif name == "ncclep":
            kind = _NCCLEPManager
        elif name == "hybridep":
            kind = _HybridEPManager
            is_dense = self._options.moe_pad_expert_input_to_capacity
            self.hybridep_metadata_processor = _HybridEPMetadataProcessor(
                self.tp_size * self.num_experts,
                self._options.moe_permute_fusion,
                self._options.moe_hybridep_compact_routing and not is_dense,
            )
        else:
            kind = _DeepepV2Manager if name == "deepepv2" else _DeepepManager
            functions = manager.backend(name)
            if functions.set_num_sms is not None:
                wanted = num_sms(self.config, "moe_deepep_num_sms")
                functions.set_num_sms(20 if wanted is None else wanted)
            pad_multiple = self._options.moe_router_expert_pad_multiple
            arguments["moe_router_expert_pad_multiple"] = pad_multiple
            if name == "uccl_ep":
                names = ("_dispatch_fn", "_combine_fn", "_by_expert")
                chosen = (functions.dispatch, functions.combine, functions.by_expert)
                arguments |= zip(names, chosen)
        if not self._options.moe_share_token_dispatcher:
            return kind(**arguments)
        # A manager of other arguments would send tokens of this model over another one's group;
        # the reference hands it out all the same.
        shared = getattr(MoEFlexTokenDispatcher, shared_name)
        made_with = (kind, self._options.moe_balance_replicas, arguments)
        if shared is None or getattr(shared, "made_with", None) != made_with:
            shared = kind(**arguments)
            shared.made_with = made_with
            setattr(MoEFlexTokenDispatcher, shared_name, shared)
        return shared

    def _initialize_metadata(
        self,
        routing_map: Tensor | int | None = None,
        probs: Tensor | None = None,
        *,
        num_local_tokens: int | None = None,
    ) -> tuple[Tensor, Tensor] | Tensor:
        """Spreads routing_map, probs [T, E] to [T, ranks of TP x EP, El]: every TP rank of an
        expert gets its entry. With NeMo Automodel's num_local_tokens instead of the map, returns
        probs alone."""
        del num_local_tokens  # the probabilities say it

        def spread(per_expert: Tensor) -> Tensor:
            each = per_expert.reshape(-1, self.ep_size, 1, self.num_local_experts)
            return each.expand(-1, -1, self.tp_size, -1).flatten(1, 2)

        if not isinstance(routing_map, Tensor):
            return spread(probs)
        return spread(routing_map), spread(probs)

    def dispatch_preprocess(
        self,
        hidden_states: Tensor,
        routing_map: Tensor | int | None = None,
        probs: Tensor | None = None,
        *,
        num_local_tokens: int | None = None,
    ) -> tuple[Tensor, Tensor]:
        """hidden [..., H], routing_map bool [T, E], probs [T, E] -> hidden [T, H] and the
        probabilities that travel.

        In place of the map NeMo Automodel gives the number of tokens: every expert of non-zero
        probability is a route then.
        """
        del num_local_tokens  # the probabilities say it
        tokens = self._flatten(hidden_states)
        if not isinstance(routing_map, Tensor):
            probs = probs.reshape(-1, self.num_experts)
            routing_map = probs != 0
        self._comm_manager.setup_metadata(*self._initialize_metadata(routing_map, probs))
        return tokens, self._comm_manager.token_probs

    def token_dispatch(
        self,
        hidden_states: Tensor,
        probs: Tensor | None = None,
        async_finish: bool = True,
        allocate_on_comm_stream: bool = True,
    ) -> tuple[Tensor, Tensor]:
        """Collective. Sends [T, H]; returns received rows and probs.

        probs, if given, replaces the probabilities of dispatch_preprocess (a detached copy).
        """
        if self.shared_experts is not None:
            self.shared_experts.wait_current_stream()
        if probs is not None:
            self._comm_manager.token_probs = probs
        if self._options.moe_balance_replicas and self._replicated is None:
            raise ValueError("moe_balance_replicas: whose weights? (call replicate_experts)")
        rows = self._comm_manager.dispatch(hidden_states, async_finish, allocate_on_comm_stream)
        if self.shared_experts is not None:
            self.shared_experts.pre_forward_comm(hidden_states, wait_current_stream=False)
            self.shared_experts.linear_fc1_forward_and_act(rows)
        return rows, self._comm_manager.dispatched_probs

    def dispatch_postprocess(
        self, hidden_states: Tensor, probs: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Returns rows by expert [P, H], tokens_per_expert int64 [El], probs [P]."""
        if probs is not None:
            self._comm_manager.dispatched_probs = probs
        rows, row_probs = self._comm_manager.get_permuted_hidden_states_by_experts(hidden_states)
        if self._replicated is not None:
            rows = self._replicated.lend(self._comm_manager, rows)
        return rows, self._comm_manager.get_number_of_tokens_per_expert(), row_probs

    def combine_preprocess(self, hidden_states: Tensor) -> Tensor:
        """Reorders rows by expert [P, H] as they were received."""
        if self._replicated is not None:
            hidden_states = self._replicated.take_back(hidden_states)
        return self._comm_manager.get_restored_hidden_states_by_experts(hidden_states)

    def token_combine(
        self,
        hidden_states: Tensor,
        async_finish: bool = True,
        allocate_on_comm_stream: bool = True,
    ) -> Tensor:
        """Collective. Sums rows over ranks, unweighted: [T, H]."""
        return self._comm_manager.combine(hidden_states, async_finish, allocate_on_comm_stream)

    def combine_postprocess(self, hidden_states: Tensor) -> Tensor:
        """Gives [T, H] the input's shape, and adds the shared experts' output."""
        if self.shared_experts is not None:
            self.shared_experts.linear_fc2_forward(hidden_states)
            self.shared_experts.post_forward_comm()
        return self._restore(hidden_states)

    @property
    def experts_read_received_rows(self) -> bool:
        """True if the rows of token_dispatch are the experts' input itself: a schedule that frees
        memory must leave them until the backward then."""
        return self._comm_manager.experts_read_received_rows

    # The phases as NeMo Automodel names them. K: choices of a token.

    def dispatch_preprocess2(
        self,
        hidden_states: Tensor,
        num_local_tokens: int,
        token_probs: Tensor,
        token_indices: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """hidden [..., H]; token_probs [T, K]; token_indices int64 [T, K], -1 for no choice."""
        del num_local_tokens  # the tensors say it
        tokens = self._flatten(hidden_states)
        if self.hybridep_metadata_processor is None:
            self._comm_manager.setup_metadata_from_indices(token_indices, token_probs)
        else:  # a module of its own, which a CUDA graph can hold
            routing = self.hybridep_metadata_processor(token_indices, token_probs)
            self._comm_manager.setup_routing(*routing)
        return tokens, self._comm_manager.token_probs

    def dispatch_all_to_all(self, *given: Any, **options: Any) -> tuple[Tensor, Tensor]:
        """Collective. Calls `token_dispatch`, also a subclass's."""
        return self.token_dispatch(*given, **options)

    def combine_all_to_all(self, *given: Any, **options: Any) -> Tensor:
        """Collective. Calls `token_combine`, also a subclass's."""
        return self.token_combine(*given, **options)

    def token_permutation(
        self, hidden_states: Tensor, num_local_tokens: int, probs: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Collective. Runs dispatch's phases for dense probs [T, E].

        Returns rows by expert [P, H], tokens_per_expert int64 [El], probs [P].
        """
        tokens, _ = self.dispatch_preprocess(hidden_states, num_local_tokens, probs)
        return self._dispatch_phases(tokens)

    def token_permutation2(
        self,
        hidden_states: Tensor,
        num_local_tokens: int,
        token_probs: Tensor,
        token_indices: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Collective. Runs dispatch's phases for top-k choices; see dispatch_preprocess2."""
        tokens, _ = self.dispatch_preprocess2(
            hidden_states, num_local_tokens, token_probs, token_indices
        )
        return self._dispatch_phases(tokens)

    def token_unpermutation(self, hidden_states: Tensor) -> Tensor:
        """Collective. Runs combine's phases: rows by expert [P, H] to the input's shape."""
        rows = self.combine_preprocess(hidden_states)
        is_async = self._options.moe_deepep_async_dispatch
        return self.combine_postprocess(self.token_combine(rows, is_async, is_async))

    def _dispatch_phases(self, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        is_async = self._options.moe_deepep_async_dispatch
        rows, probs = self.token_dispatch(tokens, None, is_async, is_async)
        return self.dispatch_postprocess(rows, probs)

    def get_pipeline_runtime_initializers(
        self, *, hidden_dim: int, dtype: torch.dtype
    ) -> tuple[HybridEPPipelineRuntimeInitializer, ...]:
        """Returns what to prepare before a pipeline's first step: one for "hybridep", else none."""
        if not isinstance(self._comm_manager, _HybridEPManager):
            return ()
        return (HybridEPPipelineRuntimeInitializer(self._comm_manager, hidden_dim, dtype),)

    # Replicas of popular experts.

    def replicate_experts(
        self,
        experts: nn.Module,
        weights: Sequence[str] | Mapping[str, Sequence[int]] | None = None,
        *,
        wgrad: str = "places",
        queue: Callable[[], Any] | None = None,
    ) -> None:
        """Hooks a module of grouped experts, for moe_balance_replicas = R: between
        dispatch_postprocess and combine_preprocess, which are collective then, it has the weights
        of El + R experts, and tokens_per_expert as many numbers. Gradients of replicas are added to
        those of its own.

        weights: its parameters [El, ...], by default all that it has; or with the shape of an
        expert's, for those that lie so in memory under another shape. num_local_experts of the
        module follows. wgrad, and what queue() returns: see `weft.Balance.apply`.
        Raises ValueError without replicas, InvalidArgument for a parameter of another size, and
        with a queue of another shape.
        """
        if self._options.moe_balance_replicas == 0:
            raise ValueError("replicate_experts: there are none (set moe_balance_replicas)")
        replicas = self._options.moe_balance_replicas
        if getattr(self._comm_manager, "replicas", 0) != replicas:  # set after this was made
            self._comm_manager = self._manager(self._options.moe_flex_dispatcher_backend)
        local = self.num_local_experts
        self._replicated = ReplicatedExperts(experts, local, weights, wgrad, queue)

    # Row budgets.

    def check_over_budget(self) -> Tensor | None:
        """bool [1] where the tokens are: whether this rank's row budget ran out since the last
        reset. None without a budget or before the first dispatch. Does not wait for a GPU."""
        return getattr(self._comm_manager, "over_budget", None)

    def reset_over_budget(self) -> None:
        flag = self.check_over_budget()
        if flag is not None:
            flag.zero_()

    def check_required_capacity(self) -> Tensor | None:
        """int64 [1] where the tokens are: the most rows that a call would have needed, "ncclep"
        with a budget. None for others, and before the first dispatch. Does not wait for a GPU."""
        return getattr(self._comm_manager, "required_recv", None)

    def grow_ep_recv_capacity(self, num_rows: int) -> None:
        """Row budgets are at least `num_rows` from now on.

        Raises ValueError unless that is growth, and for a backend without a budget.
        """
        if not isinstance(self._comm_manager, ByExpertManager):
            raise ValueError("grow: this backend has no row budget (use 'hybridep' or 'ncclep')")
        self._comm_manager.grow_recv_capacity(num_rows)

    def invalidate_ep_bootstrap(self) -> None:
        """Does nothing: exchanges grow by themselves."""
