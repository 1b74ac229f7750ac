# SPDX-License-Identifier: Apache-2.0
"""Weft: expert-parallel exchange of Mixture-of-Experts tokens.

exchange = weft.Exchange(process_group, hidden=H, num_experts=E)
plan = exchange.plan(topk_idx)
rows, row_weights, _ = weft.dispatch(plan, x, topk_weights)
x, _ = weft.combine(plan, experts(rows) * row_weights)

Names and submodules are imported when they are first used: the program `weft` needs no torch.
"""

from importlib import import_module as _import_module
from importlib.util import find_spec as _find_spec
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from weft._public import *  # noqa: F403
    from weft._public import __all__, __version__  # noqa: F401


def __getattr__(name: str) -> Any:
    if name == "_core":
        _import_module("torch")  # before ours, as in _public.py
    if not name.startswith("__") and _find_spec(f"weft.{name}"):
        return _import_module(f"weft.{name}")
    public = _import_module("weft._public")
    if name != "__all__" and name not in public.__all__:
        raise AttributeError(f"module 'weft' has no attribute {name!r}", name=name, obj=public)
    globals()[name] = found = getattr(public, name)
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__getattr__("__all__")})
