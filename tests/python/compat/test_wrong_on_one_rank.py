# SPDX-License-Identifier: Apache-2.0
"""Whatever is wrong on one rank only, all ranks raise: the others with its reason and that rank, as
an AssertionError, too.

Each case makes a call of two ranks of which the last one passes something wrong, at first when the
buffer has not exchanged anything yet and again when it has. A right call follows: nobody waits, and
no call is taken for another.
"""

import re

import pytest
import torch
from buffer_cases import Case, dispatch

import weft
from weft import _core, fused_a2a, outputs
from weft.compat.deep_ep import Buffer, ElasticBuffer, EPBuffer, HybridEPBuffer
from weft.compat.uccl import Buffer as UCCLBuffer
from weft.errors import BadCall
from weft.fused_a2a import rank_rows

HIDDEN, NUM_MAX, TOPK = 128, 16, 2
LB = ("redundant_expert_weights", "expert_weights", "redundancy_mapping")


class Calls:
    """The calls of a rank by name: a function, and arguments that are right."""

    def __init__(self, rank, num_ranks, group, hidden=HIDDEN):
        self.group = group
        self.case = Case(rank, group, 2 * num_ranks, TOPK, (5, 4), hidden=hidden, distinct=True)
        self.local = 2
        self.map = torch.zeros(len(self.case.x), self.case.num_experts, dtype=torch.bool)
        self.map[:, 1] = self.map[:, -1] = True
        self.probs = self.map.float()
        self.fp8 = torch.zeros(len(self.case.x), HIDDEN, dtype=torch.uint8)
        self.scales = torch.ones(len(self.case.x), 1)

    def normal(self, kind=Buffer):
        case, buffer = self.case, kind(self.group)
        layout = buffer.get_dispatch_layout(case.idx, case.num_experts)
        names = "num_tokens_per_rank num_tokens_per_rdma_rank num_tokens_per_expert"
        given = dict(zip([*names.split(), "is_token_in_rank"], layout))
        return buffer, {"x": case.x, "topk_idx": case.idx, "topk_weights": case.weights, **given}

    def dispatch(self):
        buffer, given = self.normal()
        return buffer.dispatch, given

    def dispatch_fp8(self):
        buffer, given = self.normal()
        call = lambda x, scales, **rest: buffer.dispatch((x, scales), **rest)  # noqa: E731
        return call, {**given, "x": self.fp8, "scales": self.scales}

    def uccl_dispatch(self):
        buffer, given = self.normal(UCCLBuffer)
        return buffer.dispatch, given

    def dispatch_again(self):
        buffer, _ = self.normal()
        return buffer.dispatch, {"x": self.case.x, "handle": dispatch(buffer, self.case)[4]}

    def combine(self):
        buffer, _ = self.normal()
        rows, _, weights, _, handle, _ = dispatch(buffer, self.case)
        given = {"x": rows, "handle": handle, "topk_weights": weights, "bias": self.case.x}
        return buffer.combine, given

    def combine_plain(self):
        """A combine like most: one call of the core."""
        combine, given = self.combine()
        del given["bias"]
        return combine, given

    def low_latency(self):
        case = self.case
        given = {
            "x": case.x,
            "topk_idx": case.idx,
            "num_max_dispatch_tokens_per_rank": NUM_MAX,
            "num_experts": case.num_experts,
            "topk_weights": case.weights,
            "cumulative_local_expert_recv_stats": torch.zeros(2, dtype=torch.int32),
            "dispatch_wait_recv_cost_stats": torch.zeros(2, dtype=torch.int64),
        }
        return Buffer(self.group, low_latency_mode=True), given

    def low_latency_dispatch(self):
        buffer, given = self.low_latency()
        return buffer.low_latency_dispatch, given

    def low_latency_plain(self):
        """A dispatch like most: one call of the core, once there is an exchange."""
        buffer, given = self.low_latency()
        del given["topk_weights"], given["dispatch_wait_recv_cost_stats"]
        return buffer.low_latency_dispatch, given

    def low_latency_by_position(self):
        """A dispatch with its arguments in the order of the hybrid-ep branch."""
        buffer, given = self.low_latency()
        del given["dispatch_wait_recv_cost_stats"]
        return lambda **given: buffer.low_latency_dispatch(*given.values()), given

    def low_latency_combine(self):
        buffer, given = self.low_latency()
        rows, _, _, _, handle, *_ = buffer.low_latency_dispatch(**given, use_fp8=False)
        case = self.case
        given = {"x": rows, "topk_idx": case.idx, "topk_weights": case.weights, "handle": handle}
        return buffer.low_latency_combine, {**given, "out": torch.empty_like(case.x)}

    def elastic(self, kind=ElasticBuffer):
        case = self.case
        given = {"x": case.x, "topk_idx": case.idx, "topk_weights": case.weights}
        given["num_experts"] = case.num_experts
        given["cumulative_local_expert_recv_stats"] = torch.zeros(2, dtype=torch.int32)
        sizes = {"num_max_tokens_per_rank": NUM_MAX, "hidden": HIDDEN}
        return kind(self.group, **sizes), given

    def elastic_dispatch(self, kind=ElasticBuffer):
        buffer, given = self.elastic(kind)
        return buffer.dispatch, given

    def elastic_again(self, kind=ElasticBuffer):
        buffer, given = self.elastic(kind)
        return buffer.dispatch, {"x": self.case.x, "handle": buffer.dispatch(**given)[3]}

    def elastic_combine(self, kind=ElasticBuffer):
        buffer, given = self.elastic(kind)
        rows, _, weights, handle, _ = buffer.dispatch(**given)
        given = {"x": rows, "handle": handle, "topk_weights": weights, "bias": self.case.x}
        return buffer.combine, given

    def ep_dispatch(self):
        return self.elastic_dispatch(EPBuffer)

    def ep_again(self):
        return self.elastic_again(EPBuffer)

    def ep_combine(self):
        return self.elastic_combine(EPBuffer)

    def ep_weights(self):
        buffer, _ = self.elastic(EPBuffer)
        mapping = torch.tensor([[2], [0]], dtype=torch.int32)
        slots, experts = torch.zeros(1, HIDDEN), torch.ones(2, HIDDEN)
        return buffer.lb_prefetch_weights, dict(zip(LB, (slots, experts, mapping)))

    def hybrid(self):
        buffer = HybridEPBuffer(self.group, HIDDEN, NUM_MAX, self.local)
        return buffer, {"hidden": self.case.x, "routing_map": self.map, "probs": self.probs}

    def hybrid_buffer(self):
        given = {"hidden_dim": HIDDEN, "num_local_experts": 2, "max_num_of_tokens_per_rank": 8}
        return HybridEPBuffer, {"group": self.group, **given}

    def hybrid_permute(self):
        buffer, given = self.hybrid()
        return buffer.dispatch_with_permute, {**given, "pad_multiple": 4}

    def hybrid_indices(self):
        buffer, given = self.hybrid()
        case = self.case
        given = {"hidden": case.x, "topk_idx": case.idx, "topk_weights": case.weights}
        return buffer.dispatch_with_permute, given

    def hybrid_unpermute(self):
        buffer, given = self.hybrid()
        rows, probs, _, _, handle = buffer.dispatch_with_permute(**given)
        return buffer.combine_with_unpermute, {"hidden": rows, "probs": probs, "handle": handle}

    def hybrid_dispatch(self):
        buffer, given = self.hybrid()
        return buffer.dispatch, given

    def hybrid_again(self):
        buffer, given = self.hybrid()
        return buffer.dispatch, {**given, "handle": buffer.dispatch(**given)[3]}

    def hybrid_combine(self):
        buffer, given = self.hybrid()
        rows, probs, _, handle = buffer.dispatch(**given)
        return buffer.combine, {"hidden": rows, "probs": probs, "handle": handle}

    def fused(self):
        case = self.case
        given = {"x": case.x, "token_indices": case.idx, "token_probs": case.weights}
        return {**given, "num_experts": case.num_experts, "group": self.group}

    def fused_dispatch(self):
        return fused_a2a.fused_dispatch, self.fused()

    def uccl_fused_dispatch(self):
        return fused_a2a.uccl_fused_dispatch, self.fused()

    def fused_combine(self):
        rows, *_, handle = fused_a2a.fused_dispatch(**self.fused())
        return fused_a2a.fused_combine, {"x": rows, "group": self.group, "handle": handle}

    def fused_by_expert(self):
        return rank_rows.DEEPEP.dispatch_by_expert, self.fused()

    def deepepv2_dispatch(self):
        buffer, _ = self.elastic()
        given = {**self.fused(), "buffer": buffer, "num_max_tokens_per_rank": NUM_MAX}
        del given["group"]
        return fused_a2a.deepepv2_dispatch, given

    def deepepv2_combine(self):
        call, given = self.deepepv2_dispatch()
        rows, *_, handle = call(**given)
        return fused_a2a.deepepv2_combine, {"buffer": given["buffer"], "x": rows, "handle": handle}

    def hybrid_ep_dispatch(self):
        given = {"x": self.case.x, "routing_map": self.map, "probs": self.probs}
        return fused_a2a.hybrid_ep_dispatch, {**given, "group": self.group, "num_local_experts": 2}

    def hybrid_ep_combine(self):
        call, given = self.hybrid_ep_dispatch()
        rows, *_, handle = call(**given)
        return fused_a2a.hybrid_ep_combine, {"x": rows, "handle": handle}


