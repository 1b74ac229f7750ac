# SPDX-License-Identifier: Apache-2.0
"""Small helpers that programs import from `deep_ep`."""

import functools
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

__all__ = ["value_or", "weak_lru"]

_Value = TypeVar("_Value")
_Function = TypeVar("_Function", bound=Callable[..., Any])


def value_or(value: _Value | None, default: _Value) -> _Value:
    """Returns value, or default for None."""
    return default if value is None else value


def weak_lru(maxsize: int | None = 128, typed: bool = False) -> Callable[[_Function], _Function]:
    """Caches a method by `functools.lru_cache`, per object, without keeping objects alive."""

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
