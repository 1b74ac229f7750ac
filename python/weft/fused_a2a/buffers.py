# SPDX-License-Identifier: Apache-2.0
"""The buffers behind the fused functions: made at the first call, and replaced when too small.

Each family and group of ranks has a buffer. The buffer used last is in the family's state variable
in `weft.fused_a2a`; other groups' are parked. So layers on different groups can take turns without
building buffers, or destroying one, which a whole group may have to do together.
"""

import atexit
import contextlib
import functools
import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from weft import __version__
from weft import fused_a2a as state
from weft.compat.deep_ep.runtime import Call, ExchangePool

_MOST_RANKS_OF_A_NODE = 8
_STATE = ("_buffer", "_uccl_buffer", "_hybrid_ep_buffer", "_elastic_buffer", "_nccl_ep_ranks")

lock = threading.RLock()  # forward and backward run on different threads
parked: dict[str, list[Any]] = {}  # by the name of the state variable
# Buffers of the last calls, by the same name, and what each is known to suffice for.
_enough: dict[str, tuple[Callable[[], Any], tuple[Any, ...]]] = {}
_NOTHING: tuple[Callable[[], Any], tuple[Any, ...]] = (lambda: None, ())


def contiguous(value: Any) -> Any:
    """Makes a tensor contiguous; passes on anything else, for the buffer to refuse."""
    if not isinstance(value, torch.Tensor) or value.is_contiguous():
        return value
    return value.contiguous()


def refusing(name: str, buffer: Any, **options: Any) -> Call:
    """Returns a context in which a failure before a dispatch of `buffer` makes other ranks raise,
    too. options: of the other ranks' plan."""
    return Call(name, pool_of(buffer), **options)


def pool_of(buffer: Any) -> ExchangePool | None:
    """Returns the exchanges of a live Weft buffer, else None."""
    runtime = getattr(buffer, "runtime", None)
    pool = getattr(runtime, "exchanges", runtime)
    return pool if isinstance(pool, ExchangePool) else None


def get_hidden_bytes(x: torch.Tensor) -> int:
    """Returns the bytes of a row of `x` [T, H], an element counted as two at least.

    A one-byte dtype counts as two because its rows come back two bytes wide.
    """
    return x.size(1) * max(x.itemsize, 2)


def get_buffer(group: dist.ProcessGroup, hidden_bytes: int) -> Any:
    """Returns the `Buffer` of `group` for such rows; makes or grows it (collective then)."""
    has_nvshmem = _is_nvshmem_available()
    if not has_nvshmem and group.size() > _MOST_RANKS_OF_A_NODE:  # of a Buffer put in Weft's place
        raise RuntimeError(
            "DeepEP was compiled without NVSHMEM support (SM90 features disabled), but expert "
            f"parallelism group size {group.size()} > {_MOST_RANKS_OF_A_NODE} requires internode "
            "RDMA communication."
        )
    options = {"with_rdma": has_nvshmem, "explicitly_destroy": True}
    return _row_buffer("_buffer", state.Buffer, group, hidden_bytes, **options)


def get_uccl_buffer(group: dist.ProcessGroup, hidden_bytes: int) -> Any:
    """Returns a `UCCLBuffer`, like `get_buffer`."""
    return _row_buffer("_uccl_buffer", state.UCCLBuffer, group, hidden_bytes)


def get_elastic_buffer(
    group: dist.ProcessGroup, num_max_tokens_per_rank: int, hidden: int, num_topk: int
) -> Any:
    """Returns `group`'s `ElasticBuffer` for these sizes; makes or grows it (collective then).

    `num_max_tokens_per_rank` must be the same on every rank.
    """
    sizes = {"hidden": hidden, "num_topk": num_topk}
    kind, tokens = state.ElasticBuffer, num_max_tokens_per_rank
    hint = kind.get_buffer_size_hint(group, tokens, **sizes)
    build = functools.partial(kind, group, **sizes)
    return _cached("_elastic_buffer", group, build, num_max_tokens_per_rank=tokens, num_bytes=hint)


def free_buffer() -> None:
    """Destroys what `get_buffer` made; without effect when there is nothing.

    Call it on every rank before the process group goes. Errors of the buffer are swallowed, since
    this runs while a program shuts down.
    """
    for buffer in take_all("_buffer"):
        destroy(buffer)


