# SPDX-License-Identifier: Apache-2.0
"""weft.Balance: weights to replicas, gradients back, with autograd and activation checkpointing."""

import itertools

import pytest
import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

import weft
from oracle import check_told
from weft.overlap.experts import grouped_product
from weft.overlap.wgrad import WeightGradientQueue

LOCAL, SLOTS = 2, 3


def gather(group, value):
    found = [None] * dist.get_world_size(group)
    dist.all_gather_object(found, value, group=group)
    return found


def placed(seed, num_ranks, local=LOCAL, slots=SLOTS):
    """Replicas of experts of other ranks, each once on a rank; some places are empty."""
    gen = torch.Generator().manual_seed(seed)
    placement = torch.full((num_ranks, slots), -1, dtype=torch.int32)
    for rank in range(num_ranks):
        others = [e for e in range(num_ranks * local) if e // local != rank]
        for slot, pick in enumerate(torch.randperm(len(others), generator=gen)[:slots]):
            if torch.rand(1, generator=gen) < 0.8:
                placement[rank, slot] = others[pick]
    return placement


def bits(tensor):
    return tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)


def made(group, num_ranks, shapes, dtypes, local=LOCAL, slots=SLOTS):
    exchange = weft.Exchange(group, hidden=16, num_experts=num_ranks * local)
    return weft.Balance(exchange, replicas=slots, shapes=shapes, dtypes=dtypes)


def of_kind(values, dtype):
    """Values as `dtype`; for a type that torch only stores, they are its bytes."""
    is_stored = dtype in (torch.float4_e2m1fn_x2, torch.float8_e8m0fnu)
    return values.to(torch.uint8).view(dtype) if is_stored else values.to(dtype)


