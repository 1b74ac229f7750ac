# SPDX-License-Identifier: Apache-2.0
"""`Buffer`: what Megatron-LM, NeMo Automodel, vLLM and SGLang call to exchange tokens."""

from __future__ import annotations

import functools
import secrets
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from weft import Group
from weft.compat import environment
from weft.errors import BadCall, PeerError
from weft.streams import CommStream

from . import config as configs
from .at_once import CallsAtOnce
from .checks import (
    FLOATS,
    MAX_TOPK,
    check,
    check_even,
    check_experts,
    check_handle,
    check_layout,
    check_least,
    check_optional,
    check_routing,
    check_tensor,
)
from .config import Config
from .handles import Handle
from .hooks import LastHooks
from .layout import Layout, layout_of, routes_of, routes_to_ranks
from .low_latency import LowLatencyMode
from .masks import RankMask
from .payload import (
    Payload,
    biases_of,
    bring_back,
    parts_of,
    round_up,
    slot_sums,
)
from .runtime import (
    MIN_TOKENS,
    MIN_TOPK,
    Call,
    ExchangePool,
    MpiGroup,
    NoGradients,
    Runtime,
    timeout_of,
)
from .store import StoreRanks, comers
from .utils.event import EventHandle, EventOverlap, event_of

_ALIGNMENT = 128  # bytes
_QP_DEPTH = 1024  # default that callers read


