# SPDX-License-Identifier: Apache-2.0
# Made by python -m nanobind.stubgen -m weft._core
"""The C++ API of Weft."""

from collections.abc import Callable, Sequence

from torch import Tensor

__version__: str

class Group:
    """The ranks that exchange tokens."""

    @staticmethod
    def from_all_gather(rank: int, num_ranks: int, all_gather: Callable) -> Group:
        """Collective, over a function that swaps bytes between the ranks."""

    @staticmethod
    def rejoin(rank: int, invitation: str) -> Group:
        """In the place of a rank that was lost."""

    @property
    def rank(self) -> int: ...

    @property
    def num_ranks(self) -> int: ...

    @property
    def domains(self) -> list[list[int]]:
        """Ranks of each domain: those that can map each other's memory."""

    def all_gather(self, block: bytes) -> list:
        """Collective, for set-up: the blocks of all ranks, by rank."""

class Plan:
    """Everything derived from routing before a byte of payload moves."""

    @property
    def num_experts(self) -> int: ...

    @property
    def num_local_experts(self) -> int: ...

    @property
    def num_physical_experts(self) -> int: ...

    @property
    def num_replicas(self) -> int: ...

    @property
    def placement(self) -> list[int]: ...

    @property
    def routes_per_expert(self) -> list[int]: ...

    @property
    def route_ranks(self) -> list[int]:
        """The rank of each route, by token and choice, or -1."""

    @property
    def load(self) -> tuple:
        """
        Routes of the busiest rank, what it would have without replicas, and the mean rank's.
        """

    @property
    def num_tokens(self) -> int: ...

    @property
    def topk(self) -> int: ...

    @property
    def layout(self) -> str: ...

    @property
    def order(self) -> str: ...

    @property
    def pad_multiple(self) -> int: ...

    @property
    def from_map(self) -> bool: ...

    @property
    def num_rows(self) -> int: ...

    @property
    def required_rows(self) -> int: ...

    @property
    def may_have_slack(self) -> bool: ...

    @property
    def overflow(self) -> bool: ...

    @property
    def row_weight_cols(self) -> int: ...

    @property
    def rows_per_expert(self) -> list[int]: ...

    @property
    def padded_rows_per_expert(self) -> list[int]: ...

    def rows_on_host(self, counts: Tensor | None = None) -> Tensor:
        """int64 [El] on the CPU: a copy of rows_per_expert, in `counts` if that is given."""

    def padded_rows_on_host(self, counts: Tensor | None = None) -> Tensor:
        """
        int64 [El] on the CPU: a copy of padded_rows_per_expert, in `counts` if that is given.
        """

    @property
    def expert_begin(self) -> list[int]: ...

    @property
    def received_arrivals(self) -> list[int]: ...

    @property
    def sent_arrivals(self) -> list[int]: ...

    def wire_bytes(self, row_bytes: int) -> int: ...

    def returned_bytes(self, row_bytes: int) -> int: ...

    def crossing_bytes(self, row_bytes: int) -> int: ...

    def to_json(self) -> str: ...

    @staticmethod
    def from_json(text: str, name: str = 'text') -> Plan: ...

    def on_device(self, device: int) -> dict:
        """
        The bytes of the plan's numbers on GPU `device`; None each for a plan of the CPU.
        """

    def __eq__(self, arg: Plan, /) -> bool: ...

    def __repr__(self) -> str: ...

QUANTISE_GROUP: int = 128

DTYPES: dict[str, int]

class ExchangeConfig:
    """Names are those of weft.Exchange's arguments."""

    def __init__(self) -> None: ...

    @property
    def hidden(self) -> int: ...

    @hidden.setter
    def hidden(self, arg: int, /) -> None: ...

    @property
    def max_tokens(self) -> int: ...

    @max_tokens.setter
    def max_tokens(self, arg: int, /) -> None: ...

    @property
    def num_experts(self) -> int: ...

    @num_experts.setter
    def num_experts(self, arg: int, /) -> None: ...

    @property
    def max_topk(self) -> int: ...

    @max_topk.setter
    def max_topk(self, arg: int, /) -> None: ...

    @property
    def transport(self) -> str: ...

    @transport.setter
    def transport(self, arg: str, /) -> None: ...

    @property
    def num_threads(self) -> int: ...

    @num_threads.setter
    def num_threads(self, arg: int, /) -> None: ...

    @property
    def num_sms(self) -> int: ...

    @num_sms.setter
    def num_sms(self, arg: int, /) -> None: ...

    @property
    def copy_engines(self) -> bool: ...

    @copy_engines.setter
    def copy_engines(self, arg: bool, /) -> None: ...

    @gpu.setter
    def gpu(self, arg: int, /) -> None:
        """Of all tensors; not set: the CPU."""

    @timeout.setter
    def timeout(self, arg: float, /) -> None: ...

    @on_peer_loss.setter
    def on_peer_loss(self, arg: str, /) -> None: ...

    @on_loss.setter
    def on_loss(self, arg: Callable, /) -> None:
        """Called with what `Exchange.report` returns."""

