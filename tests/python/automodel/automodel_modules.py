# SPDX-License-Identifier: Apache-2.0
"""NeMo Automodel's two modules as they come from PyPI, over Weft's deep_ep, and Weft's in their
place: what holds for the first has to hold for the second."""

import ast
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from unittest.mock import patch

import torch

from packages import skip_without

skip_without("nemo_automodel", "nemo-automodel")

PACKAGE = "nemo_automodel.components.moe.megatron"
NAMES = ("fused_a2a", "token_dispatcher")
WHOSE = ("automodel", "weft")


def source(module: str) -> Path:
    """The file of a module of Automodel, which is not imported."""
    return Path(find_spec("nemo_automodel").origin).parent.joinpath(*module.split(".")[1:])


def modules(whose: str) -> tuple[ModuleType, ModuleType]:
    """fused_a2a and token_dispatcher: "automodel"'s own, or "weft"'s."""
    import weft.compat
    import weft.dispatcher
    import weft.fused_a2a
    from weft.compat import uccl

    if whose == "weft":
        return weft.fused_a2a, weft.dispatcher
    weft.compat.install(force=True)
    try:
        from nemo_automodel.components.moe.megatron import fused_a2a, token_dispatcher
    finally:
        weft.compat.uninstall()
    # UCCL's classes must be given to it one by one.
    fused_a2a.UCCLBuffer = uccl.UCCLBuffer
    fused_a2a.UCCLEventHandle = uccl.EventHandle
    fused_a2a.UCCLEventOverlap = uccl.EventOverlap
    return fused_a2a, token_dispatcher


@contextmanager
def in_place(whose: str) -> Iterator[tuple[ModuleType, ModuleType]]:
    """Has imports inside find these two modules."""
    found = modules(whose)
    names = [f"{PACKAGE}.{name}" for name in NAMES]
    with patch.dict(sys.modules, dict(zip(names, found))):
        yield found


@contextmanager
def without_gpu() -> Iterator[None]:
    """Answers what Automodel's own code asks of a GPU on its way, where there is none."""
    answers = {"synchronize": lambda device=None: None, "get_device_capability": lambda: (9, 0)}
    with ExitStack() as stack:
        if not torch.cuda.is_available():
            stack.enter_context(patch.multiple(torch.cuda, **answers))
        yield


def function_of(module: str, name: str, **namespace: object):
    """A function of Automodel taken out of a module that needs more packages than there are."""
    tree = ast.parse(source(module).with_suffix(".py").read_text())
    found = [node for node in tree.body if getattr(node, "name", None) == name]
    exec(compile(ast.Module(found, []), module, "exec"), namespace)
    return namespace[name]
