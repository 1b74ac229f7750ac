# SPDX-License-Identifier: Apache-2.0
import subprocess
import sys

import pytest

from weft.config import process


@pytest.mark.parametrize(
    "version, minimum, is_enough",
    [
        ("2.10.0", "2.9.0", True),
        ("2.7.0+abc", "2.7.0", True),
        ("2.7", "2.7.0", True),
        ("2.7.0.dev0+abc", "2.7.0", False),
        ("2.6.9", "2.7.0", False),
        (None, "0.1", False),
    ],
)
def test_minimum(monkeypatch, version, minimum, is_enough):
    monkeypatch.setattr(process, "get_te_version", lambda: version)
    assert process.is_te_min_version(minimum) is is_enough


def test_te_version(monkeypatch):
    monkeypatch.setattr(
        process.metadata, "version", lambda name: {"transformer-engine": "2.4"}[name]
    )
    assert process.get_te_version() == "2.4"

    def missing(name):
        raise process.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(process.metadata, "version", missing)
    assert process.get_te_version() is None


def test_import_needs_neither_megatron_nor_cuda():
    code = (
        "import sys, torch, weft.config as c\n"
        "assert not [m for m in sys.modules if m.startswith(('megatron', 'transformer_engine'))]\n"
        "assert not torch.cuda.is_initialized()\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
