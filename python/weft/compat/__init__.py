# SPDX-License-Identifier: Apache-2.0
"""Weft under other libraries' names, so that programs written for those run unchanged.

    import weft.compat
    weft.compat.install()      # now `import deep_ep` and `import uccl.ep` find Weft

Without `install`, import `weft.compat.deep_ep` and `weft.compat.uccl`.
"""

import importlib
import importlib.abc
import importlib.util
import sys
import threading
from collections.abc import Iterable, Sequence
from importlib.machinery import ModuleSpec
from importlib.metadata import Distribution, DistributionFinder, MetadataPathFinder
from types import ModuleType

from weft import InvalidArgument, NotAvailable
from weft.run import FOLDERS

__all__ = ["install", "uninstall"]

# Sources of each name and of the modules below it.
_SOURCES = {
    "deep_ep": [
        "deep_ep",
        "deep_ep.buffer",
        "deep_ep.buffers",
        "deep_ep.buffers.elastic",
        "deep_ep.buffers.ep",
        "deep_ep.buffers.legacy",
        "deep_ep.comm",
        "deep_ep.hybrid_ep_buffer",
        "deep_ep.utils",
        "deep_ep.utils.envs",
        "deep_ep.utils.event",
        "deep_ep.utils.math",
        "deep_ep.utils.semantic",
        "deep_ep.utils.testing",
    ],
    "moonep": ["moonep", "moonep._C"],
    "nixl_ep": ["nixl_ep", "nixl_ep.buffer"],
    "uccl": ["uccl", "uccl.ep"],
    "ultra_ep": ["ultra_ep"],
    "transformer_engine.pytorch.ep": ["transformer_engine.pytorch.ep"],  # below the real package
}
_MODULES = {  # others by their names
    "deep_ep.buffer": "weft.compat.deep_ep",
    "deep_ep.buffers": "weft.compat.deep_ep",
    "deep_ep.buffers.elastic": "weft.compat.deep_ep",
    "deep_ep.buffers.ep": "weft.compat.deep_ep",
    "deep_ep.buffers.legacy": "weft.compat.deep_ep",
    "deep_ep.hybrid_ep_buffer": "weft.compat.deep_ep.hybrid_ep",
    "nixl_ep.buffer": "weft.compat.nixl_ep",
    "transformer_engine.pytorch.ep": "weft.compat.te_ep",
}

NAMES = tuple(_SOURCES)  # what Weft stands for

_lock = threading.Lock()
_replaced: dict[str, dict[str, ModuleType]] = {}  # by name, what was in sys.modules


def install(names: str | Iterable[str] = ("deep_ep", "uccl"), force: bool = False) -> None:
    """Registers Weft's modules under these names; skips names that are registered already.

    Call it before anything imports them, in each process. An installation of the real library is
    not hidden: `weft.NotAvailable` names its path, and nothing is registered. force: hides it until
    `uninstall`. "transformer_engine.pytorch.ep" needs Transformer Engine, else NotAvailable.
    InvalidArgument for an unknown name.
    """
    wanted = _known(names)
    with _lock:
        wanted = [name for name in wanted if name not in _replaced]
        for name in wanted:
            _import_parent(name)
        if not force:
            for name in wanted:
                _refuse_real(name)
        for name in wanted:
            aliases = {
                alias: importlib.util.module_from_spec(_spec_of(alias)) for alias in _SOURCES[name]
            }
            for module in aliases.values():
                _finder.exec_module(module)
            _replaced[name] = _take_modules(name)
            sys.modules.update(aliases)
            for alias, module in aliases.items():
                parent, _, child = alias.rpartition(".")
                if parent:
                    setattr(sys.modules[parent], child, module)
        if _replaced and _finder not in sys.meta_path:
            sys.meta_path.insert(0, _finder)


def uninstall(names: str | Iterable[str] = ("deep_ep", "uccl")) -> None:
    """Undoes `install` and restores the modules from before. Imported names stay."""
    with _lock:
        for name in _known(names):
            if name in _replaced:
                _take_modules(name)
                before = _replaced.pop(name)
                sys.modules.update(before)
                parent, _, child = name.rpartition(".")
                if parent:
                    _set_child(sys.modules.get(parent), child, before.get(name))
        if not _replaced and _finder in sys.meta_path:
            sys.meta_path.remove(_finder)


def _known(names: str | Iterable[str]) -> list[str]:
    wanted = [names] if isinstance(names, str) else list(names)
    for name in wanted:
        if name not in _SOURCES:
            raise InvalidArgument(
                f"install: name = '{name}' is unknown (one of: {', '.join(_SOURCES)})"
            )
    return wanted


def _import_parent(name: str) -> None:
    parent = name.rpartition(".")[0]
    if not parent:
        return
    try:
        importlib.import_module(parent)
    except ImportError as error:
        raise NotAvailable(
            f"install: {name}: {parent} cannot be imported ({error})", "not available"
        ) from error


def _set_child(parent: ModuleType | None, child: str, module: ModuleType | None) -> None:
    if parent is None:
        return
    if module is not None:
        setattr(parent, child, module)
    elif hasattr(parent, child):
        delattr(parent, child)


def _refuse_real(name: str) -> None:
    module = sys.modules.get(name)
    try:
        spec = module.__spec__ if module is not None else importlib.util.find_spec(name)
    except (ImportError, ValueError, AttributeError):
        spec = None
    if module is None and spec is None:
        return
    path = getattr(spec, "origin", None) or getattr(module, "__file__", None)
    if path is None:  # a package without __init__.py
        path = ", ".join(getattr(spec, "submodule_search_locations", None) or ["unknown path"])
    raise NotAvailable(
        f"install: {name} is installed at {path} (remove it, or force=True to use Weft instead)",
        "not available",
    )


def _take_modules(name: str) -> dict[str, ModuleType]:
    """Removes module `name` and all below from sys.modules."""
    below = name + "."
    found = [one for one in sys.modules if one == name or one.startswith(below)]
    return {one: sys.modules.pop(one) for one in found}


class _Finder(DistributionFinder, importlib.abc.Loader):
    """Finds installed modules also for `find_spec` before an import and for `reload`, and the
    version of the distribution."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        del path, target
        is_known = any(name in _SOURCES[one] for one in _replaced)
        return _spec_of(name) if is_known else None

    def exec_module(self, module: ModuleType) -> None:
        """Copies the public names of Weft's module into `module`, a separate object."""
        source = _source_of(module.__name__)
        module.__doc__ = source.__doc__
        module.__file__ = source.__file__
        module.__all__ = list(source.__all__)
        for public in source.__all__:
            setattr(module, public, getattr(source, public))
        if hasattr(source, "__getattr__"):  # changing names
            module.__getattr__ = source.__getattr__

    def find_distributions(
        self, context: DistributionFinder.Context | None = None
    ) -> Iterable[Distribution]:
        folders = [str(FOLDERS / name) for name in _replaced]
        wanted = DistributionFinder.Context(name=context and context.name, path=folders)
        return MetadataPathFinder.find_distributions(wanted)


_finder = _Finder()


def _source_of(name: str) -> ModuleType:
    return importlib.import_module(_MODULES.get(name, f"weft.compat.{name}"))


def _spec_of(name: str) -> ModuleSpec:
    """Makes a spec. A package's path is empty, so that no submodule is imported twice."""
    source = _source_of(name)
    is_package = hasattr(source, "__path__")
    return ModuleSpec(name, _finder, origin=source.__file__, is_package=is_package)
