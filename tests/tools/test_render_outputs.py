# SPDX-License-Identifier: Apache-2.0
import pytest
from run_tool import run_tool, write_tree

QUOTE = "before\n<!-- output weft say a 'b  c' -->\n```text\nold\n```\nafter\n" * 2
FILLED = QUOTE.replace("old", "say\na\nb  c")


@pytest.fixture
def weft(tmp_path):
    """Prints each argument on a line of its own; fails if the first one is `fail`."""
    path = tmp_path / "bin" / "weft"
    path.parent.mkdir()
    path.write_text(
        '#!/bin/sh\n[ "$1" != fail ] || { echo broken >&2; exit 3; }\nprintf "%s\\n" "$@"\n'
    )
    path.chmod(0o755)
    return path


def test_fills_the_blocks_and_then_finds_them_true(tmp_path, weft):
    root = write_tree(
        tmp_path / "tree", {"README.md": QUOTE, "docs/other.md": "<!-- run -->\n```sh\n```\n"}
    )
    assert run_tool("render_outputs", root, "--weft", weft, "--check") == (
        1,
        "README.md: differs from what the program prints\nrender_outputs: 1 findings\n",
    )
    assert (root / "README.md").read_text() == QUOTE
    assert run_tool("render_outputs", root, "--weft", weft)[0] == 0
    assert (root / "README.md").read_text() == FILLED
    assert run_tool("render_outputs", root, "--weft", weft, "--check") == (
        0,
        "render_outputs: 2 blocks are what the program prints\n",
    )


def test_leaves_a_block_whose_command_fails_and_says_why(tmp_path, weft):
    bad = QUOTE.replace("say", "fail", 1)
    root = write_tree(tmp_path / "tree", {"README.md": bad})
    status, said = run_tool("render_outputs", root, "--weft", weft)
    assert status == 1
    assert "README.md: weft fail a 'b  c' ended with 3: broken" in said
    assert (root / "README.md").read_text() == FILLED.replace("say", "fail", 1).replace(
        "say\na\nb  c", "old", 1
    )


def test_a_mark_without_its_block_is_a_finding(tmp_path, weft):
    root = write_tree(
        tmp_path / "tree", {"README.md": "<!-- output weft say -->\n\n```text\n```\n"}
    )
    status, said = run_tool("render_outputs", root, "--weft", weft, "--check")
    assert status == 1
    assert "README.md: no ```text block follows <!-- output weft say -->" in said
