# SPDX-License-Identifier: Apache-2.0
"""Buffers of NIXL EP, and what their calls must return: loops over everybody's inputs."""

import torch
import torch.distributed as dist
from buffer_cases import Case, gather

from weft.compat.deep_ep.store import StoreRanks
from weft.compat.nixl_ep import Buffer

NUM_MAX, HIDDEN = 16, 128
TOKENS = (9, 0, 5)
WAYS = ("file", "tcp", "group", "comm")


class Comm:
    """The part of an mpi4py communicator that Weft uses, over gloo."""

    def __init__(self, group):
        self._group = group

    def Get_group(self):
        """Here the group of a communicator makes those of others."""
        return self

    def Incl(self, ranks):
        return tuple(ranks)

    def Create_group(self, ranks):
        """Like mpi4py's a call of these ranks alone."""
        return StoreRanks(self._group.get_group_store(), self.Get_rank(), ranks, "comm")

    def Get_rank(self):
        return dist.get_rank(self._group)

    def Get_size(self):
        return dist.get_world_size(self._group)

    def allgather(self, value):
        return gather(self._group, value)


def meeting(rank, num_ranks, group, way, folder):
    """The argument by which the ranks find each other."""
    if way == "group":
        return {"group": group}
    if way == "comm":
        return {"comm": Comm(group)}
    if way == "file":
        return {"tcp_store_group": dist.FileStore(f"{folder}/store", num_ranks)}
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    port = gather(group, server.port)[0]
    shared = server if rank == 0 else dist.TCPStore("127.0.0.1", port, is_master=False)
    return {"tcp_store_group": dist.PrefixStore("ep", shared)}


def sized(rank, num_ranks, given, **options):
    """A buffer with room for so many ranks."""
    buffer = Buffer(rank=rank, explicitly_destroy=True, **given, **options)
    size = Buffer.get_rdma_size_hint(
        num_max_dispatch_tokens_per_rank=NUM_MAX,
        hidden=HIDDEN,
        num_ranks=num_ranks,
        num_experts=2 * num_ranks,
    )
    buffer.update_memory_buffers(num_ranks=num_ranks, num_experts_per_rank=2, num_rdma_bytes=size)
    assert (buffer.rank, buffer.group_size, buffer.num_rdma_bytes) == (rank, num_ranks, size)
    return buffer


def connected(rank, num_ranks, given, **options):
    buffer = sized(rank, num_ranks, given, **options)
    buffer.connect_ranks(list(range(num_ranks)))
    return buffer


def make_case(rank, num_ranks, group, **options):
    return Case(rank, group, 2 * num_ranks, 3, TOKENS, hidden=HIDDEN, distinct=True, **options)


def routes(case, expert, members):
    """(source, token, k) of the rows of one of this rank's experts, in order."""
    return [
        (source, token, k)
        for source, idx in enumerate(case.all_idx)
        for token, k in (idx == case.rank * case.local + expert).nonzero().tolist()
        if source in members
    ]


def check_rows(case, recv_x, count, handle, members=None, num_ranks=None):
    """Checks what came from `members` into blocks for num_ranks; None: all of the case."""
    src_info, layout_range, num_max, hidden = handle
    members, num_ranks = members or range(case.num_ranks), num_ranks or case.num_ranks
    assert (num_max, hidden) == (NUM_MAX, HIDDEN)
    assert recv_x.shape == (case.local, num_ranks * NUM_MAX, HIDDEN)
    for expert in range(case.local):
        want = routes(case, expert, members)
        assert int(count[expert]) == len(want)
        assert src_info[expert, : len(want)].tolist() == [token for _, token, _ in want]
        lengths = [int(one) & 0xFFFFFFFF for one in layout_range[expert]]
        assert lengths == [sum(s == r for s, _, _ in want) for r in range(num_ranks)]
        for row, (source, token, _) in enumerate(want):
            assert torch.equal(recv_x[expert, row].cpu(), case.all_x[source][token])


def sums(case, all_rows, members=None, masked=()):
    """This rank's tokens: the rows of the experts of `members` (None: of all) times their weights,
    in fp32, less those of `masked`. all_rows: by rank."""
    members = members or range(case.num_ranks)
    out = torch.zeros(case.x.shape)
    for owner in [rank for rank in members if rank not in masked]:
        for local in range(case.local):
            row = 0
            for source in members:
                found = case.all_idx[source] == owner * case.local + local
                for token, k in found.nonzero().tolist():
                    if source == case.rank:
                        weight = case.all_weights[source][token, k]
                        out[token] += all_rows[owner][local, row].float() * weight
                    row += 1
    return out


def rows_of(rank, shape):
    """Rows that the experts of a rank make."""
    gen = torch.Generator().manual_seed(rank)
    return torch.randn(shape, generator=gen).to(torch.bfloat16)


def exchange(case, buffer, members=None, num_experts=None, masked=()):
    """A dispatch and a combine among `members` (None: all), compared; num_experts: of the blocks.
    masked: ranks that are masked in between."""
    num_ranks = buffer.group_size if num_experts is None else num_experts // case.local
    for has_hook in (False, True):
        recv_x, count, handle, _, hook = buffer.dispatch(
            case.x, case.idx, NUM_MAX, num_experts, use_fp8=False, return_recv_hook=has_hook
        )
        if has_hook:
            hook()
        check_rows(case, recv_x, count, handle, members, num_ranks)
        for rank in masked:
            buffer.update_mask_buffer(rank, mask=True)
        rows = [rows_of(rank, recv_x.shape) for rank in range(case.num_ranks)]
        own = rows[case.rank].to(case.x.device)
        out, *_ = buffer.combine(own, case.idx, case.weights, handle)
        want = sums(case, rows, members, masked)
        torch.testing.assert_close(out.float().cpu(), want, rtol=0.02, atol=0.02)
        for rank in masked:
            buffer.update_mask_buffer(rank)
