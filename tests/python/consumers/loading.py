# SPDX-License-Identifier: Apache-2.0
"""Modules of a program straight from its wheel, unchanged, over Weft's names and over stubs for
everything else that they import."""

import importlib.machinery
import linecache
import re
import sys
import zipfile
from collections.abc import Iterable, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from unittest.mock import patch

import weft.compat
from packages import ROOT

_loaded: dict[str, ModuleType] = {}  # in a process of a rank: by name


def stub(name: str, **contents: object) -> ModuleType:
    module = ModuleType(name)
    vars(module).update(contents)
    return module


def stand_ins(page: str) -> list[str]:
    """The modules that a page of docs/ says stubs stand in for."""
    text = (ROOT / f"docs/{page}.md").read_text()
    (found,) = re.findall(r"^Stand-ins: (.*?)\.$", text, re.M | re.S)
    return re.findall(r"`([\w.]+)`", found)


@contextmanager
def in_place(stubs: Mapping[str, ModuleType]):
    """Stubs can be imported, and the packages above them are empty ones."""
    known = dict(stubs)
    for name in stubs:
        while "." in name:
            name = name.rpartition(".")[0]
            known.setdefault(name, stub(name))
    for name, module in known.items():
        module.__path__ = []
        module.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
        parent, _, child = name.rpartition(".")
        if parent and not hasattr(known[parent], child):
            setattr(known[parent], child, module)
    with patch.dict(sys.modules, known):
        yield


def load(
    wheel: Path, stubs: Mapping[str, ModuleType], modules: Iterable[str], names: Iterable[str]
) -> list[ModuleType]:
    """The modules of the wheel, in this order, once in each process. names: of libraries that Weft
    stands for meanwhile."""
    wanted = list(modules)
    if any(name not in _loaded for name in wanted):
        weft.compat.install(names, force=True)
        try:
            with in_place(stubs), zipfile.ZipFile(wheel) as packed:
                for name in wanted:
                    file = name.replace(".", "/") + ".py"
                    module = stub(name, __file__=f"{wheel}/{file}")
                    module.__package__ = name.rpartition(".")[0]
                    sys.modules[name] = module
                    text = packed.read(file).decode()
                    # Triton reads the sources of its kernels again.
                    lines = text.splitlines(keepends=True)
                    linecache.cache[module.__file__] = (len(text), None, lines, module.__file__)
                    exec(compile(text, module.__file__, "exec"), vars(module))
                    _loaded[name] = module
        finally:
            weft.compat.uninstall(names)
    return [_loaded[name] for name in wanted]