def init_hybrid_ep_buffer(
    group: dist.ProcessGroup,
    hidden_dim: int,
    seq_len: int | None = None,
    num_local_experts: int | None = None,
    num_sms_dispatch_api: int | None = None,
    num_sms_combine_api: int | None = None,
    fp8_dispatch: bool = False,
    num_sms_preprocessing_api: int | None = None,
    num_blocks_permute: int | None = None,
    num_blocks_unpermute: int | None = None,
    *,
    num_tokens: int | None = None,
) -> None:
    """Makes a new `HybridEPBuffer` for `group` and has `hybrid_ep_dispatch` use it. Collective.

    `seq_len` or, by its other name, `num_tokens` is the number of tokens a rank starts with room
    for; it may grow later. Counts of SMs and blocks that are None are left to the buffer.
    `fp8_dispatch` must be False (AssertionError).
    """
    assert not fp8_dispatch, "HybridEP dispatcher does not support fp8 dispatch now"
    if (seq_len is None) == (num_tokens is None):
        raise TypeError(
            f"init_hybrid_ep_buffer: seq_len={seq_len} and num_tokens={num_tokens} "
            "(give one of the two)"
        )
    if num_local_experts is None:
        raise TypeError("init_hybrid_ep_buffer: no num_local_experts (it has no default)")
    tokens = seq_len if seq_len is not None else num_tokens
    with lock:
        take("_hybrid_ep_buffer", group)  # dropped: the new one replaces it
        state._hybrid_ep_buffer = _new_hybrid_ep_buffer(
            group,
            hidden_dim,
            tokens,
            num_local_experts,
            num_sms_dispatch_api=num_sms_dispatch_api,
            num_sms_combine_api=num_sms_combine_api,
            num_blocks_permute=num_blocks_permute,
            num_blocks_unpermute=num_blocks_unpermute,
            num_sms_preprocessing_api=num_sms_preprocessing_api,
        )


def get_hybrid_ep_buffer(
    group: dist.ProcessGroup, x: torch.Tensor, num_local_experts: int, options: dict[str, Any]
) -> Any:
    """Returns `group`'s `HybridEPBuffer`; if there is none, makes it for `x` [T, H].

    Other sizes need no other buffer, as buffers grow by themselves.
    """

    def build() -> Any:
        is_rows = isinstance(x, torch.Tensor) and x.dim() == 2  # the buffer's call refuses others
        num_tokens, hidden_dim = x.shape if is_rows else (1, 1)
        return _new_hybrid_ep_buffer(group, hidden_dim, num_tokens, num_local_experts, **options)

    return _cached("_hybrid_ep_buffer", group, build)


def current_hybrid_ep_buffer() -> Any:
    """Returns the last `HybridEPBuffer`; RuntimeError without one."""
    buffer = state._hybrid_ep_buffer
    if buffer is None:
        raise RuntimeError("hybrid_ep_combine: no buffer (hybrid_ep_dispatch makes it)")
    return buffer


def reset_hybrid_ep_buffer() -> None:
    """Forgets buffers of `init_hybrid_ep_buffer` and `hybrid_ep_dispatch`, and their published
    capacity."""
    take_all("_hybrid_ep_buffer")
    state._hybrid_ep_runtime_signature = None
    state._hybrid_ep_initialized_capacity = 0


def get_hybrid_ep_initialized_capacity(signature: tuple[Any, ...]) -> int:
    """Returns the most tokens that a caller has run HybridEP for beforehand, or 0.

    signature: of the settings. Raises RuntimeError if the capacity was published for others.
    """
    if state._hybrid_ep_runtime_signature not in (None, signature):
        raise RuntimeError(
            "HybridEP's process-global buffer is already active with an incompatible signature"
        )
    return state._hybrid_ep_initialized_capacity


def publish_hybrid_ep_initialized_capacity(signature: tuple[Any, ...], capacity: int) -> None:
    """Notes that a caller has run HybridEP with these settings for so many tokens; the most counts.

    Raises RuntimeError as `get_hybrid_ep_initialized_capacity` does.
    """
    before = get_hybrid_ep_initialized_capacity(signature)
    state._hybrid_ep_runtime_signature = signature
    state._hybrid_ep_initialized_capacity = max(before, capacity)


# HybridEP compiles its kernels when they are first used, and NeMo Automodel keeps them in a folder
# that all processes share. Weft compiles nothing, so there is nothing to keep.


def store_hybrid_ep_jit_cache() -> int:
    """Returns how many kernels were stored: 0."""
    return 0


def _warm_start_hybrid_ep_jit() -> bool:
    """Returns whether stored kernels were loaded: False."""
    return False


def _hybrid_ep_jit_dirs() -> tuple[None, None]:
    """Returns the shared and the own folder of compiled kernels: None."""
    return None, None


def _deep_ep_version() -> str:
    """Returns the version in DeepEP's place."""
    return __version__


def _is_nvshmem_available() -> bool:
    """Returns whether buffers may span hosts (asked once)."""
    if state._nvshmem_available is None:
        state._nvshmem_available = state.Buffer.is_sm90_compiled()
    return state._nvshmem_available


