# SPDX-License-Identifier: Apache-2.0
"""Streams of CUDA that are the calling thread, for Megatron's schedules on CPU tensors."""

from contextlib import ExitStack, contextmanager, nullcontext
from unittest.mock import patch

import torch
from torch.overrides import TorchFunctionMode


class Stream:
    def __init__(self, device=None, **_):
        self.device = device

    def wait_stream(self, stream):
        pass

    def wait_event(self, event):
        pass

    def record_event(self, event=None):
        return event or Event()


class Event:
    def __init__(self, **_):
        pass

    def record(self, stream=None):
        pass

    def wait(self, stream=None):
        pass

    def synchronize(self):
        pass


class HostTensors(TorchFunctionMode):
    """Tensors that are asked for on a GPU are the CPU's, and say that they are a GPU's."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        del types
        kwargs = dict(kwargs or {})
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            return func(*args).replace("torch.", "torch.cuda.")
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = "cpu"
        return func(*args, **kwargs)


@contextmanager
def host_streams():
    current = Stream()
    stand_ins = {
        "Stream": Stream,
        "Event": Event,
        "current_stream": lambda device=None: current,
        "stream": lambda stream: nullcontext(),
        "current_device": lambda: "cpu",
        "synchronize": lambda device=None: None,
    }
    resize = torch.UntypedStorage.resize_

    def resize_if_possible(storage, size):
        # Rows that Weft received on a CPU are not torch's memory; on GPUs they are.
        return resize(storage, size) if storage.resizable() else storage

    with ExitStack() as stack:
        for name, value in stand_ins.items():
            stack.enter_context(patch.object(torch.cuda, name, value))
        for name in ("range_push", "range_pop", "range"):
            stack.enter_context(patch.object(torch.cuda.nvtx, name, lambda *_: nullcontext()))
        stack.enter_context(patch.object(torch.Tensor, "record_stream", lambda *_: None))
        stack.enter_context(patch.object(torch.UntypedStorage, "resize_", resize_if_possible))
        stack.enter_context(torch._dynamo.config.patch(disable=True))
        yield
