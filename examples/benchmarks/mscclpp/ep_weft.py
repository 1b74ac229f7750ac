#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Weft in place of MSCCL++'s EP buffer, for its benchmark of low latency (README.md in the folder
above).

torchrun --standalone --nproc-per-node 4 ep_weft.py PATH/ep_bench_ll.py -e 128

Calls are those of `deep_ep.Buffer` over Weft, by MSCCL++'s order of arguments. Rows come in Weft's
memory: of the tensors that a caller gives for outputs only combine's `out` is used. A handle stands
in the result's place of the sources of rows.
"""

from __future__ import annotations

import runpy
import sys
import types

from weft.compat import deep_ep


class Buffer(deep_ep.Buffer):
    """`mscclpp.ext.ep.Buffer`: low-latency calls."""

    def is_available(self) -> bool:
        return True

    def low_latency_dispatch(
        self,
        x,
        topk_idx,
        num_max_dispatch_tokens_per_rank,
        num_experts,
        use_fp8=True,
        async_finish=False,
        return_recv_hook=False,
        *_outputs,
    ):
        """Returns (rows, scales or None, counts, handle, None, event, hook)."""
        rows, counts, handle, event, hook = super().low_latency_dispatch(
            x,
            topk_idx,
            num_max_dispatch_tokens_per_rank,
            num_experts,
            use_fp8=use_fp8,
            async_finish=async_finish,
            return_recv_hook=return_recv_hook,
        )
        rows, scales = rows if use_fp8 else (rows, None)
        return rows, scales, counts, handle, None, event, hook

    def low_latency_combine(
        self,
        x,
        topk_idx,
        topk_weights,
        handle,
        _layout_range,
        _num_max_dispatch_tokens_per_rank,
        _num_experts,
        zero_copy=False,
        async_finish=False,
        return_recv_hook=False,
        out=None,
    ):
        """Returns (sums, event, hook)."""
        return super().low_latency_combine(
            x,
            topk_idx,
            topk_weights,
            handle,
            zero_copy=zero_copy,
            async_finish=async_finish,
            return_recv_hook=return_recv_hook,
            out=out,
        )


def stand_in() -> None:
    """Makes this the module `mscclpp.ext.ep` of this process."""
    names = ("mscclpp", "mscclpp.ext", "mscclpp.ext.ep")
    outer, ext, ep = (types.ModuleType(name) for name in names)
    outer.ext, ext.ep, ep.Buffer = ext, ep, Buffer
    sys.modules |= dict(zip(names, (outer, ext, ep)))


if __name__ == "__main__":
    stand_in()
    del sys.argv[0]
    runpy.run_path(sys.argv[0], run_name="__main__")