SPOILT = {
    "list": lambda value: value.tolist(),
    "flat": lambda value: value.flatten(),
    "deep": lambda value: value.unsqueeze(0),
    "meta": lambda value: value.to("meta"),
    "double": lambda value: value.double(),
    "long row": lambda value: torch.cat([value, value[:1]]),
    "narrow": lambda value: value[:, :3].contiguous(),
    "wide": lambda value: torch.cat([value, value], dim=1),
    "half": lambda value: value[:, : value.size(1) // 2].contiguous(),
    "none": lambda value: None,
    "zero": lambda value: 0,
    "word": lambda value: "word",
    "true": lambda value: True,
}
X = [
    ("x", "list", "list|parts"),
    ("x", "flat", "shape"),
    ("x", "deep", "shape"),
    ("x", "meta", "meta"),
]
HIDDEN_ROWS = [("hidden", how, reason) for _, how, reason in X]
IDX = [
    ("topk_idx", "list", "topk_idx is a list"),
    ("topk_idx", "flat", "topk_idx has shape"),
    ("topk_idx", "double", "topk_idx has dtype torch.float64"),
    ("topk_idx", "long row", "topk_idx has shape"),
    ("topk_idx", "meta", "meta"),
]
WEIGHTS = [
    ("topk_weights", "list", "topk_weights is a list"),
    ("topk_weights", "double", "topk_weights has dtype torch.float64"),
    ("topk_weights", "flat", "topk_weights has shape"),
    ("topk_weights", "meta", "meta"),
]
FUSED = [
    (
        name.replace("topk_", "token_").replace("weights", "probs").replace("idx", "indices"),
        how,
        reason,
    )
    for name, how, reason in X + IDX + WEIGHTS
]
NORMAL = [
    *X,
    ("x", "narrow", "rows of 6 bytes"),
    ("x", "half", "hidden( size, num_experts\\))? = "),
    *IDX,
    *WEIGHTS,
    ("topk_weights", "none", "give both or neither"),
    ("num_tokens_per_rank", "none", "num_tokens_per_rank is None"),
    ("num_tokens_per_expert", "list", "num_tokens_per_expert is a list"),
    ("num_tokens_per_expert", "none", "num_tokens_per_expert is None"),
    ("is_token_in_rank", "long row", "is_token_in_rank has shape"),
    ("is_token_in_rank", "double", "is_token_in_rank has dtype"),
    ("expert_alignment", "zero", "expert_alignment = 0"),
    ("allocate_on_comm_stream", "true", "allocate_on_comm_stream"),
]
HANDLE = ("handle", "word", "handle is a str")
ELASTIC_COMBINE = [*X, HANDLE, ("bias", "flat", "bias has shape"), ("bias", "list", "bias")]
WRONG = {
    "dispatch": [*NORMAL, ("num_worst_tokens", "word", "word|str")],
    "dispatch_fp8": [
        ("scales", "flat", "scales has shape"),
        ("scales", "long row", "scales has shape"),
        ("scales", "list", "scales is a list"),
        ("scales", "double", "scales has dtype torch.float64"),
        ("scales", "meta", "meta"),
    ],
    "uccl_dispatch": [*X, *IDX],
    "dispatch_again": [
        *X,
        ("x", "long row", "the handle's"),
        ("x", "half", "the handle's"),
        HANDLE,
    ],
    "combine": [
        *X,
        HANDLE,
        ("x", "long row", "x has shape"),
        ("x", "double", "x has dtype"),
        *WEIGHTS,
        ("bias", "list", "bias"),
        ("bias", "flat", "bias has shape"),
        ("bias", "double", "bias has dtype"),
    ],
    "combine_plain": [
        *X,
        HANDLE,
        ("x", "long row", "x has shape"),
        ("x", "double", "x has dtype"),
        *WEIGHTS,
    ],
    "low_latency_dispatch": [
        *X,
        ("x", "double", "x has dtype"),
        ("x", "narrow", "x has 3 columns"),
        *IDX,
        *WEIGHTS,
        ("num_experts", "zero", "num_experts = 0"),
        ("num_max_dispatch_tokens_per_rank", "zero", "dispatch_tokens_per_rank = 0"),
        ("num_max_dispatch_tokens_per_rank", "word", "word|str"),
        ("cumulative_local_expert_recv_stats", "double", "recv_stats has dtype"),
        ("dispatch_wait_recv_cost_stats", "list", "recv_cost_stats is a list"),
        ("use_nvfp4", "true", "quantise = "),
    ],
    "low_latency_plain": [
        *X,
        ("x", "double", "x has dtype"),
        ("x", "narrow", "x has 3 columns"),
        *IDX,
        ("num_experts", "zero", "num_experts = 0"),
        ("num_max_dispatch_tokens_per_rank", "zero", "dispatch_tokens_per_rank = 0"),
        ("num_max_dispatch_tokens_per_rank", "word", "word|str"),
        ("cumulative_local_expert_recv_stats", "double", "recv_stats has dtype"),
        ("use_mxfp8", "true", "quantise = "),
    ],
    "low_latency_by_position": [
        *X,
        *WEIGHTS[1:],
        ("cumulative_local_expert_recv_stats", "long row", "recv_stats has shape"),
    ],
    "low_latency_combine": [
        *X,
        *IDX,
        *WEIGHTS,
        HANDLE,
        ("out", "flat", "out has shape"),
        ("out", "list", "out is a list"),
        ("zero_copy", "true", "zero_copy without rows"),
        ("overlap", "true", "Overlap mode requires"),
    ],
    "elastic_dispatch": [
        *X,
        *IDX,
        *WEIGHTS,
        ("num_experts", "none", "num_experts is None"),
        ("num_experts", "zero", "num_experts = 0"),
        ("num_max_tokens_per_rank", "zero", "num_max_tokens_per_rank = 0"),
        ("cumulative_local_expert_recv_stats", "list", "recv_stats is a list"),
        ("cumulative_local_expert_recv_stats", "zero", "recv_stats is a int"),
    ],
    "elastic_again": [
        *X,
        HANDLE,
        ("x", "long row", "rows|x has"),
        ("do_cpu_sync", "true", "do_cpu"),
    ],
    "elastic_combine": ELASTIC_COMBINE,
    "ep_dispatch": [*X, *IDX, ("num_experts", "none", "num_experts is None")],
    "ep_again": [*X, HANDLE, ("do_cpu_sync", "true", "do_cpu")],
    "ep_combine": ELASTIC_COMBINE,
    "ep_weights": [
        (LB[0], "flat", "shape"),
        (LB[1], "double", "bytes"),
        (LB[2], "list", "redundancy_mapping is a list"),
    ],
    "hybrid_buffer": [
        ("hidden_dim", "zero", "hidden_dim = 0"),
        ("num_local_experts", "word", "str"),
        ("max_num_of_tokens_per_rank", "word", "str"),
    ],
    "hybrid_permute": [
        *HIDDEN_ROWS,
        ("routing_map", "list", "routing_map is a list"),
        ("routing_map", "double", "routing_map has dtype"),
        ("routing_map", "flat", "routing_map has shape"),
        ("routing_map", "long row", "probs has shape"),
        ("routing_map", "none", "no routing"),
        ("probs", "list", "probs|list"),
        ("probs", "flat", "weights|probs"),
        ("num_permuted_tokens", "word", "num_permuted_tokens = 'word'"),
        ("non_blocking", "true", "num_permuted_tokens is required"),
    ],
    "hybrid_indices": [*HIDDEN_ROWS, *IDX[:3], ("topk_weights", "list", "list")],
    "hybrid_unpermute": [*HIDDEN_ROWS, HANDLE, ("probs", "list", "list")],
    "hybrid_dispatch": [*HIDDEN_ROWS, ("routing_map", "flat", "routing_map has shape")],
    "hybrid_again": [*HIDDEN_ROWS, HANDLE],
    "hybrid_combine": [*HIDDEN_ROWS, HANDLE, ("probs", "list", "probs is a list")],
    "fused_dispatch": FUSED,
    "uccl_fused_dispatch": FUSED[:6],
    "fused_combine": [*X, HANDLE],
    "fused_by_expert": FUSED,
    "deepepv2_dispatch": FUSED,
    "deepepv2_combine": [*X, HANDLE],
    "hybrid_ep_dispatch": [
        *X,
        ("routing_map", "list", "routing_map is a list"),
        ("routing_map", "none", "neither routing_map nor topk_idx"),
        ("probs", "list", "list"),
    ],
    "hybrid_ep_combine": [*X, HANDLE],
}
CASES = [(call, *case) for call, cases in WRONG.items() for case in cases]


def forget_buffers():
    fused_a2a.free_buffer()
    fused_a2a.reset_hybrid_ep_buffer()
    fused_a2a._uccl_buffer = None


def wrong_for_another_exchange(rank, num_ranks, group, kind):
    """The others announce an exchange for rows of another size when the last rank refuses."""
    if kind == "low_latency":
        call = Buffer(group, low_latency_mode=True).low_latency_dispatch
        options = {"num_max_dispatch_tokens_per_rank": NUM_MAX, "use_fp8": False}
    else:
        call = ElasticBuffer(group, num_max_tokens_per_rank=NUM_MAX).dispatch
        options = {"do_cpu_sync": kind == "waits"}
    is_wrong = rank == num_ranks - 1
    for hidden in (HIDDEN, 2 * HIDDEN, 3 * HIDDEN):
        case = Case(rank, group, 4, TOPK, (5, 4), hidden=hidden, distinct=True)
        with pytest.raises(weft.InvalidArgument, match="topk_idx is a list") as found:
            idx = case.idx.tolist() if is_wrong else case.idx
            call(case.x, idx, num_experts=4, **options)
        assert is_wrong or f"rank {num_ranks - 1}" in str(found.value), found.value
        call(case.x, case.idx, num_experts=4, **options)


@pytest.mark.parametrize("kind", ["low_latency", "waits", "has a budget"])
def test_all_hear_what_one_refuses_where_others_announce(ranks, kind):
    ranks(wrong_for_another_exchange, 2, kind)


SETTINGS = {"copy_engines": False, "num_sms": 0, "on_peer_loss": "fail"}


class Unmade(weft.Exchange):
    """An exchange that was never made."""

    def __del__(self):
        """There is no core to ask. What raises in a destructor can break a parser in whose way the
        collector comes."""


class Steps:
    """The core of an exchange of a GPU and its group, which tell what all ranks wait for in a call
    that one of them refuses."""

    def __init__(self):
        self.seen = []
        self.exchange = Unmade.__new__(Unmade)
        vars(self.exchange).update(device=torch.device("cpu"), hidden=8, num_experts=2, group=self)
        vars(self.exchange).update(_core=self, _on_gpu=True, _has_copy_room=True, max_tokens=4)
        vars(self.exchange).update(_settings=SETTINGS, max_topk=2)
        self.exchange._stream = lambda: 0

    rank, num_ranks, num_begun = 0, 2, 0

    def plan(self, *_, verb="plan"):
        self.refuse(verb)
        self.num_begun += 1
        raise weft.InvalidArgument("rank 1 refused the call")

    def plan_and_dispatch(self, *given):
        self.plan(verb="plan_and_dispatch" if given[-1] else "plan")

    def refuse(self, verb, *_):
        self.seen.append(verb)

    def is_outgrown(self):
        return False


@pytest.mark.parametrize("verb", ["plan", "plan_and_dispatch"])
@pytest.mark.parametrize("options", [{}, {"row_budget": 9}, {"row_budget": 9, "overflow": "error"}])
def test_an_announcement_is_as_many_calls_as_a_refusal(monkeypatch, verb, options):
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _: None)
    refuses, announces = Steps(), Steps()
    monkeypatch.setattr(_core, "num_begun", lambda: announces.num_begun)
    refuses.exchange.refuse(verb, "no", **options)
    with pytest.raises(weft.InvalidArgument, match="rank 1 refused"):
        announces.exchange.announce(verb, 16, 2, **options)
    assert refuses.seen == announces.seen