class Options:
    """Of one call; names are those of weft.Exchange's arguments."""

    def __init__(self) -> None: ...

    @property
    def pad_multiple(self) -> int: ...

    @pad_multiple.setter
    def pad_multiple(self, arg: int, /) -> None: ...

    @property
    def expert_stride(self) -> int: ...

    @expert_stride.setter
    def expert_stride(self, arg: int, /) -> None: ...

    @property
    def row_budget(self) -> int | None: ...

    @row_budget.setter
    def row_budget(self, arg: int | None, /) -> None: ...

    @property
    def num_sms(self) -> int: ...

    @num_sms.setter
    def num_sms(self, arg: int, /) -> None: ...

    @property
    def copy_engines(self) -> bool: ...

    @copy_engines.setter
    def copy_engines(self, arg: bool, /) -> None: ...

    @property
    def receives_later(self) -> bool: ...

    @receives_later.setter
    def receives_later(self, arg: bool, /) -> None: ...

    @property
    def number(self) -> int: ...

    @number.setter
    def number(self, arg: int, /) -> None: ...

    @layout.setter
    def layout(self, arg: str, /) -> None: ...

    @overflow.setter
    def overflow(self, arg: str, /) -> None: ...

    @order.setter
    def order(self, arg: str, /) -> None: ...

    @balance.setter
    def balance(self, arg: tuple[int, int, int, Sequence[int]], /) -> None: ...

    @quantise.setter
    def quantise(self, arg: str, /) -> None: ...

    @scale_rule.setter
    def scale_rule(self, arg: str, /) -> None: ...

    @scale_layout.setter
    def scale_layout(self, arg: str, /) -> None: ...

    @property
    def blocks(self) -> bool: ...

    @blocks.setter
    def blocks(self, arg: bool, /) -> None: ...

    @property
    def ignores_unknown(self) -> bool: ...

    @ignores_unknown.setter
    def ignores_unknown(self, arg: bool, /) -> None: ...

    @scale.setter
    def scale(self, arg: str, /) -> None: ...

    @mark_wanted.setter
    def mark_wanted(self, arg: int, /) -> None: ...

    @mark_rows.setter
    def mark_rows(self, arg: int, /) -> None: ...

    @wire.setter
    def wire(self, arg: str, /) -> None: ...

    @stream.setter
    def stream(self, arg: int, /) -> None: ...

