# SPDX-License-Identifier: Apache-2.0
"""One MoE layer, forward and backward, with each dispatcher; all must give the same result.

python -m weft.examples.moe_layer
torchrun --nproc-per-node 4 -m weft.examples.moe_layer --tokens 1024
"""

import argparse
import sys
import time

import torch
import torch.distributed as dist

from weft.dispatcher import DispatcherGroups
from weft.examples.layer import DISPATCHERS, MoELayer, make_dispatcher
from weft.examples.program import finish, join, leave


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=512, help="of rank 0; others have fewer")
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--width", type=int, default=512, help="of an expert")
    parser.add_argument("--experts", type=int, default=16)
    parser.add_argument("--topk", type=int, default=4)
    parser.add_argument("--steps", type=int, default=3, help="timed, after one that is not")
    parser.add_argument("--dispatchers", nargs="+", default=DISPATCHERS, choices=DISPATCHERS)
    return parser.parse_args()


def run(name: str, args: argparse.Namespace, device: torch.device) -> dict[str, float]:
    """Returns what this dispatcher computes, summed over all ranks, and the slowest rank's time."""
    group = dist.group.WORLD
    groups = DispatcherGroups(ep=group, expt_tp=None, tp_ep=group)
    dispatcher = make_dispatcher(name, groups, args.experts, args.topk)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    layer = MoELayer(dispatcher, args.hidden, args.width, args.experts, args.topk)
    layer.to(device, dtype).reset(seed=1)
    # Different sizes everywhere, none on the last of several ranks.
    num_ranks, rank = dist.get_world_size(), dist.get_rank()
    tokens = args.tokens * (num_ranks - rank - (num_ranks > 1)) // num_ranks
    gen = torch.Generator().manual_seed(100 + rank)
    x = torch.randn(tokens, args.hidden, generator=gen).to(device, dtype).requires_grad_()

    elapsed = 0.0
    for step in range(args.steps + 1):
        layer.zero_grad()
        x.grad = None
        dist.barrier()
        start = time.perf_counter()
        out = layer(x)
        loss = out.float().square().sum()
        loss.backward()
        finish(device)
        elapsed += (time.perf_counter() - start) * (step > 0)

    squares = [layer.experts.up.grad, layer.experts.down.grad, x.grad]
    found = [loss.detach(), *(grad.float().square().sum() for grad in squares)]
    sums = torch.stack(found).double().cpu()
    dist.all_reduce(sums)
    # The router is the same on every rank, and its gradient a sum over them.
    router = layer.router.weight.grad.float().cpu()
    dist.all_reduce(router)
    slowest = torch.tensor(elapsed / args.steps)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    keys = ("loss", "up", "down", "x")
    result = dict(zip(keys, sums.tolist(), strict=True))
    return result | {"router": float(router.square().sum()), "ms": 1e3 * float(slowest)}


def main() -> int:
    args = parse()
    device = join(torch.cuda.is_available())
    say = print if dist.get_rank() == 0 else (lambda *_, **__: None)
    say(
        f"MoE layer on {dist.get_world_size()} {device.type} ranks: T <= {args.tokens}, "
        f"H {args.hidden}, E {args.experts}, K {args.topk}, expert width {args.width}"
    )
    say(f"{'dispatcher':<11} {'loss':>14} {'|grad x|^2':>12} {'|grad up|^2':>12} {'ms':>8}")
    tolerance = 1e-5 if device.type == "cpu" else 2e-2
    first, differing = None, []
    for name in args.dispatchers:
        result = run(name, args, device)
        say(
            f"{name:<11} {result['loss']:14.4f} {result['x']:12.4f} {result['up']:12.4f} "
            f"{result['ms']:8.2f}"
        )
        first = first or result
        for key in ("loss", "x", "up", "down", "router"):
            if abs(result[key] - first[key]) > tolerance * abs(first[key]):
                differing.append(
                    f"{name}: {key} = {result[key]}, {args.dispatchers[0]} has {first[key]}"
                )
    dist.barrier()
    leave()
    say("the results differ:\n  " + "\n  ".join(differing) if differing else "all results agree")
    return 1 if differing else 0


if __name__ == "__main__":
    sys.exit(main())