def wrong_where_rows_get_wider(rank, num_ranks, group, name, how, reason):
    """The others need a larger buffer, or only the last rank does, when that one is wrong."""
    forget_buffers()
    is_wrong = rank == num_ranks - 1
    try:
        call, given = getattr(Calls(rank, num_ranks, group), name)()
        call(**given)
        for hidden in (HIDDEN, 2 * HIDDEN):
            call, given = getattr(Calls(rank, num_ranks, group, hidden), name)()
            wrong = {**given, "x": SPOILT[how](given["x"])} if is_wrong else given
            with pytest.raises(Exception if is_wrong else weft.InvalidArgument) as found:
                call(**wrong)
            assert re.search(reason, str(found.value)), found.value
            assert is_wrong or f"rank {num_ranks - 1}" in str(found.value), found.value
            rows = call(**given)[0]
            assert rows.size(1) == hidden
    finally:
        forget_buffers()


@pytest.mark.parametrize("name", ["fused_dispatch", "uccl_fused_dispatch", "fused_by_expert"])
@pytest.mark.parametrize(("how", "reason"), [("list", "list|parts"), ("wide", "hidden")])
def test_all_hear_what_one_refuses_where_rows_get_wider(ranks, name, how, reason):
    ranks(wrong_where_rows_get_wider, 2, name, how, reason)