class Exchange:
    """Moves tokens to their experts and back."""

    def __init__(self, group: Group, config: ExchangeConfig) -> None: ...

    def plan(self, routing: tuple[Tensor | None, ...], options: Options) -> Plan: ...

    def dispatch(self, plan: Plan, sent: tuple[Tensor | None, ...], has_experts: bool, options: Options, pool: tuple[int, int] | None) -> tuple[Tensor | None, ...]: ...

    def plan_and_dispatch(self, routing: tuple[Tensor | None, ...], sent: tuple[Tensor | None, ...], has_experts: bool, options: Options, pool_of: Callable[[Exchange], tuple[int, int] | None] | None, given_rows: int | None, is_one_call: bool) -> tuple[Plan, BaseException | None, tuple[Tensor | None, ...] | None]: ...

    def skipped_dispatch(self, routing: tuple[Tensor | None, ...], sent: tuple[Tensor | None, ...], has_experts: bool, options: Options, given_rows: int) -> tuple[int, tuple[Tensor | None, ...]]:
        """
        Local: how many calls plan_and_dispatch of the same arguments makes in one, and what it returns at last, of whatever contents.
        """

    def dispatch_blocks(self, tensors: tuple[object, ...], num_max: int, num_experts: int, num_ranks: int, formats: tuple[object, ...], stream: int, pool_of: Callable[[Exchange], tuple[int, int] | None] | None, is_one_call: bool, receives_later: bool) -> tuple[Plan, BaseException | None, tuple[Tensor | None, ...]] | None:
        """
        check_block_dispatch of the same arguments, and plan_and_dispatch by it; None if the exchange has other sizes, or the statistics of counts have gaps.
        """

    def receive(self, plan: Plan, options: Options) -> None: ...

    def is_open(self, plan: Plan) -> bool: ...

    def combine(self, plan: Plan, brought: tuple[Tensor | None, ...], out: Tensor | None, options: Options) -> tuple[Tensor, Tensor | None]: ...

    def combine_blocks(self, tensors: tuple[object, ...], plan: Plan, stride: int, hidden: int, stream: int, receives_later: bool) -> Tensor | None:
        """
        check_block_combine of the same arguments, and combine by it: the tokens; None if `out` has gaps.
        """

    def refuse(self, verb: str, reason: str, options: Options) -> None: ...

    def dispatch_rows(self, tensors: tuple[object, ...], layout: tuple[object, ...] | int, alignment: int, stream: int, num_sms: int, pool_of: Callable[[Exchange], tuple[int, int] | None] | None) -> tuple[Plan, BaseException | None, tuple[Tensor | None, ...] | None, list[int] | Tensor, tuple[Tensor | None, ...]] | None:
        """
        dispatch of deep_ep.Buffer by top-k: what it asks of x, topk_idx and topk_weights, and of a layout or the number of experts; what plan_and_dispatch returns; the counts of experts; and what `dispatch` has still to send if there is no room yet. None where it is more than this.
        """

    def dispatch_routes(self, tensors: tuple[object, ...], num_experts: int | None, pad_multiple: int, stream: int, num_sms: int, pool_of: Callable[[Exchange], tuple[int, int] | None] | None) -> tuple[Plan, BaseException | None, tuple[Tensor | None, ...] | None, None, tuple[Tensor | None, ...]] | None:
        """
        The same of dispatch_with_permute of deep_ep.HybridEPBuffer; tensors: hidden, topk_idx, topk_weights, routing_map, probs. The counts are None.
        """

    def dispatch_rows_again(self, x: object, plan: Plan, stream: int, num_sms: int, pool: tuple[int, int] | None) -> Tensor | tuple[Tensor, Tensor] | None:
        """
        dispatch of deep_ep.Buffer by the plan of a handle: rows, or FP8 and scales. None where it is more.
        """

    def combine_rows(self, x: object, weights: object, plan: Plan, stream: int, num_sms: int) -> tuple[Tensor, Tensor | None] | None:
        """
        combine of deep_ep.Buffer without a bias, or combine_with_unpermute: the tokens and the weights. None where it is more.
        """

    def check(self) -> None: ...

    def is_outgrown(self) -> bool: ...

    def release_pooled(self) -> None: ...

    def report(self) -> tuple[int, list[int], list[int], list[int]]:
        """What CallReport of weft/exchange_state.py has."""

    def mask(self, ranks: Sequence[int]) -> None: ...

    def invitation(self) -> str: ...

    def readmit(self, ranks: Sequence[int]) -> None: ...

    def grow(self, max_tokens: int, max_topk: int) -> bool: ...

    def add_waits(self, sums: Tensor, times: int, stream: int) -> None: ...

    def stats(self) -> dict: ...

    def footprint(self) -> dict: ...

    @property
    def transport(self) -> str: ...

    @property
    def max_tokens(self) -> int: ...

    @property
    def max_topk(self) -> int: ...

def pair_order(forward_layers: int | None, backward_layers: int | None, early_attention_release: bool) -> list[tuple[bool, str, str, int]]:
    """
    The steps of two micro-batches: is_backward, action, node, layer (-1: of no layer).
    """

def pipeline_order(rank: int, num_ranks: int, num_chunks: int, num_micro_batches: int) -> list[tuple[tuple[int, int] | None, tuple[int, int] | None]]:
    """
    Pairs of a forward and a backward: micro-batch and chunk of each, or None.
    """

NODE_LANES: dict[str, str]

def overlapped_sms(num_gpu_sms: int, is_copied_dispatch: bool) -> int:
    """Multiprocessors of a call that shares its GPU with computation."""

def overlapped_copies(hidden: int, num_ranks: int) -> bool:
    """
    Whether copy engines carry the rows of a call that shares its GPU with computation.
    """

def call_timeout(usual: float) -> float:
    """
    Seconds of every wait where a program says none: WEFT_CALL_TIMEOUT_S, else `usual`.
    """

def wire_row_bytes(wire: str, hidden: int) -> int:
    """The bytes of a bf16 row, or a sum of some, on its way in a combine."""

BALANCE_FINENESS: int = 1024

def replicas_for(counts: Sequence[int], num_ranks: int, replicas: int, min_rows: int) -> list[int]:
    """
    [num_ranks * replicas] the expert of each replica for counts [experts], -1: none.
    """

