# SPDX-License-Identifier: Apache-2.0
"""A layer of experts, and what it must make of tokens by a loop over all of them on one rank."""

import torch
import torch.distributed as dist

import weft.fp8
from ranks import device_of


class Layer:
    """Experts that can be told apart; each rank has the same number, in order. The inputs of a rank
    are the same in every run and on every device."""

    def __init__(self, rank, group, *, hidden, tokens, num_local=4, topk=3, seed=0):
        self.rank, self.num_ranks = rank, dist.get_world_size(group)
        self.num_local, self.num_experts = num_local, num_local * self.num_ranks
        self.first = rank * num_local
        shared = torch.Generator().manual_seed(seed)
        self.device = device_of(rank)
        scale = torch.randn(self.num_experts, hidden, generator=shared)
        offset = torch.randn(self.num_experts, hidden, generator=shared)
        own = torch.Generator().manual_seed(100 * seed + rank + 1)
        num_tokens = tokens[rank]
        x = torch.randn(num_tokens, hidden, generator=own).to(torch.bfloat16)
        scores = torch.rand(num_tokens, self.num_experts, generator=own)
        weights, ids = scores.topk(topk, dim=1)
        self.scale, self.offset = scale.to(self.device), offset.to(self.device)
        self.x, self.weights, self.ids = (t.to(self.device) for t in (x, weights, ids))

    def expert(self, number: int, rows: torch.Tensor) -> torch.Tensor:
        """bf16 like rows [any, H]. number: among all experts."""
        made = rows.float() * self.scale[number] + self.offset[number]
        return made.to(torch.bfloat16)

    def dense(self) -> torch.Tensor:
        """float32 [T, H]."""
        out = torch.zeros(self.x.shape, device=self.device)
        for token, (ids, weights) in enumerate(zip(self.ids.tolist(), self.weights)):
            for number, weight in zip(ids, weights):
                out[token] += weight * self.expert(number, self.x[token : token + 1])[0].float()
        return out

    def by_choice(self, rows: torch.Tensor, local_ids: torch.Tensor) -> torch.Tensor:
        """bf16 [N, K, H]: what each choice's expert makes of rows [N, H]; local_ids [N, K] that are
        not of this rank give zeros."""
        out = rows.new_zeros((*local_ids.shape, rows.size(1)), dtype=torch.bfloat16)
        for row, k in (local_ids >= 0).nonzero().tolist():
            number = self.first + int(local_ids[row, k])
            out[row, k] = self.expert(number, rows[row : row + 1])[0]
        return out

    def blocks(self, rows: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        """bf16 [El, any, H] of blocks whose first counts[i] rows are expert i's."""
        out = rows.new_zeros(rows.shape, dtype=torch.bfloat16)
        for local, count in enumerate(counts.tolist()):
            out[local, :count] = self.expert(self.first + local, rows[local, :count])
        return out

    def check(self, found: torch.Tensor, tolerance: float = 0.05) -> None:
        assert (found.dtype, found.device) == (torch.bfloat16, self.device)
        torch.testing.assert_close(found.float(), self.dense(), rtol=tolerance, atol=tolerance)


def plain(rows: torch.Tensor, scales: torch.Tensor | None) -> torch.Tensor:
    """bf16 rows of FP8 ones [.., H] with a scale for 128 elements each."""
    if scales is None:
        return rows
    wide = rows.float().unflatten(-1, (-1, weft.fp8.GROUP)) * scales.unsqueeze(-1)
    return wide.flatten(-2).to(torch.bfloat16)
