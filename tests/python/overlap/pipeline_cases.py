# SPDX-License-Identifier: Apache-2.0
"""The small model cut into the chunks of a pipeline, and what carries tensors between them."""

from __future__ import annotations

from functools import partial

import overlap_cases as cases
import torch
import torch.distributed as dist

from weft.overlap import (
    ModelChunk,
    PointToPoint,
    VirtualStage,
    combined_1f1b_schedule_for_interleaved_pipelining,
)

HIDDEN = (cases.SEQUENCE, cases.BATCH, cases.H)


class Mail:
    """Tensors between stages: within a process by a dict, between processes by gloo."""

    def __init__(self, shape, rank_of=lambda pipeline_rank: 0):
        """rank_of(rank of the pipeline) -> rank in the default group."""
        self.shape, self.rank_of = shape, rank_of
        self.letters = {}
        self.sent = []  # kept until the step is over

    def link(self):
        return PointToPoint(
            receive_forward=partial(self._receive, True, -1),
            send_forward=partial(self._send, True, 1),
            receive_backward=partial(self._receive, False, 1),
            send_backward=partial(self._send, False, -1),
        )

    def close(self):
        for request, _ in self.sent:
            request.wait()
        assert not self.letters

    def _place(self, stage):
        return stage.chunk * self.shape.num_ranks + self.shape.rank

    def _tag(self, is_forward, stage, place):
        num_stages = self.shape.num_chunks * self.shape.num_ranks
        return (stage.micro_batch * num_stages + place) * 2 + is_forward

    def _send(self, is_forward, step, stage, tensor):
        there = self._place(stage) + step
        tag = self._tag(is_forward, stage, there)
        assert not tensor.requires_grad and tensor.shape == HIDDEN
        if there % self.shape.num_ranks == self.shape.rank:
            self.letters[tag] = tensor.clone()
            return
        kept = tensor.contiguous()
        rank = self.rank_of(there % self.shape.num_ranks)
        self.sent.append((dist.isend(kept, rank, tag=tag), kept))

    def _receive(self, is_forward, step, stage):
        here = self._place(stage)
        tag = self._tag(is_forward, stage, here)
        if (here + step) % self.shape.num_ranks == self.shape.rank:
            return self.letters.pop(tag)
        tensor = torch.empty(HIDDEN)
        dist.recv(tensor, self.rank_of((here + step) % self.shape.num_ranks), tag=tag)
        return tensor


class Part:
    """The chunks of `full` that a rank holds; layers are dealt out evenly, in order."""

    def __init__(self, full, shape):
        self.shape = shape
        num_stages = shape.num_ranks * shape.num_chunks
        count = len(full.layers) // num_stages
        assert count * num_stages == len(full.layers)
        self.chunks = []
        for chunk in range(shape.num_chunks):
            first = (chunk * shape.num_ranks + shape.rank) * count
            self.chunks.append(
                ModelChunk(
                    list(full.layers[first : first + count]),
                    embedding=full.embedding if shape.is_first(chunk) else None,
                    output_layer=full.output_layer if shape.is_last(chunk) else None,
                    config=full.config,
                    vp_stage=chunk,
                )
            )
        held = {id(weight) for chunk in self.chunks for weight in chunk.parameters()}
        self._named = [(n, w) for n, w in full.named_parameters() if id(w) in held]

    def named_parameters(self):
        return self._named

    def parameters(self):
        return [weight for _, weight in self._named]

    def modules(self):
        return (part for chunk in self.chunks for part in chunk.modules())

    def build(self, batches, stage: VirtualStage):
        arguments = dict(batches[stage.micro_batch])
        if not self.shape.is_first(stage.chunk):
            arguments["input_ids"] = arguments["position_ids"] = None
        name = f"m{stage.micro_batch}.c{stage.chunk}"
        return self.chunks[stage.chunk].build_schedule_plan(**arguments, name=name)


def interleaved(part, batches, scale, rank_of=lambda pipeline_rank: 0):
    """A way to train for `overlap_cases.train`."""
    mail = Mail(part.shape, rank_of)
    losses = combined_1f1b_schedule_for_interleaved_pipelining(
        part.shape,
        partial(part.build, batches),
        mail.link(),
        output_grad=lambda out: torch.full_like(out, scale),
    )
    mail.close()
    return losses