def check_replicas(placement: Sequence[int], num_ranks: int, num_experts: int, replicas: int) -> None:
    """Raises InvalidArgument unless the replicas may lie there."""

def count_routing_file(path: str, layer: int | None) -> list[int]:
    """[experts] routes to each in a routing file, of one layer or of all."""

MAX_TOPK: int = 32

def check_routing(topk_idx: object, topk_weights: object = None, num_tokens: int | None = None) -> int:
    """
    topk_idx holds integers [T, K] with K from 1 to 32, and the weights, if they are given, have its shape. num_tokens: the rows of x, where they are known. Returns K.
    """

def check_experts(num_experts: int, num_ranks: int) -> None: ...

def count_routing(topk_idx: Tensor, num_experts: int, num_ranks: int, host_of_rank: Tensor | None, num_hosts: int, stream: int) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
    """
    Local: what weft::count_routing writes: per_rank int32 [R], per_host int32 [hosts] or None without host_of_rank int64 [R], per_expert int32 [E], is_token_in_rank bool [T, R].
    """

def dispatch_layout(topk_idx: object, num_experts: int, num_ranks: int, stream: int) -> tuple[Tensor, None, Tensor, Tensor]:
    """
    Local: count_routing for the ranks of one host, after check_routing and check_experts.
    """

def spread_routing(topk_idx: Tensor, weights: Tensor | None, num_experts: int, stream: int) -> tuple[Tensor, Tensor | None]:
    """
    Local: what weft::spread_routing writes: the map bool [T, E], and the weights fp32 [T, E] or None.
    """

def with_standard_floats(function: Callable, *args, **kwargs) -> object:
    """
    function(*args, **kwargs) in this thread, which rounds to nearest and keeps subnormal numbers meanwhile.
    """

def check_layout(layout: tuple[object, ...], num_tokens: int, num_ranks: int, num_hosts: int) -> int:
    """
    The layout is that of get_dispatch_layout, given back. Returns the number of experts.
    """

def check_block_dispatch(tensors: tuple[object, ...], num_max: int, num_experts: int, num_ranks: int, formats: tuple[object, ...]) -> tuple[int, int, Options]:
    """
    Of low_latency_dispatch; tensors: x, topk_idx, topk_weights, statistics of counts and of waits, x_global_scale; formats: use_fp8, round_scale, use_ue8m0, use_nvfp4, use_mxfp8, use_ue8m0_for_sf. Returns the hidden size, K, and the options of Exchange.dispatch_blocks.
    """

def check_block_combine(tensors: tuple[object, ...], plan: Plan, stride: int, hidden: int) -> None:
    """
    Of low_latency_combine; tensors: x, topk_idx, topk_weights, out, statistics of waits.
    """

MOST_REPLICAS: int = 16

class Balance:
    """Which experts have replicas, and how many routes go there."""

    def replicas(self, out: object) -> None:
        """
        Fills out, int32 [ranks, replicas]: the expert of each replica, -1 for none.
        """

    def quotas(self, out: object) -> None:
        """
        Fills out, int64 [ranks, physical experts]: routes by source rank.
        """

    def assign(self, source: int, experts: object, out: object) -> None:
        """
        Fills out, int32 like experts: the physical expert of each route of a source.
        """

def plan_balance(counts: object, num_ranks: int, replicas: int, min_rows: int, domain_of: Sequence[int], block_rows: int, replica_rows: int) -> Balance:
    """
    counts: int32 [ranks, experts] on a CPU. domain_of: of each rank, or empty.
    """

def suits(tensor: object, dtypes: int, shape: Sequence[int | str]) -> bool:
    """
    Whether it is a tensor of these sizes (of any, where there is a name) and of one of these dtypes (bits by torch's numbers), on a CPU or a GPU. False also where only Python can tell.
    """

def give_segments(exchange: Exchange | None) -> None:
    """To this thread; None: nobody does."""

def num_begun() -> int:
    """Calls of this thread that all ranks make."""

def num_told() -> int:
    """The same, and those that this thread has refused in their place."""

def suits(tensor: object, dtypes: int, shape: Sequence[int | str]) -> bool:
    """
    Whether it is a tensor of these sizes (of any, where there is a name) and of one of these dtypes (bits by torch's numbers), on a CPU or a GPU. False also where only Python can tell.
    """

def give_segments(exchange: Exchange | None) -> None:
    """The exchange that gives this thread's next segments; None: nobody."""

def run_program(words: list[str]) -> int:
    """The program `weft` with this command line, its name first; returns the exit code."""