def _new_hybrid_ep_buffer(
    group: Any, hidden_dim: int, num_tokens: int, num_local_experts: int, **options: Any
) -> Any:
    given = {name: value for name, value in options.items() if value is not None}
    return state.HybridEPBuffer(
        group=group,
        hidden_dim=hidden_dim,
        max_num_of_tokens_per_rank=num_tokens,
        num_local_experts=num_local_experts,
        use_fp8=False,
        **given,
    )


def _row_buffer(
    name: str,
    kind: Any,
    group: Any,
    hidden_bytes: int,
    with_rdma: bool = True,
    **options: Any,
) -> Any:
    """Returns a buffer of class `kind` with the bytes that rows need, to ranks of one host and to
    others. Asks for the sizes only if the last call's arguments differ."""
    wanted = (kind, getattr(kind, "num_sms", None), hidden_bytes, with_rdma)
    current, (last, enough) = getattr(state, name), _enough.get(name, _NOTHING)
    if current is not None and last() is current and enough == wanted and current.group is group:
        return current
    size = group.size()
    configs = (kind.get_dispatch_config(size), kind.get_combine_config(size))
    nvl = max(config.get_nvl_buffer_size_hint(hidden_bytes, size) for config in configs)
    rdma = 0
    if with_rdma:
        rdma = max(config.get_rdma_buffer_size_hint(hidden_bytes, size) for config in configs)

    def build(num_nvl_bytes: int, num_rdma_bytes: int) -> Any:
        return kind(group, num_nvl_bytes, num_rdma_bytes, **options)

    buffer = _cached(name, group, build, num_nvl_bytes=nvl, num_rdma_bytes=rdma)
    if pool_of(buffer) is not None:
        _enough[name] = weakref.ref(buffer), wanted
    return buffer


def _cached(name: str, group: Any, build: Callable[..., Any], **needs: int) -> Any:
    """Returns `group`'s buffer, now the current one. needs: its least sizes, by attribute.

    `build(**needs)` makes a buffer, or replaces one that is too small; no size shrinks then, or two
    kinds of layers would replace it in turns. Every rank of the group must ask for the same sizes,
    since both are collective.

    A new buffer of Weft's goes on with the old one's exchanges. So a rank that asks for other sizes
    by mistake still reaches the others, who hear of it.
    """
    current = getattr(state, name)
    if not needs and current is not None and getattr(current, "group", None) is group:
        return current  # as it mostly is
    with lock:
        buffer = take(name, group)
        have = {} if buffer is None else {size: getattr(buffer, size) for size in needs}
        if have.get("num_rdma_bytes") == 0:
            # Such a buffer needs none, whatever the hint: its group is on one host.
            have["num_rdma_bytes"] = needs["num_rdma_bytes"]
        if buffer is None or any(have[size] < least for size, least in needs.items()):
            kept = None if pool_of(buffer) is None else buffer.runtime
            if getattr(buffer, "explicitly_destroy", False):
                if kept is not None:
                    buffer.runtime = None
                destroy(buffer)
            buffer = build(**{size: max(least, have.get(size, 0)) for size, least in needs.items()})
            if kept is not None and pool_of(buffer) is not None:
                buffer.runtime = kept
        setattr(state, name, buffer)
        return buffer


def take(name: str, group: Any) -> Any:
    """Takes the buffer of `group` out of the cache, None if there is none; then none is current."""
    with lock:
        found, others = None, []
        for buffer in take_all(name):
            theirs = getattr(buffer, "group", group)  # a stand-in without a group serves any
            ranks = members(theirs)
            is_same = theirs is group or (ranks is not None and ranks == members(group))
            if found is None and is_same:
                found = buffer
            elif ranks is not None:
                others.append(buffer)  # the rest is of groups that torch has destroyed
        parked[name] = others
        return found


def take_all(name: str) -> list[Any]:
    """Empties the cache of a family and returns what was in it, the current buffer first."""
    with lock:
        current = getattr(state, name)
        setattr(state, name, None)
        return ([] if current is None else [current]) + parked.pop(name, [])


@atexit.register
def _forget() -> None:
    """Drops all buffers, and with them process groups and their threads.

    A thread that frees a tensor after the interpreter's end aborts the process.
    """
    for name in _STATE:
        take_all(name)


def members(group: Any) -> list[int] | None:
    """Returns a process group's ranks in order; None if torch does not know the group."""
    try:
        return dist.get_process_group_ranks(group)
    except (KeyError, ValueError, RuntimeError, AttributeError):
        return None


def destroy(buffer: Any) -> None:
    """Destroys a buffer and swallows its errors, as the buffer is given up anyway."""
    with contextlib.suppress(Exception):
        buffer.destroy()
