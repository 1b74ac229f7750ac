# SPDX-License-Identifier: Apache-2.0
"""vLLM's own manager of NIXL EP over Weft: ranks join and leave while others go on."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import vllm_stubs
from buffer_cases import gather
from loading import stand_ins
from nixl_cases import HIDDEN, NUM_MAX, exchange, make_case

from packages import wheel
from ranks import device_of
from weft.compat.deep_ep import Buffer

CAPACITY = 3


@pytest.fixture(scope="module")
def package():
    return wheel(vllm_stubs.PACKAGE)


def made(module, rank, size, store):
    """A manager for so many ranks; vLLM makes another one for each number."""
    parallel = module.get_current_vllm_config().parallel_config
    parallel.data_parallel_size, parallel.elastic_ep_max_dp_size = size, CAPACITY
    group = SimpleNamespace(rank=lambda: rank, size=lambda: size)
    return module.NixlEPAll2AllManager(group, SimpleNamespace(store=store))


def notices_faults(manager, mask, rank):
    """query_fault is true of a mask that has changed, until buffers are cleaned, which takes masked
    ranks in again. mask(rank, True): who is left out."""
    other = (rank + 1) % CAPACITY
    kind = type(manager)
    kind._mask = torch.zeros(CAPACITY, dtype=torch.int32, device=device_of(rank))  # "cuda" in vLLM
    try:
        assert not manager.query_fault() and not manager.query_active_mask().any()
        mask(other, True)
        assert manager.query_fault()
        assert manager.query_active_mask().ne(0).nonzero().flatten().tolist() == [other]
        manager.clean_buffers()
        assert not manager.query_fault()
    finally:
        kind._mask = kind._last_mask = None


def low_latency(rank, num_ranks, group, package):
    with vllm_stubs.managers(package) as module:
        buffer = Buffer(group, low_latency_mode=True, enable_shrink=True, explicitly_destroy=True)
        manager = module.DeepEPLLAll2AllManager.__new__(module.DeepEPLLAll2AllManager)
        type(manager)._buffer = buffer
        try:
            notices_faults(manager, buffer.low_latency_update_mask_buffer, rank)
        finally:
            type(manager)._buffer = None
        buffer.destroy()


def test_a_manager_of_deep_ep_notices_faults(ranks, package):
    ranks(low_latency, CAPACITY, package)


def elastic(rank, num_ranks, group, package, folder):
    case = make_case(rank, num_ranks, group)
    given = (case.x, case.idx, case.weights)
    case.x, case.idx, case.weights = (tensor.to(device_of(rank)) for tensor in given)
    sizes = {
        "max_num_tokens_per_dp_rank": NUM_MAX,
        "token_hidden_size": HIDDEN,
        "num_local_experts": case.local,
    }
    stores = [dist.FileStore(f"{folder}/{name}", -1) for name in ("first", "second")]
    with vllm_stubs.managers(package) as module:
        if rank < 2:
            buffer = made(module, rank, 2, stores[0]).get_handle(sizes)
            exchange(case, buffer, [0, 1])
            larger = made(module, rank, 3, stores[1])
            larger.stage_ep_size()
            exchange(case, buffer, [0, 1])
            larger.commit_ep_size()
        else:
            larger = made(module, rank, 3, stores[1])
            buffer = larger.get_handle(sizes)
            with larger.mask_remote_ranks():
                exchange(case, buffer, [2])
        assert larger.max_num_ep_ranks == CAPACITY and larger.get_handle(sizes) is buffer
        exchange(case, buffer)
        notices_faults(larger, buffer.update_mask_buffer, rank)
        exchange(case, buffer)
        gather(group, None)
        if rank < 2:
            made(module, rank, 2, stores[0]).commit_ep_size()
            exchange(case, buffer, [0, 1])
            larger.destroy()
            exchange(case, buffer, [0, 1])


def test_a_manager_lets_ranks_join_and_leave(ranks, package, tmp_path):
    ranks(elastic, 3, package, str(tmp_path))


def test_the_page_lists_the_stand_ins():
    found = {*vllm_stubs.STUBS, *vllm_stubs.MANAGER_STUBS}
    assert sorted(found) == sorted(stand_ins("vllm"))
