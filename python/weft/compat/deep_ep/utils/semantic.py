# SPDX-License-Identifier: Apache-2.0
"""Small helpers that programs written for `deep_ep` import from it."""

import functools
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

__all__ = ["value_or", "weak_lru"]

_Value = TypeVar("_Value")
_Function = TypeVar("_Function", bound=Callable[..., Any])


def value_or(value: _Value | None, default: _Value) -> _Value:
    """value, or default if it is None."""
    return default if value is None else value


def weak_lru(maxsize: int | None = 128, typed: bool = False) -> Callable[[_Function], _Function]:
    """`functools.lru_cache` for methods, one for each object, which it does not keep alive."""

    def decorate(method: _Function) -> _Function:
        caches: weakref.WeakKeyDictionary[Any, Callable[..., Any]] = weakref.WeakKeyDictionary()

        @functools.wraps(method)
        def call(self: Any, *args: Any, **options: Any) -> Any:
            if self not in caches:
                kept = weakref.ref(self)
                caches[self] = functools.lru_cache(maxsize, typed)(
                    lambda *args, **options: method(kept(), *args, **options)
                )
            return caches[self](*args, **options)

        return call

    return decorate