def pushed(rank, num_ranks, group):
    """FP8 and FP4 weights with scales, one of them a number for each expert: MXFP8's and NVFP4's,
    with E2M1 pairs as torch has them and as bytes."""
    shapes = [(40, 300), (7,), (), (3, 5), (24, 32), (24, 4), (24, 2)]
    dtypes = [torch.float8_e4m3fn, torch.float32, torch.bfloat16, torch.uint8]
    dtypes += [torch.float4_e2m1fn_x2, torch.float8_e4m3fn, torch.float8_e8m0fnu]
    balance = made(group, num_ranks, shapes, dtypes)

    def weights_of(rank):
        gen = torch.Generator().manual_seed(rank)
        return [
            of_kind(torch.rand((LOCAL, *shape), generator=gen).mul(99), dtype)
            for shape, dtype in zip(shapes, dtypes)
        ]

    everybody = [weights_of(other) for other in range(num_ranks)]
    weights = weights_of(rank)
    weights[0] = weights[0].transpose(1, 2).contiguous().transpose(1, 2)  # with gaps
    want = [of_kind(torch.zeros((SLOTS, *one.shape[1:])), one.dtype) for one in weights]
    for seed in range(3):
        placement = placed(seed, num_ranks)
        replicas = balance.push_weights(placement, weights)
        for part, slot in itertools.product(range(len(shapes)), range(SLOTS)):
            expert = int(placement[rank, slot])
            if expert >= 0:
                want[part][slot] = everybody[expert // LOCAL][part][expert % LOCAL]
            assert torch.equal(bits(replicas[part][slot]), bits(want[part][slot]))


@pytest.mark.parametrize("num_ranks", [1, 2, 4, 8])
def test_replicas_get_the_weights_of_their_experts(ranks, num_ranks):
    ranks(pushed, num_ranks)


def reduced(rank, num_ranks, group, dtype):
    """Returns whether another order would have given the same."""
    shapes = [(9,), (2, 3)]
    balance = made(group, num_ranks, shapes, dtype)
    placement = placed(4, num_ranks)
    placement[:, 0] = torch.where(torch.arange(num_ranks) == 0, -1, 1)  # the same of many ranks
    placement[:, 1:][placement[:, 1:] == 1] = -1
    gen = torch.Generator().manual_seed(rank)
    grads = [
        (torch.randn(LOCAL + SLOTS, *shape, generator=gen) * 1e3 ** torch.rand(1, generator=gen))
        .to(dtype)
        .contiguous()
        for shape in shapes
    ]
    before = [one.clone() for one in grads]
    everybody = gather(group, before)

    def summed(part, order):
        sums = before[part][:LOCAL].to(torch.float32, copy=True)
        for at, slot in order:
            expert = int(placement[at, slot])
            if expert >= 0 and expert // LOCAL == rank:
                sums[expert % LOCAL] += everybody[at][part][LOCAL + slot].float()
        return sums.to(dtype)

    order = list(itertools.product(range(num_ranks), range(SLOTS)))
    balance.reduce_grads(placement, grads)
    for part, one in enumerate(grads):
        assert torch.equal(one[:LOCAL], summed(part, order))
        assert torch.equal(one[LOCAL:], before[part][LOCAL:])
    return torch.equal(summed(0, order), summed(0, order[::-1]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_ranks", [1, 2, 4, 8])
def test_gradients_are_added_by_rank_and_rounded_once(ranks, num_ranks, dtype):
    is_same = ranks(reduced, num_ranks, dtype)
    assert num_ranks < 4 or dtype != torch.float32 or not all(is_same)


def refused(rank, num_ranks, group):
    balance = made(group, num_ranks, [(4, 4), (3,)], torch.float32)
    placement = placed(1, num_ranks)
    weights = [torch.ones(LOCAL, 4, 4), torch.ones(LOCAL, 3)]
    grads = [torch.ones(LOCAL + SLOTS, 4, 4)]
    rows = torch.ones(5, 4)
    wrong = placement.clone()
    wrong[1, 2] = num_ranks * LOCAL
    halves = [weights[0].bfloat16(), weights[1]]
    texts = []
    for call, right, given in [
        (balance.push_weights, (placement, weights), (wrong, weights)),
        (balance.push_weights, (placement, weights), (placement[:, :1], weights)),
        (balance.push_weights, (placement, weights), (object(), weights)),
        (balance.push_weights, (placement, weights), (placement, weights[:1])),
        (balance.push_weights, (placement, weights), (placement, halves)),
        (balance.reduce_grads, (placement, grads), (placement, [grads[0][:LOCAL]])),
        (balance.reduce_grads, (placement, grads), (placement, [grads[0].double()])),
        (balance.reduce_grads, (placement, grads), (placement, grads * 2)),
        (balance.reduce_grads, (placement, grads), (placement, [grads[0].transpose(1, 2)])),
        (
            balance.apply,
            (placement, lambda rows, *_: rows, rows, *weights),
            (placement, lambda rows, *_: rows, rows, *weights[:1]),
        ),
    ]:
        with pytest.raises(weft.InvalidArgument) as told:
            call(*(given if rank == 1 else right))
        texts.append(str(told.value))
    for options in ({"replicas": 3 + rank}, {"replicas": 17}, {"dtypes": [torch.uint8]}):
        with pytest.raises(weft.InvalidArgument) as told:
            exchange = weft.Exchange(group, hidden=16, num_experts=num_ranks * LOCAL)
            weft.Balance(exchange, **{"replicas": 1, "shapes": [(4,), (3,)], **options})
        texts.append(str(told.value))
    replicas = balance.push_weights(placement, weights)  # still usable
    assert all(one[placement[rank] >= 0].eq(1).all() for one in replicas)
    return texts


REASONS = [
    "placement[1, 2] = 4 (expected -1 to 3: 2 ranks of 2 experts)",
    "placement is torch.int32 [2, 1] (expected int32 [2, 3]: ranks, replicas)",
    "object has no placement",
    "1 weights (expected 2)",
    "weights[0] is torch.bfloat16 [2, 4, 4] cpu (expected torch.float32 [2, 4, 4] cpu)",
    "grads[0] is torch.float32 [2, 4, 4] cpu (expected torch.float32 [5, 4, 4] cpu)",
    "grads[0] is torch.float64",
    "grads have 32 elements for an expert (expected 1 to 19",
    "grads[0] is not contiguous",
    "apply: 1 weights",
    "(must be equal on all ranks)",
    "replicas = 17 (expected 0 to 16)",
    "2 shapes and 1 dtypes",
]


def test_all_ranks_hear_what_one_refuses(ranks):
    check_told(ranks(refused, 2), REASONS)


# --- layers whose replicas lie where the test wants them ---

HIDDEN, WIDE, TOKENS = 16, 24, 10


def experts_of(counts):
    """Each block of rows by its own expert; counts of masters, then of replicas."""

    def compute(rows, first, second):
        blocks = rows.split(counts)
        made = [(b @ first[e]).relu() @ second[e] for e, b in enumerate(blocks) if len(b)]
        return torch.cat([*made, rows[:0, :HIDDEN]])

    return compute


class Case:
    """Whole numbers throughout, so that sums are exact, whatever their order."""

    def __init__(self, rank, num_ranks, group):
        self.rank, self.num_ranks, self.group = rank, num_ranks, group
        self.placement = placed(num_ranks, num_ranks)
        self.exchange = weft.Exchange(group, hidden=HIDDEN, num_experts=num_ranks * LOCAL)
        shapes = [(HIDDEN, WIDE), (WIDE, HIDDEN)]
        self.balance = weft.Balance(
            self.exchange, replicas=SLOTS, shapes=shapes, dtypes=torch.float32
        )
        gen = torch.Generator().manual_seed(rank)

        def whole(*shape):
            return torch.randint(-2, 3, shape, generator=gen).float()

        self.x, self.grad = whole(TOKENS, HIDDEN), whole(TOKENS, HIDDEN)
        self.idx = torch.randint(0, num_ranks * LOCAL, (TOKENS, 2), generator=gen)
        self.weights = [
            [whole(LOCAL, *shape).requires_grad_() for shape in shapes] for _ in range(3)
        ]

    def plain(self, x, weights):
        plan = self.exchange.plan(self.idx)
        rows = weft.dispatch(plan, x).rows
        return weft.combine(plan, experts_of(plan.rows_per_expert_list)(rows, *weights)).x

    def plan(self):
        return self.exchange.plan(self.idx, balance=weft.Placement(self.placement))

    def balanced(self, x, weights, inner=None):
        plan = self.plan()
        rows = weft.dispatch(plan, x).rows
        compute = experts_of(plan.rows_per_expert_list)
        if inner is not None:
            compute = inner(compute)
        made = self.balance.apply(plan, compute, rows, *weights)
        return weft.combine(plan, made).x

    def gradients(self, layer):
        """Output of a model of three layers, and its gradients."""
        x = self.x.clone().requires_grad_()
        hidden = x
        for weights in self.weights:
            hidden = layer(hidden, weights) % 3  # stays small and whole
        hidden.backward(self.grad)
        grads = [one.grad for weights in self.weights for one in weights]
        for weights in self.weights:
            for one in weights:
                one.grad = None
        return [hidden.detach(), x.grad, *grads]


def differentiated(rank, num_ranks, group):
    case = Case(rank, num_ranks, group)
    want = case.gradients(case.plain)
    for again in (False, True):  # reentrant or not: of the layer, and of its experts alone

        def layer(x, weights, again=again):
            return checkpoint(case.balanced, x, weights, use_reentrant=again)

        def inner(compute, again=again):
            return lambda *given: checkpoint(compute, *given, use_reentrant=again)

        layers = [case.balanced, layer, lambda x, weights: case.balanced(x, weights, inner)]
        for one in layers:
            found = case.gradients(one)
            assert all(torch.equal(a, b) for a, b in zip(found, want, strict=True))
    assert any(grad.any() for grad in want[2:])


@pytest.mark.parametrize("num_ranks", [1, 2, 4, 8])
def test_layers_share_places_and_masters_get_all_gradients(ranks, num_ranks):
    ranks(differentiated, num_ranks)


def delayed(rank, num_ranks, group):
    """Two micro-batches, whose weights' gradients come when the queue runs."""
    case = Case(rank, num_ranks, group)
    first, second = case.weights[0]
    queue = WeightGradientQueue()

    def layer(x):
        plan = case.plan()
        ends = plan.rows_per_expert.cumsum(0).to(torch.int32)

        def compute(rows, first, second):
            inner = grouped_product(rows, first, ends, queue).relu()
            return grouped_product(inner, second, ends, queue)

        rows = weft.dispatch(plan, x).rows
        made = case.balance.apply(plan, compute, rows, first, second, queue=queue)
        return weft.combine(plan, made).x

    found, want = [], []
    for run, grads in ((layer, found), (lambda x: case.plain(x, case.weights[0]), want)):
        for factor in (1, 2):
            x = (case.x * factor).requires_grad_()
            run(x).backward(case.grad)
            grads.append(x.grad)
        if run is layer:
            assert first.grad is None and second.grad is None and len(queue) == 8
            queue.run()
        grads += [first.grad, second.grad]
        first.grad = second.grad = None
    assert all(torch.equal(a, b) for a, b in zip(found, want, strict=True))
    with pytest.raises(weft.InvalidArgument, match="there is a queue"):
        case.balance.apply(case.placement, None, x, first, second, wgrad="blocks", queue=queue)


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_gradients_of_weights_may_come_later(ranks, num_ranks):
    ranks(delayed, num_ranks)


def ahead(rank, num_ranks, group):
    case = Case(rank, num_ranks, group)
    moved = []
    carry = case.balance._carry
    case.balance._carry = lambda *given: moved.append(len(given[1])) or carry(*given)
    first, second, _ = case.weights
    with torch.no_grad():
        want = case.balanced(case.x, first)
        case.balance.push_weights(case.placement, second)  # for nobody
        counts = [len(moved)]
        case.balance.push_weights(case.placement, first)
        assert torch.equal(case.balanced(case.x, first), want)  # these are there
        counts.append(len(moved))
        assert torch.equal(case.balanced(case.x, first), want)  # may have changed since
    counts.append(len(moved))
    return counts


def test_weights_that_were_pushed_ahead_are_not_pushed_again(ranks):
    assert ranks(ahead, 2) == [[2, 3, 4]] * 2


def is_up_to_date(balance, group, weights):
    """Returns whether `apply` gives this rank's experts what all ranks have now."""
    rank, num_ranks = balance.group.rank, balance.group.num_ranks
    seen = []

    def experts(rows, places):
        seen.append(places.clone())
        return rows

    placement = placed(num_ranks, num_ranks)
    balance.apply(placement, experts, torch.ones(1, 4), weights)
    everybody = torch.cat(gather(group, weights.detach()))
    places = [rank * LOCAL + e for e in range(LOCAL)] + placement[rank].tolist()
    return all(
        torch.equal(seen[0][at], everybody[expert])
        for at, expert in enumerate(places)
        if expert >= 0
    )


def changed_ahead(rank, num_ranks, group):
    balance = made(group, num_ranks, [(4, 4)], torch.float32)
    placement = placed(num_ranks, num_ranks)
    first = torch.rand(LOCAL, 4, 4)
    with torch.inference_mode():
        of_inference = torch.rand(LOCAL, 4, 4)
    for weights in (first, of_inference):
        balance.push_weights(placement, [weights])
        with torch.inference_mode(weights.is_inference()):
            weights.mul_(100)
        assert is_up_to_date(balance, group, weights)
    balance.push_weights(placement, [first])
    assert is_up_to_date(balance, group, first.transpose(1, 2))  # begins at the same address


def test_weights_that_changed_since_they_were_pushed_ahead_are_pushed_again(ranks):
    ranks(changed_ahead, 2)


DIFFERENT = "ranks differ in the call, its placement, what it moves or what was there already"


def apart(rank, num_ranks, group):
    balance = made(group, num_ranks, [(4, 4)], torch.float32)
    placement = placed(num_ranks, num_ranks)
    other = placement.clone()
    other[1, 0] = 1 if other[1, 0] < 1 else -1
    weights = torch.rand(LOCAL, 4, 4).requires_grad_()
    grads, rows = torch.ones(LOCAL + SLOTS, 4, 2), torch.ones(1, 4).requires_grad_()
    halves = torch.ones(LOCAL + SLOTS, 4, 4).bfloat16()  # of as many bytes

    def experts(rows, places):
        return rows @ places[0]

    def push(mine):
        balance.push_weights(mine, [weights])

    def backward(of):
        balance.apply(placement, experts, rows, of).sum().backward()

    def other_memory(is_other):
        push(placement)
        balance.apply(placement, experts, rows, weights.clone() if is_other else weights)
        push(placement)  # of another layer

    def pushed_or_reduced(is_other):
        balance.reduce_grads(placement, [grads]) if is_other else push(placement)

    def wrong(call, right, wrong):
        with pytest.raises(weft.InvalidArgument, match=DIFFERENT):
            call(wrong if rank == 1 else right)
        push(placement)
        assert is_up_to_date(balance, group, weights)  # still usable

    wrong(push, placement, other)
    wrong(lambda mine: balance.reduce_grads(mine, [grads]), placement, other)
    wrong(lambda mine: balance.apply(mine, experts, rows, weights), placement, other)
    wrong(lambda mine: balance.reduce_grads(placement, [mine]), grads, halves)
    wrong(pushed_or_reduced, False, True)
    wrong(other_memory, False, True)
    wrong(lambda of: (backward(of), backward(of)), weights, weights.detach())


def test_ranks_that_differ_in_what_they_pass_are_refused_by_name(ranks):
    ranks(apart, 2)


def changed(rank, num_ranks, group):
    case = Case(rank, num_ranks, group)
    first, second, _ = case.weights
    out = case.balanced(case.x, first).sum()
    case.balanced(case.x, second)
    with torch.no_grad():
        first[0].add_(1)
    with pytest.raises(weft.InvalidArgument, match="weights were changed between"):
        out.backward()
    case.balanced(case.x, first).sum().backward()
    assert second[0].grad is None and first[0].grad is not None


def test_weights_must_not_change_before_backward(ranks):
    ranks(changed, 2)


def unused(rank, num_ranks, group):
    """One rank's experts have no rows, and it never asks for the weights' gradients."""
    case = Case(rank, num_ranks, group)
    rows = torch.ones(3, HIDDEN)

    def compute(rows, first, second):
        return rows if rank == 0 else rows @ first[-1] @ second[-1]

    first = case.weights[0]
    placement = torch.full((num_ranks, SLOTS), -1, dtype=torch.int32)
    placement[1:, -1] = 0
    case.balance.apply(placement, compute, rows, *first).sum().backward()
    return first[0].grad[0].abs().sum() > 0


def test_a_rank_without_rows_takes_part(ranks):
    assert ranks(unused, 4) == [True, False, False, False]


def none(rank, num_ranks, group):
    """No replicas: nothing travels."""
    balance = made(group, num_ranks, [(4,)], torch.float32, slots=0)
    exchange = weft.Exchange(group, hidden=16, num_experts=num_ranks * LOCAL)
    plan = exchange.plan(torch.zeros(1, 1, dtype=torch.int64))
    for placement in (torch.empty(num_ranks, 0, dtype=torch.int32), plan):
        weight = torch.ones(LOCAL, 4, requires_grad=True)
        balance.push_weights(placement, [weight])
        out = balance.apply(placement, lambda rows, w: rows * w.sum(), torch.ones(1), weight)
        out.sum().backward()
        assert torch.equal(weight.grad, torch.ones(LOCAL, 4))


def test_balance_without_replicas(ranks):
    ranks(none, 2)
