# SPDX-License-Identifier: Apache-2.0
"""`weft.compat.install`, each time in an interpreter of its own."""

import ast
import os
import re
import subprocess
import sys
import zipfile
from importlib.util import find_spec
from pathlib import Path

import pytest
from consumer_imports import STATEMENTS, ask_for_deep_ep

from packages import DEEPSPEED, DOWNLOADS
from weft import compat


def run(code: str, *paths: Path) -> str:
    given = [*map(str, paths), os.environ.get("PYTHONPATH", "")]
    found = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, given))},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert found.returncode == 0, found.stderr
    return found.stdout


@pytest.fixture
def real(tmp_path: Path) -> Path:
    """A folder with libraries called deep_ep and uccl."""
    for name in ("deep_ep", "uccl"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("who = 'the real one'\n")
        (tmp_path / name / "utils.py").write_text("who = 'the real one'\n")
    return tmp_path


def test_names_resolve_to_weft():
    run("""
import weft.compat
weft.compat.install()
weft.compat.install()
import importlib, importlib.util
import deep_ep, deep_ep.utils, uccl.ep
from deep_ep import Buffer, Config, ElasticBuffer, EPHandle, HybridEPBuffer, topk_idx_t
from deep_ep import EventHandle, EventOverlap
from deep_ep.utils import EventHandle as Again, EventOverlap as Overlap
from deep_ep.utils.envs import init_dist, get_physical_domain_size
from deep_ep.utils.math import align, calc_diff, per_token_cast_to_fp8
import deep_ep.utils.event
assert deep_ep.utils.math.align is align and deep_ep.utils.event.EventHandle is EventHandle
assert deep_ep.get_physical_domain_size is get_physical_domain_size
assert deep_ep.__version__ == "2.5.0" and uccl.__version__ == uccl.ep.__version__
from uccl import ep
from uccl.ep import Buffer as EPBuffer
import weft.compat.deep_ep, weft.compat.uccl
assert Buffer is weft.compat.deep_ep.Buffer and EPBuffer is weft.compat.uccl.Buffer
assert Again is EventHandle and Overlap is EventOverlap and ep is uccl.ep
for name in ("deep_ep", "deep_ep.utils", "deep_ep.utils.math", "uccl", "uccl.ep"):
    spec = importlib.util.find_spec(name)
    assert spec is not None and spec.name == name, name
    assert importlib.import_module(name).__name__ == name
try:
    import deep_ep.handles
except ModuleNotFoundError as error:
    assert error.name == "deep_ep.handles"
else:
    raise SystemExit("deep_ep.handles was imported a second time")
weft.compat.uninstall()
weft.compat.uninstall()
assert importlib.util.find_spec("deep_ep") is None and importlib.util.find_spec("uccl") is None
weft.compat.install("uccl")
assert importlib.util.find_spec("deep_ep") is None and importlib.util.find_spec("uccl.ep")
""")


def test_programs_find_what_they_import(tmp_path):
    (tmp_path / "transformer_engine" / "pytorch").mkdir(parents=True)
    names = ("deep_ep", "uccl", "moonep", "nixl_ep", "transformer_engine.pytorch.ep")
    head = ["import weft.compat", f"weft.compat.install({names})"]
    run("\n".join([*head, *STATEMENTS]), tmp_path)


def test_programs_learn_the_same_of_deep_ep_as_of_a_package():
    run("import weft.compat\nweft.compat.install()\n" + ask_for_deep_ep())


def imports(text):
    """The statements of a source that import what Weft stands for, as `consumer_imports` writes
    them."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom) and node.level == 0:
            found = [node.module]
        elif isinstance(node, ast.Import):
            found = [one.name for one in node.names]
        else:
            continue
        weft_is = (
            "deep_ep",
            "moonep",
            "nixl_ep",
            "transformer_engine.pytorch.ep",
            "uccl",
            "ultra_ep",
        )
        if any(f"{name}.".startswith(tuple(f"{one}." for one in weft_is)) for name in found):
            node.names.sort(key=lambda one: one.name)
            yield ast.unparse(node)


WEFT_IS = (
    "deep_ep.",
    "moonep.",
    "nixl_ep.",
    "transformer_engine.pytorch.ep.",
    "uccl.",
    "ultra_ep.",
)


def test_all_imports_of_packages_are_in_the_list():
    """The packages are those that are here: scripts/python and `make consumers` bring them."""
    sources: list[str] = []
    for wheel in DOWNLOADS.glob("*.whl"):
        if wheel.name.startswith(("sgl_deep_ep", "nixl")):  # these are what Weft stands for
            continue
        with zipfile.ZipFile(wheel) as packed:
            sources += [packed.read(one).decode() for one in packed.namelist() if one[-3:] == ".py"]
    for package in ("megatron.core", "nemo_automodel"):
        for folder in find_spec(package).submodule_search_locations if find_spec(package) else ():
            sources += [file.read_text() for file in Path(folder).rglob("*.py")]
    sources += [file.read_text() for file in DEEPSPEED.glob("deepspeed/**/*.py")]
    has_name = re.compile("|".join(rf"\b{re.escape(name)}\b" for name in compat.NAMES)).search
    found = {line for one in filter(has_name, sources) for line in imports(one)}
    assert found <= set(STATEMENTS)


def test_nixl_ep_is_installed_if_it_is_asked_for():
    run("""
import importlib.util
import weft.compat
weft.compat.install()
assert importlib.util.find_spec("nixl_ep") is None
weft.compat.install("nixl_ep")
import nixl_ep
from nixl_ep import Buffer, Config, EventHandle, EventOverlap, topk_idx_t
assert Buffer is weft.compat.nixl_ep.Buffer
import nixl_ep.buffer
assert nixl_ep.buffer.Buffer is Buffer
weft.compat.uninstall("nixl_ep")
assert importlib.util.find_spec("nixl_ep") is None
""")


def test_nothing_is_installed_by_import_alone():
    run("""
import importlib.util
import weft.compat, weft.compat.deep_ep, weft.compat.uccl
assert importlib.util.find_spec("deep_ep") is None and importlib.util.find_spec("uccl") is None
""")


@pytest.mark.parametrize("imported", [False, True])
def test_a_real_installation_is_not_covered_up(real, imported):
    told = run(
        f"""
import sys
import weft.compat
if {imported}:
    import deep_ep.utils, uccl
for names in (("deep_ep",), ("uccl",), ("deep_ep", "uccl")):
    try:
        weft.compat.install(names)
    except weft.NotAvailable as error:
        print(error)
    else:
        raise SystemExit("it was covered up")
assert ("deep_ep" in sys.modules) == {imported}
import deep_ep.utils
assert deep_ep.who == deep_ep.utils.who == "the real one"
""",
        real,
    )
    assert str(real / "deep_ep" / "__init__.py") in told
    assert str(real / "uccl" / "__init__.py") in told and "force=True" in told


@pytest.mark.parametrize("imported", [False, True])
def test_force_covers_it_up_until_uninstall(real, imported):
    run(
        f"""
import sys
import weft.compat
if {imported}:
    import deep_ep.utils
weft.compat.install(force=True)
from deep_ep.utils import EventHandle
import deep_ep
assert not hasattr(deep_ep, "who") and deep_ep.Buffer
weft.compat.uninstall()
import deep_ep.utils
assert deep_ep.who == deep_ep.utils.who == "the real one"
""",
        real,
    )


def test_unknown_names_are_refused():
    run("""
import weft, weft.compat
try:
    weft.compat.install(("deep_ep", "deepspeed"))
except weft.InvalidArgument as error:
    assert "deepspeed" in str(error) and "deep_ep, moonep, nixl_ep, uccl" in str(error)
else:
    raise SystemExit("no error")
import sys
assert "deep_ep" not in sys.modules
""")


@pytest.mark.parametrize("has_its_own", [False, True])
def test_a_module_goes_into_the_package_that_there_is(tmp_path, has_its_own):
    package = tmp_path / "transformer_engine" / "pytorch"
    package.mkdir(parents=True)
    (package.parent / "__init__.py").write_text("")
    (package / "__init__.py").write_text("who = 'the real one'\n")
    if has_its_own:
        (package / "ep.py").write_text("who = 'the real one'\n")
    run(
        f"""
import weft.compat
from weft.compat import te_ep
name = "transformer_engine.pytorch.ep"
if {has_its_own}:
    try:
        weft.compat.install(name)
    except weft.NotAvailable as error:
        assert "ep.py" in str(error) and "force=True" in str(error), error
    else:
        raise SystemExit("it was covered up")
weft.compat.install(name, force={has_its_own})
import transformer_engine.pytorch as te
import transformer_engine.pytorch.ep as ep
assert te.who == "the real one" and te.ep is ep
assert ep._BOOTSTRAPPED is False
assert ep.EpBuffer is te_ep.EpBuffer and ep.ep_dispatch is te_ep.ep_dispatch
weft.compat.uninstall(name)
assert not hasattr(te, "ep")
try:
    from transformer_engine.pytorch import ep
except ImportError:
    assert not {has_its_own}
else:
    assert ep.who == "the real one"
""",
        tmp_path,
    )


def test_a_module_without_its_package_is_told():
    told = run("""
import weft.compat
try:
    weft.compat.install("transformer_engine.pytorch.ep")
except weft.NotAvailable as error:
    print(error)
""")
    assert "transformer_engine.pytorch cannot be imported (No module named" in told
