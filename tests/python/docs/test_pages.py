# SPDX-License-Identifier: Apache-2.0
"""The pages about PyTorch are true: their code runs, and the names of Weft that they say exist.

A marker in a line of its own before a Python block says what to do with it:
  <!-- ranks -->      on 2 ranks; the marked blocks of a page go on from one another
  <!-- process -->    in an interpreter of its own
  <!-- file NAME -->  saved as NAME in a folder in front of PYTHONPATH
  <!-- torchrun -->   in two processes that torchrun starts
"""

import importlib
import os
import re
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[3]
DOCS = ROOT / "docs"
FRAMEWORKS = ("megatron", "automodel", "vllm", "sglang")
PAGES = ("../README", "pytorch", "wire", "balance", "overlap", "compat", "signatures", *FRAMEWORKS)
KIND = r"ranks|process|torchrun|file \S+"
BLOCK = re.compile(rf"^(?:<!-- ({KIND}) -->\n)?```python\n(.*?)^```$", re.M | re.S)
FENCE = re.compile(r"^```(\w*)\n.*?^```$", re.M | re.S)
OF_TOOLS = "results|output|peers|gpus|bounds|end|quote"  # markers of render_results and check_docs
MARKER = re.compile(rf"^<!-- (?!(?:{OF_TOOLS}) ).* -->$", re.M)
NAME = re.compile(r"\bweft(?:\.[A-Za-z_]\w*)+")
MEMBER = re.compile(r"`(plan|exchange)\.(\w+)")


def text_of(page):
    return (DOCS / f"{page}.md").read_text()


def blocks_of(page, kind):
    """The blocks whose marker begins with `kind`, each with the rest of its marker."""
    found = [(marker.split(), body) for marker, body in BLOCK.findall(text_of(page)) if marker]
    return [(marker[1:], body) for marker, body in found if marker[0] == kind]


def names_of(page):
    """Names `weft.*` in prose and Python of a page, but not in shell lines."""
    text = text_of(page)
    shell = [block.group() for block in FENCE.finditer(text) if block.group(1) != "python"]
    for block in shell:
        text = text.replace(block, "")
    return sorted(set(NAME.findall(text)))


def resolve(name):
    """The module or the attribute that `name` stands for."""
    parts = name.split(".")
    found = importlib.import_module(parts[0])
    for i, part in enumerate(parts[1:], start=2):
        if not hasattr(found, part):
            importlib.import_module(".".join(parts[:i]))
        found = getattr(found, part)
    return found


def interpreter(code, *paths):
    """Runs `code` in a new interpreter that looks into `paths` first. Returns what it printed."""
    given = [*map(str, paths), os.environ.get("PYTHONPATH", "")]
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, given))},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def distinct(kind):
    """(rest of the marker, block) of all pages, once each: several pages say the same."""
    return sorted(
        {(" ".join(rest), body) for page in PAGES for rest, body in blocks_of(page, kind)}
    )


def on_rank(rank, num_ranks, group, page):
    torch.manual_seed(rank)
    module = types.ModuleType(f"page_{page}")
    sys.modules[module.__name__] = module  # torch.compile imports the modules of functions
    scope = vars(module)
    for _, body in blocks_of(page, "ranks"):
        exec(compile(body, f"{page}.md", "exec"), scope)
    members = MEMBER.findall(text_of(page))
    return [f"{one}.{name}" for one, name in members if not hasattr(scope[one], name)]


@pytest.mark.parametrize("page", [page for page in PAGES if blocks_of(page, "ranks")])
def test_blocks_run_on_ranks(ranks, page):
    assert ranks(on_rank, 2, page) == [[], []]


@pytest.mark.parametrize("body", [body for _, body in distinct("process")])
def test_blocks_run_in_a_process(body):
    interpreter(body)


@pytest.mark.parametrize("body", [body for _, body in distinct("torchrun")])
def test_blocks_run_under_torchrun(body, tmp_path):
    script = tmp_path / "block.py"
    script.write_text(body)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    done = subprocess.run(
        [*torchrun, "--nproc-per-node", "2", script], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(("name", "body"), distinct("file"))
def test_file_gives_the_name_to_whoever_asks(name, body, tmp_path):
    """Also where the real library is installed."""
    for folder, text in (("ours", body), ("real", "raise SystemExit('the real one')\n")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / name).write_text(text)
    shown = interpreter(
        """
import importlib.util
assert importlib.util.find_spec("deep_ep") is not None
from deep_ep.utils import EventHandle, EventOverlap
from deep_ep import Buffer, Config, ElasticBuffer, HybridEPBuffer
import deep_ep
assert importlib.util.find_spec("deep_ep") is not None and deep_ep.Buffer is Buffer
print(deep_ep.__file__)
""",
        tmp_path / "ours",
        tmp_path / "real",
    )
    assert shown.strip().endswith(str(Path("weft", "compat", "deep_ep", "__init__.py")))


@pytest.mark.parametrize("page", FRAMEWORKS)
def test_framework_pages_say_how_to_put_weft_in_place(page):
    assert blocks_of(page, "file") and "## Check" in text_of(page) and "## Back" in text_of(page)


@pytest.mark.parametrize("page", PAGES)
def test_names_exist(page):
    names = names_of(page)
    assert names
    for name in names:
        resolve(name)


@pytest.mark.parametrize("page", PAGES)
def test_markers_are_known(page):
    """A marker that is misspelt, or not right before its block, would be passed over."""
    marked = sum(len(blocks_of(page, kind)) for kind in ("ranks", "process", "torchrun", "file"))
    assert len(MARKER.findall(text_of(page))) == marked


def test_a_wrong_name_is_found():
    for name in ("weft.Exchanger", "weft.compat.deep_ep.Buffers", "weft.nothing"):
        with pytest.raises((ImportError, AttributeError)):
            resolve(name)
