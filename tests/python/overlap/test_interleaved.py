# SPDX-License-Identifier: Apache-2.0
"""Several model chunks on each rank of a pipeline: the same bits as the model in one piece."""

from functools import partial

import overlap_cases as cases
import pipeline_cases as pipelines
import pytest
import torch
import torch.distributed as dist

from weft.overlap import PipelineShape, combined_1f1b_schedule_for_interleaved_pipelining


def _groups(rank, num_ranks, num_stages):
    """The expert-parallel group of this rank and its place in it: neighbours share a stage."""
    size = num_ranks // num_stages
    made = [dist.new_group(range(i * size, (i + 1) * size)) for i in range(num_stages)]
    return made[rank // size], rank % size


def _training(rank, num_ranks, group, pipeline_ranks, num_chunks, num_batches, options):
    """Names of what this rank compared. Ranks of one stage hold its experts together."""
    ep, ep_rank = _groups(rank, num_ranks, pipeline_ranks)
    size = num_ranks // pipeline_ranks
    expected = cases.train(cases.model(ep, **options), cases.plain, ep_rank, num_batches)
    shape = PipelineShape(rank // size, pipeline_ranks, num_chunks, num_batches)
    part = pipelines.Part(cases.model(ep, **options), shape)
    way = partial(pipelines.interleaved, rank_of=lambda stage: stage * size + ep_rank)
    seen = cases.train(part, way, ep_rank, num_batches)
    cases.assert_same_bits(seen, {name: expected[name] for name in seen})
    return set(seen), set(expected)


def _trained(ranks, num_ranks, *args):
    found = ranks(_training, num_ranks, *args)
    assert set.union(*(seen for seen, _ in found)) == found[0][1]


@pytest.mark.parametrize("dispatcher", ["alltoall", "hybridep", "ncclep"])
@pytest.mark.parametrize("num_batches", [1, 2, 4])
def test_chunks_of_one_rank(ranks, dispatcher, num_batches):
    options = {"kinds": "mdmm", "dispatcher": dispatcher, "shared": True, "delay": True}
    _trained(ranks, 2, 1, 2, num_batches, options)


@pytest.mark.parametrize("num_chunks", [1, 2])
@pytest.mark.parametrize("num_batches", [2, 6])
def test_two_ranks(ranks, num_chunks, num_batches):
    _trained(ranks, 2, 2, num_chunks, num_batches, {"kinds": "dmmd", "delay": True})


def test_three_ranks(ranks):
    _trained(ranks, 3, 3, 2, 6, {"kinds": "mdmmdm"})


def test_experts_and_stages_spread_over_ranks(ranks):
    options = {"kinds": "mmmm", "shared": True, "delay": True, "dispatcher": "hybridep"}
    _trained(ranks, 4, 2, 2, 4, options)


def test_one_stage_is_the_schedule_without_a_pipeline(ranks):
    _trained(ranks, 1, 1, 1, 3, {"kinds": "dm"})


def _no_sync(rank, num_ranks, group):
    """Chunks in whose context each backward ran, by chunk."""
    part = pipelines.Part(cases.model(group, "dd"), PipelineShape(0, 1, 2, 3))
    batches = [cases.batch(0, i) for i in range(3)]
    open_now, seen = [], {0: [], 1: []}

    class NoSync:
        def __init__(self, chunk):
            self.chunk = chunk

        def __enter__(self):
            open_now.append(self.chunk)

        def __exit__(self, *error):
            open_now.remove(self.chunk)

    for i, chunk in enumerate(part.chunks):
        weight = chunk.layers[0].attention.norm.weight
        weight.register_post_accumulate_grad_hook(lambda w, i=i: seen[i].append(list(open_now)))
    combined_1f1b_schedule_for_interleaved_pipelining(
        part.shape,
        partial(part.build, batches),
        pipelines.Mail(part.shape).link(),
        no_sync_func=NoSync,
    )
    return seen


def test_the_last_backward_of_each_chunk_is_outside_no_sync(ranks):
    assert ranks(_no_sync, 1)[0] == {0: [[0], [0], []], 1: [[1], [1], []]}


class MegatronFSDP(torch.nn.Module):
    """A class of this name gathers parameters by hooks."""


def _sharded(rank, num_ranks, group):
    part = pipelines.Part(cases.model(group, "dd"), PipelineShape(0, 1, 2, 1))
    part.chunks[1].layers[0].mlp.wrapped = MegatronFSDP()
    with pytest.raises(AssertionError, match="FSDP is not supported for interleaved"):
        pipelines.interleaved(part, [cases.batch(0, 0)], 1.0)
    assert all(weight.grad is None for weight in part.parameters())
    whole = pipelines.Part(cases.model(group, "dd"), PipelineShape(0, 1, 1, 1))
    whole.chunks[0].layers[0].mlp.wrapped = MegatronFSDP()
    assert len(pipelines.interleaved(whole, [cases.batch(0, 0)], 1.0)) == 1


def test_sharded_parameters_and_several_chunks(ranks):
    ranks(_sharded, 1)
