# SPDX-License-Identifier: Apache-2.0
"""Which inputs go right after the forward that read them, and how."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch

from weft.dispatcher import MoEAlltoAllTokenDispatcher
from weft.dispatcher.config import option

Tensor = torch.Tensor


class FreedInputs(NamedTuple):
    """Whether a node of an MoE layer gives up its input. pre_dispatch and dense layers never do."""

    moe_dispatch: bool = False
    mlp: bool = False
    moe_combine: bool = False


def freed_inputs(dispatcher: Any, preprocess_in_graph: bool = False) -> FreedInputs:
    """The rules for a token dispatcher.

    Experts in FP8 or FP4 save a copy of their own. One expert on its own behind the all-to-all
    gets the rows as they arrived, and saves them; the other dispatchers permute them first, except
    where they say that received rows are the experts' input ("hybridep" and "ncclep" if they say
    nothing). Flex backends keep what they sent.
    preprocess_in_graph: the input of moe_dispatch is static memory of a CUDA graph.
    The experts' last operation must not save its output, which moe_combine frees.
    """
    config = dispatcher.config
    is_alltoall = isinstance(dispatcher, MoEAlltoAllTokenDispatcher)
    backend = None if is_alltoall else option(config, "moe_flex_dispatcher_backend")
    is_low_precision = bool(option(config, "fp8") or option(config, "fp4"))
    has_permute = dispatcher.num_local_experts > 1 or not is_alltoall
    by_name = backend in ("hybridep", "ncclep")
    reads_received = getattr(dispatcher, "experts_read_received_rows", by_name)
    return FreedInputs(
        # "uccl_ep" is DeepEP's interface.
        moe_dispatch=backend not in ("deepep", "uccl_ep", "hybridep", "ncclep")
        and not preprocess_in_graph,
        mlp=is_low_precision or (has_permute and not reads_received),
        moe_combine=True,
    )


def free_storage(inputs: Iterable[Any], kept: Iterable[Any]) -> None:
    """Frees the memory of the tensors in `inputs`; shapes and gradient functions stay.

    Memory that a tensor in `kept` lives in stays: an exchange of one rank hands its input on. So
    does memory that is not torch's to resize: rows that Weft received on a CPU, for one.
    """
    needed = {t.untyped_storage().data_ptr() for t in kept if isinstance(t, Tensor)}
    for tensor in inputs:
        if not isinstance(tensor, Tensor):
            continue
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in needed and storage.resizable():
            storage.resize_(0)
