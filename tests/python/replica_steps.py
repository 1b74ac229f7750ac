# SPDX-License-Identifier: Apache-2.0
"""Steps of a `Balance` for a layer of which ranks may be lost, on CPUs and GPUs."""

import torch

RANKS, VICTIM, LOCAL, SHAPE = 3, 1, 2, (3, 40)
PLACEMENT = torch.tensor([[2, 4], [0, 4], [2, 0]], dtype=torch.int32)


def tensors(rank, seed, num, device="cpu"):
    made = torch.randn(num, *SHAPE, generator=torch.Generator().manual_seed(10 * seed + rank))
    return made.to(device)


def check_step(balance, rank, seed, pushing, reducing=None, step=lambda _: None):
    """pushing, reducing: the ranks that are left in either call; by default the same. step: told
    which call comes."""
    device = balance.device
    step("push")
    (slots,) = balance.push_weights(PLACEMENT, [tensors(rank, seed, LOCAL, device)])
    for slot, expert in enumerate(PLACEMENT[rank].tolist()):
        owner = expert // LOCAL
        weight = tensors(owner, seed, LOCAL, device)[expert % LOCAL]
        wanted = weight if owner in pushing else torch.zeros_like(weight)
        assert torch.equal(slots[slot], wanted)
    grads = tensors(rank, seed + 1, LOCAL + 2, device)
    wanted = grads.clone()
    for at in reducing or pushing:
        for slot, expert in enumerate(PLACEMENT[at].tolist()):
            if expert // LOCAL == rank:
                wanted[expert % LOCAL] += tensors(at, seed + 1, LOCAL + 2, device)[LOCAL + slot]
    step("reduce")
    balance.reduce_grads(PLACEMENT, [grads])
    balance.check()
    assert torch.equal(grads, wanted)