def last_is_wrong(rank, num_ranks, group, name, argument, how, reason):
    forget_buffers()
    try:
        call, given = getattr(Calls(rank, num_ranks, group), name)()
        is_wrong, wrong = rank == num_ranks - 1, dict(given)
        if is_wrong:
            wrong[argument] = SPOILT[how](given.get(argument))
        for _ in range(2):
            kind = Exception if is_wrong else BadCall
            with pytest.raises(kind, match=f"(?s){reason}") as found:
                call(**wrong)
            assert is_wrong or f"rank {num_ranks - 1}" in str(found.value), found.value
            call(**given)
    finally:
        forget_buffers()


@pytest.mark.parametrize(("name", "argument", "how", "reason"), CASES)
def test_all_ranks_raise_what_one_passes_wrong(ranks, name, argument, how, reason):
    ranks(last_is_wrong, 2, name, argument, how, reason)


# What all ranks must give alike, by call, and what they give; and before it, whether the buffer has
# exchanged something.
UNEQUAL = {
    "low_latency_plain": {
        "use_fp8": (False, True),
        "round_scale": (False, True),
        "num_max_dispatch_tokens_per_rank": (NUM_MAX, 2 * NUM_MAX),
    },
    "low_latency_combine": {"use_logfmt": (False, True)},
    "elastic_dispatch": {"do_expand": (False, True), "num_max_tokens_per_rank": (16, 32)},
    "ep_dispatch": {"do_expand": (False, True), "num_max_tokens_per_rank": (16, 32)},
    "hybrid_permute": {"pad_multiple": (4, 8)},
    "hybrid_indices": {"num_of_experts": (4, 8)},
    "fused_dispatch": {"num_experts": (4, 8)},
}


