# SPDX-License-Identifier: Apache-2.0
"""How programs look for what Weft stands for."""

from pathlib import Path

_LINES = Path(__file__).with_suffix(".txt").read_text().splitlines()
# Each once, names ascending.
STATEMENTS = sorted({line.partition(": ")[2] for line in _LINES if not line.startswith("#")})


def ask_for_deep_ep() -> str:
    """A program that asks, before it imports it, and loads it again."""
    return """
import importlib, importlib.metadata, importlib.util, inspect, pickle
assert importlib.metadata.version("deep_ep") == "2.5.0"
assert importlib.metadata.distribution("deep-ep").metadata["Name"] == "deep_ep"
assert importlib.metadata.version("uccl") == "0.0.1.post4"
for name in ("deep_ep.utils", "deep_ep.buffers.elastic", "deep_ep", "uccl.ep"):
    spec = importlib.util.find_spec(name)
    assert spec is not None and spec.name == name, name
assert importlib.util.find_spec("deep_ep.nothing") is None
import deep_ep, uccl
assert deep_ep.__version__ == importlib.metadata.version("deep_ep")
assert uccl.__version__ == importlib.metadata.version("uccl")
before = deep_ep.Buffer
for name in ("deep_ep", "deep_ep.utils", "uccl.ep"):
    module = importlib.import_module(name)
    assert importlib.reload(module) is module is importlib.import_module(name)
assert deep_ep.Buffer is before and pickle.loads(pickle.dumps(before)) is before
assert "group" in inspect.signature(deep_ep.Buffer).parameters
"""