class Buffer(CallsAtOnce, LowLatencyMode):
    """One rank's end of the exchange within a group; all ranks make the same calls in order.

    Works with CUDA and with CPU tensors, any number of ranks and any number of tokens on each, any
    hidden size whose rows are a multiple of 16 bytes. Errors of arguments are AssertionError,
    ValueError and RuntimeError in one (`weft.InvalidArgument`); a rank that does not come raises
    `weft.TimeoutError` or `weft.PeerError` after 100 s at most.
    """

    num_sms = 20  # GPU multiprocessors of a call whose config is None
    sums_topk_weights = False  # whether combine sums all ranks' weights of a slot; see there
    _DISPATCH, _COMBINE = configs.DISPATCH, configs.COMBINE  # by the number of ranks
    _IS_LOCAL_RDMA = False  # get_local_buffer_tensor always means the RDMA buffer
    _LOSES_RANKS = True  # with enable_shrink

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        num_nvl_bytes: int = 0,
        num_rdma_bytes: int = 0,
        low_latency_mode: bool = False,
        num_qps_per_rank: int = 24,
        allow_nvlink_for_low_latency_mode: bool = True,
        allow_mnnvl: bool = False,
        *,
        allow_nvlink_for_normal_mode: bool = True,
        use_fabric: bool = False,
        explicitly_destroy: bool = False,
        enable_shrink: bool = False,
        comm: Any = None,
        is_intranode: bool | None = None,
    ) -> None:
        """Collective. group: of torch.distributed, any backend; or comm: of mpi4py.

        Sizes in bytes, queue pairs, NVLink and fabric settings, and is_intranode, which UCCL's
        `deep_ep` takes, are accepted and have no effect: memory is taken when the first call shows
        what is needed, and links are detected. Memory is freed by `destroy` if explicitly_destroy,
        else (or if that is forgotten) with this object. From allow_mnnvl on arguments go by
        keyword, as their positions differ between versions of `deep_ep`. ValueError without group
        and comm.

        enable_shrink: calls go on without ranks that die, leave or let the deadline pass: with CPU
        tensors those of both modes, and such a rank is masked on all others alike when the call
        that lost it returns; with CUDA tensors low-latency calls on one host, as `LowLatencyMode`
        explains. Elsewhere masks are there and a rank that is lost makes the others raise.
        """
        del num_qps_per_rank, allow_nvlink_for_low_latency_mode, allow_mnnvl
        del allow_nvlink_for_normal_mode, use_fabric, is_intranode
        if group is None and comm is None:
            raise ValueError("Either 'group' or 'comm' must be provided.")
        for name, size in (("num_nvl_bytes", num_nvl_bytes), ("num_rdma_bytes", num_rdma_bytes)):
            check(
                size >= 0 and size % _ALIGNMENT == 0,
                f"Buffer: {name} = {size} (expected a multiple of {_ALIGNMENT})",
            )
        ranks = Group.of(group) if group is not None else MpiGroup(comm)
        self.rank: int = ranks.rank
        self.group: Any = group if group is not None else comm
        self.group_size: int = ranks.num_ranks
        self.num_nvl_bytes = num_nvl_bytes
        self.num_rdma_bytes = num_rdma_bytes
        self.low_latency_mode = low_latency_mode
        self.explicitly_destroy = explicitly_destroy
        self.enable_shrink = enable_shrink
        self.nvshmem_qp_depth: int = environment.number("NVSHMEM_QP_DEPTH", default=_QP_DEPTH)
        self._mask = RankMask(self.group_size)
        goes_on = enable_shrink and self._LOSES_RANKS
        on_loss = self._mask.lose if goes_on else None
        meet = None
        if goes_on and low_latency_mode and hasattr(group, "get_group_store"):
            name = f"weft/first_call/{ranks.gather_numbers(secrets.randbits(62))[0][0]}"
            meet = functools.partial(_meet, ranks, group.get_group_store(), name, self._mask)
        self.runtime: Runtime | None = Runtime(ranks, self._timeout(), on_loss, meet)
        self._hooks = LastHooks()

    def destroy(self) -> None:
        """Waits for this rank's GPU and frees the memory; the buffer is unusable then.

        AssertionError without explicitly_destroy. Live handles keep what they need.
        """
        runtime = self._runtime()
        check(self.explicitly_destroy, "destroy: `explicitly_destroy` flag must be set")
        self.runtime = None
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        runtime.exchanges.close()

    @staticmethod
    def is_sm90_compiled() -> bool:
        """Returns True: Weft calls any GPU, and between hosts."""
        return True

    @classmethod
    def set_num_sms(cls, new_num_sms: int) -> None:
        """Sets num_sms of this process's later configurations. AssertionError if odd."""
        check_even(new_num_sms)
        next(base for base in cls.__mro__ if "num_sms" in vars(base)).num_sms = new_num_sms

    @staticmethod
    def capture() -> EventOverlap:
        """Records the current stream."""
        return EventOverlap(EventHandle())

    @classmethod
    def get_dispatch_config(cls, num_ranks: int) -> Config:
        """The configuration for `num_ranks`, or for the next smaller number that is listed."""
        return configs.config_of(cls._DISPATCH, num_ranks, cls.num_sms)

    @classmethod
    def get_combine_config(cls, num_ranks: int) -> Config:
        """The configuration for `num_ranks`, or for the next smaller number that is listed."""
        return configs.config_of(cls._COMBINE, num_ranks, cls.num_sms)

    get_low_latency_rdma_size_hint = staticmethod(configs.get_low_latency_rdma_size_hint)

    def get_comm_stream(self) -> torch.Stream:
        """Returns the stream of this buffer's calls on the current GPU, else the CPU's."""
        stream = self._comm_stream()
        if not torch.cuda.is_available():
            return torch.cpu.current_stream()
        return stream.of(torch.device("cuda", torch.cuda.current_device()))

    def get_local_buffer_tensor(
        self,
        dtype: torch.dtype,
        size: torch.Size | None = None,
        offset: int = 0,
        use_rdma_buffer: bool = False,
    ) -> torch.Tensor:
        """Returns a tensor as large as the raw buffer from `offset` bytes on, or of `size`. UCCL's
        has the RDMA buffer's size, whatever use_rdma_buffer says.

        For callers that clear the buffer. Weft has none: the tensor is one element, expanded, which
        takes no memory. It can be filled; torch refuses to write different elements.
        """
        self._comm_stream()  # the buffer is alive
        is_rdma = use_rdma_buffer or self._IS_LOCAL_RDMA
        num_bytes = self.num_rdma_bytes if is_rdma else self.num_nvl_bytes
        count = (num_bytes - offset) // dtype.itemsize
        shape = torch.Size([max(count, 0)] if size is None else size)
        check(
            offset >= 0 and shape.numel() <= count,
            f"get_local_buffer_tensor: {shape.numel()} elements of {dtype} from byte {offset} on "
            f"(expected at most {max(count, 0)} in {num_bytes} bytes)",
        )
        device = "cuda" if torch.cuda.is_available() else "cpu"
        return torch.zeros((), dtype=dtype, device=device).expand(shape)

    def get_dispatch_layout(
        self,
        topk_idx: Tensor,
        num_experts: int,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[Tensor, Tensor | None, Tensor, Tensor, EventOverlap]:
        """Local. Counts topk_idx [T, K], without values outside [0, num_experts).

        Returns num_tokens_per_rank int32 [R], num_tokens_per_rdma_rank int32 [hosts] (None for
        one host; `Hosts` says what that is), num_tokens_per_expert int32 [E], is_token_in_rank
        bool [T, R], event. A token counts once for a rank, and once for a host.
        """
        streams = (previous_event, async_finish, allocate_on_comm_stream)
        if previous_event is None and not (async_finish or allocate_on_comm_stream):
            made = self._layout_at_once(topk_idx, num_experts)
            if made is not None:
                return made
        with Call("get_dispatch_layout"):
            runtime = self._runtime()
            check_routing(topk_idx)
            check_experts(num_experts, self.group_size)
            with runtime.stream.call(topk_idx.device, (topk_idx,), *streams) as work:
                layout = layout_of(topk_idx, num_experts, runtime.hosts)
                work.returns(*layout)
        return *layout, event_of(work)

    def dispatch(
        self,
        x: Tensor | tuple[Tensor, ...],
        handle: Handle | None = None,
        num_tokens_per_rank: Tensor | None = None,
        num_tokens_per_rdma_rank: Tensor | None = None,
        is_token_in_rank: Tensor | None = None,
        num_tokens_per_expert: Tensor | None = None,
        topk_idx: Tensor | None = None,
        topk_weights: Tensor | None = None,
        expert_alignment: int = 1,
        num_worst_tokens: int = 0,
        config: Config | None = None,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple:
        """Collective. Sends each token once to every rank with one of its experts.

        x [T, H] of bf16, fp16, fp32 or one byte; (FP8 [T, H], scales float32 or int32 [T, any],
        any strides); or the three tensors of NVFP4. Row bytes are a multiple of 16. topk_idx [T, K]
        int64, K up to 32, values outside [0, E) are no choice; topk_weights float32 [T, K].
        Without them only the layout says where tokens go. T may differ between ranks.
        num_tokens_per_rdma_rank is not needed, only checked.

        Returns (recv_x, recv_topk_idx, recv_topk_weights, num_recv_tokens_per_expert_list, handle,
        event). recv_x [N, H] like x, rows by source rank, then token. recv_topk_idx int64 [N, K]:
        this rank's experts from 0, -1 for those of others; recv_topk_weights 0 there. The list
        counts choices of each local expert, rounded up to expert_alignment; rows are not padded.

        num_worst_tokens: N is that number and nothing waits for the GPU (needs top-k); the list is
        empty, rows beyond the real count have recv_topk_idx -1 and are otherwise undefined. It must
        be large enough on every rank; tokens beyond it are dropped.

        handle of an earlier dispatch: the same way again, with the same T, without top-k; returns
        (recv_x, None, None, None, None, event).
        """
        layout = (
            num_tokens_per_rank,
            num_tokens_per_rdma_rank,
            num_tokens_per_expert,
            is_token_in_rank,
        )
        streams = (previous_event, async_finish, allocate_on_comm_stream)
        if previous_event is None and not (async_finish or allocate_on_comm_stream):
            made = None
            if handle is not None:
                if topk_idx is topk_weights is None:
                    made = self._rows_again_at_once(x, handle, config)
            elif num_worst_tokens == 0:
                tensors = (x, topk_idx, topk_weights)
                made = self._rows_at_once("dispatch", tensors, layout, config, expert_alignment)
            if made is not None:
                return made
        verb = "plan_and_dispatch" if handle is None else "dispatch"
        wants = {"layout": "rank_major", "row_budget": 0 if num_worst_tokens else None}
        with NoGradients(), Call("dispatch", self._pool, verb, **wants) as call:
            counts = num_tokens_per_expert
            call.is_for(x, len(counts) if isinstance(counts, Tensor) and counts.dim() else None)
            runtime = self._runtime()
            plan = None if handle is None else call.by(check_handle(handle, Handle).plan)
            payload = Payload(x)
            num_sms = self._num_sms(config)
            if plan is not None:
                is_alone = topk_idx is None and topk_weights is None
                check(is_alone, "top-k is given beside a handle (which stands for it)")
                shape = [payload.num_tokens, payload.hidden]
                wanted = [plan.num_tokens, plan.exchange.hidden]
                check(shape == wanted, f"x has shape {shape} (expected {wanted}, the handle's)")
                with runtime.stream.call(payload.device, payload.tensors, *streams) as work:
                    recv_x = payload.send(call, num_sms=num_sms).x
                    work.returns(*parts_of(recv_x))
                return recv_x, None, None, None, None, event_of(work)

            _check_topk(topk_idx, topk_weights, payload.num_tokens, num_worst_tokens)
            num_tokens, num_hosts = payload.num_tokens, runtime.hosts.num_hosts
            num_experts = check_layout(layout, num_tokens, self.group_size, num_hosts)
            check_least("expert_alignment", expert_alignment)
            topk = (topk_idx, topk_weights)
            routing = _Routing(*topk, num_experts, Layout(*layout), num_worst_tokens)
            results = self._send(call, payload, routing, num_sms, streams)
        *tensors, counts, handle, event = results
        if expert_alignment > 1:
            counts = [round_up(count, expert_alignment) for count in counts]
        return *tensors, counts, handle, event

    def dispatch_by_topk(
        self,
        x: Tensor,
        topk_idx: Tensor,
        topk_weights: Tensor,
        num_experts: int,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple:
        """Collective. Does `get_dispatch_layout` and `dispatch` for `weft.fused_a2a`; `deep_ep` has
        no such call. No layout is made: items of the handle that need one derive it from the plan
        on access. The counts are int64 [El] on the CPU."""
        streams = (previous_event, async_finish, allocate_on_comm_stream)
        if previous_event is None and not (async_finish or allocate_on_comm_stream):
            tensors = (x, topk_idx, topk_weights)
            made = self._rows_at_once("fused_dispatch", tensors, num_experts, None)
            if made is not None:
                return made
        with NoGradients(), Call("fused_dispatch", self._pool, layout="rank_major") as call:
            call.is_for(x, num_experts)
            self._runtime()
            payload = Payload(x)
            check_routing(topk_idx, topk_weights, payload.num_tokens)
            check(topk_weights is not None, "topk_weights is None (expected float32 [T, K])")
            check_experts(num_experts, self.group_size)
            routing = _Routing(topk_idx, topk_weights, num_experts)
            return self._send(call, payload, routing, self._num_sms(None), streams)

    def _send(
        self, call: Call, payload: Payload, routing: _Routing, num_sms: int, streams: tuple
    ) -> tuple:
        """Collective. Plans and dispatches; returns what `dispatch` without a handle does, or
        `dispatch_by_topk`."""
        runtime, topk_idx, num_ranks = self._runtime(), routing.topk_idx, self.group_size
        has_topk, worst = topk_idx is not None, routing.num_worst_tokens
        topk = topk_idx.size(1) if has_topk else min(num_ranks, MAX_TOPK)
        # Without a wait for the GPU the exchange cannot learn of more tokens and grow.
        most = max(MIN_TOKENS, -(-worst // num_ranks))
        key = (payload.hidden, routing.num_experts, payload.device)
        wants = {"layout": "rank_major", "row_budget": worst or None}
        exchange = call.plans(key, most, max(MIN_TOPK, topk), **wants)
        num_tokens, most = payload.num_tokens, exchange.max_tokens
        if worst > 0 and payload.device.type != "cpu" and num_tokens > most:
            raise BadCall(
                f"x has {num_tokens} rows with num_worst_tokens = {worst} "
                f"(expected at most {most}: num_worst_tokens is less than the rows of a rank)"
            )
        layout = routing.layout
        inputs = (*payload.tensors, *(layout or ()), topk_idx, routing.topk_weights)
        with runtime.stream.call(payload.device, inputs, *streams) as work:
            routes, beside = topk_idx, ()
            if not has_topk:
                routes = routes_to_ranks(layout.is_token_in_rank, exchange.num_local_experts)
            elif runtime.hosts.are_several:  # only then a handle tells of other ranks' experts
                beside = (routes_of(topk_idx, exchange.num_experts).to(torch.int32),)
            wanted = {"ignores_unknown": True, "experts": has_topk}
            out = payload.send(call, routes, routing.topk_weights, beside, num_sms, **wanted)
            ids = out.beside[0] if beside else None
            in_rank = None if layout is None else layout.is_token_in_rank
            handle = Handle(out.plan, in_rank, has_topk, ids, num_sms // 2, runtime.hosts)
            if layout is None:
                counts = out.plan.core.rows_on_host()
            else:
                counts = [] if worst > 0 else _counts(runtime, handle, layout)
            work.returns(*parts_of(out.x), out.experts, out.weights, ids)
        return out.x, out.experts, out.weights, counts, handle, event_of(work)

    def combine(
        self,
        x: Tensor,
        handle: Handle,
        topk_weights: Tensor | None = None,
        bias: Tensor | tuple[Tensor, ...] | None = None,
        config: Config | None = None,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[Tensor, Tensor | None, EventOverlap]:
        """Collective. Sums a dispatch's rows over ranks into their tokens, unweighted.

        x [N, H] bf16 (fp16 and fp32 too), the rows of the dispatch that made `handle`; topk_weights
        float32 [N, K]; bias: one or two tensors [T, H] of x's dtype, on every rank or on none.
        Returns combined_x [T, H]: sums in fp32, by rank, then the bias, rounded once (without bias
        and among several domains: in each of them, and their sum); zeros (and bias) for a token
        that went nowhere. combined_topk_weights float32 [T, K] or None: of each slot the value of
        the rank that has its expert, which is the sum where slots of -1 hold 0, as dispatch left
        them. Where a caller fills those too, `Buffer.sums_topk_weights = True` on all ranks makes
        it the sum over all ranks that have the token, at twice the bytes once more. event.
        """
        streams = (previous_event, async_finish, allocate_on_comm_stream)
        is_plain = previous_event is None and not (async_finish or allocate_on_comm_stream)
        if is_plain and bias is None:
            made = self._sums_at_once(x, handle, topk_weights, config)
            if made is not None:
                return made
        with NoGradients(), Call("combine", self._pool, "combine") as call:
            call.is_for(None, None)
            runtime = self._runtime()
            check_handle(handle, Handle)
            plan = call.by(handle.plan)
            hidden = plan.exchange.hidden
            check_tensor("x", x, FLOATS, [plan.num_rows, hidden])
            biases = biases_of(bias, x.dtype, [plan.num_tokens, hidden])
            check(
                topk_weights is None or handle.has_topk,
                "topk_weights are given (the dispatch of this handle had no top-k)",
            )
            shape = [plan.num_rows, plan.topk]
            check_optional("topk_weights", topk_weights, torch.float32, shape)
            num_sms = self._num_sms(config)
            inputs = (x, topk_weights, *biases)
            with runtime.stream.call(x.device, inputs, *streams) as work:
                combined = bring_back(call, x, topk_weights, biases, num_sms=num_sms)
                if topk_weights is not None and self.sums_topk_weights:
                    combined = combined._replace(weights=slot_sums(call, topk_weights, num_sms))
                work.returns(*combined)
        return *combined, event_of(work)

    # Variants of `dispatch` and `combine` in `deep_ep`. Weft has one for all.
    internode_dispatch = dispatch_pcie = dispatch
    internode_combine = combine_pcie = combine

    @property
    def _pool(self) -> ExchangePool | None:
        return None if self.runtime is None else self.runtime.exchanges

    def reset_rdma_buffer(self) -> None:
        """Does nothing, for UCCL's `deep_ep`: Weft has no RDMA buffer that a caller must clear."""
        self._runtime()

    def connect_atomic_buffer(self, proxy: Any) -> None:
        """Does nothing, for UCCL's `deep_ep`: Weft has no proxies."""
        self._runtime()

    def _runtime(self) -> Runtime:
        if self.runtime is None:
            raise BadCall("the buffer was destroyed (make a new one)")
        return self.runtime

    def _comm_stream(self) -> CommStream:
        return self._runtime().stream

    def _num_sms(self, config: Config | None) -> int:
        num_sms = self.num_sms if config is None else config.num_sms
        check_even(num_sms)
        return num_sms

    def _timeout(self) -> float:
        """Returns any wait's limit."""
        return timeout_of()


def _meet(
    ranks: Group, store: dist.Store, name: str, mask: RankMask, seconds: float
) -> Group | None:
    """Returns the group of the ranks that reach the store within `seconds`, and masks the others;
    None if all come. PeerError on a late rank."""
    came = comers(store, name, ranks.rank, ranks.num_ranks, seconds)
    if len(came) == ranks.num_ranks:
        return None
    if ranks.rank not in came:
        text = f"rank {ranks.rank} was given up by ranks {list(came)}, which have waited for it"
        raise PeerError(f"{text} {seconds:g} s at the first call", "peer failed", ranks.rank)
    mask.come(came)
    return MpiGroup(StoreRanks(store, ranks.rank, came, "call"), came)


class _Routing(NamedTuple):
    """Destinations of the tokens of a new plan: by top-k, or without it by the layout."""

    topk_idx: Tensor | None
    topk_weights: Tensor | None
    num_experts: int
    layout: Layout | None = None
    num_worst_tokens: int = 0


def _counts(runtime: Runtime, handle: Handle, layout: Layout) -> list[int]:
    """Counts choices of this rank's experts. Waits for the GPU, like the plan."""
    if handle.has_topk:
        return handle.plan.rows_per_expert_list
    here = layout.num_tokens_per_expert.tolist()
    blocks = runtime.group.gather_numbers(*here)
    local = len(here) // len(blocks)
    first = runtime.group.rank * local
    return [sum(block[expert] for block in blocks) for expert in range(first, first + local)]


def _check_topk(
    topk_idx: Tensor | None,
    topk_weights: Tensor | None,
    num_tokens: int,
    num_worst_tokens: int,
) -> None:
    """Checks that top-k and weights come together."""
    check_least("num_worst_tokens", num_worst_tokens, 0)
    check(
        (topk_idx is None) == (topk_weights is None),
        "one of topk_idx and topk_weights is None (give both or neither)",
    )
    if topk_idx is None:
        worst = f"num_worst_tokens = {num_worst_tokens}"
        check(num_worst_tokens == 0, f"{worst} without top-k (it needs topk_idx)")
    else:
        check_routing(topk_idx, topk_weights, num_tokens)