def unequal(rank, num_ranks, group, name):
    for argument, values in UNEQUAL[name].items():
        for has_called in (False, True):
            forget_buffers()
            call, given = getattr(Calls(rank, num_ranks, group), name)()
            if has_called:
                call(**given)
            with pytest.raises(weft.InvalidArgument, match="must be equal on all ranks") as found:
                call(**{**given, argument: values[rank]})
            assert re.search(rf"\b{argument}\b", str(found.value)), found.value
            call(**given)
    forget_buffers()


@pytest.mark.parametrize("name", UNEQUAL)
def test_what_ranks_give_differently_is_named(ranks, name):
    ranks(unequal, 2, name)


def no_memory(rank, num_ranks, group, name):
    forget_buffers()

    def fail(*_args, **_options):
        raise torch.OutOfMemoryError("out of memory: 7 GiB")

    calls = Calls(rank, num_ranks, group)
    call, given = getattr(calls, name)()
    call(**given)
    is_wrong = rank == num_ranks - 1
    usual = outputs.of_bytes
    try:
        if is_wrong:
            outputs.of_bytes = fail
        kind = torch.OutOfMemoryError if is_wrong else weft.InvalidArgument
        with pytest.raises(kind, match="out of memory: 7 GiB"):
            call(**given)
    finally:
        outputs.of_bytes = usual
    call(**given)
    forget_buffers()


@pytest.mark.parametrize(
    "name",
    ["dispatch", "dispatch_fp8", "low_latency_plain", "elastic_dispatch", "hybrid_dispatch"],
)
def test_all_ranks_raise_where_one_has_no_memory(ranks, name):
    ranks(no_memory, 2, name)
