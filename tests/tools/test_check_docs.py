# SPDX-License-Identifier: Apache-2.0
import pytest
from run_tool import run_tool, write_tree

PROGRAM = """\
#!/bin/sh
case "$1" in
  --help) echo "weft: info bench" ;;
  bench) echo "bench: --json FILE  --ranks N" ;;
  say) shift; printf "%s\\n" "$@" ;;
  *) exit 2 ;;
esac
"""
TREE = {
    "Makefile": "demo: ## it\n\ttrue\n",
    "CMakePresets.json": '{"configurePresets": [{"name": "cpu"}]}',
    "src/plan/plan.cpp": 'getenv("WEFT_LOG")',
    "scripts/demo": "",
    "examples/a.cpp": "int main() {\n  call();\n\n  more();\n  end();\n}\n",
    "docs/launch.md": "",
    "tests/plan_test.cpp": "TEST_F(PlanTest, IsMade) {}\nTEST_P(\n    PlanTest, IsRefused\n) {}\n",
    "tests/test_plan.py": "def test_plan(ranks):\n    pass\n",
}


def check(tmp_path, text, *arguments):
    root = write_tree(tmp_path / "tree", TREE | {"README.md": text})
    program = write_tree(tmp_path, {"weft": PROGRAM}) / "weft"
    program.chmod(0o755)
    return run_tool("check_docs", root, "--programs", program, *arguments)


GOOD = """\
See `src/plan`, `plan.cpp`, `src/*/plan.cpp`, [launch](docs/launch.md), [web](https://x.y) and
`/dev/shm`, `a/b ratio`, `make demo`, `WEFT_LOG=debug`, `weft bench --json FILE`;
`PlanTest.IsMade`, `PlanTest.IsRefused`, `PlanTest.*`, `tests/test_plan.py::test_plan`.

```sh
make demo           # trains
cmake --workflow --preset cpu
build/cpu/weft bench --ranks 2
scripts/demo
```

<!-- quote examples/a.cpp -->
```cpp
int main() {
  call();
  // ... and so on
  end();
```
"""


def test_accepts_a_true_document(tmp_path):
    assert check(tmp_path, GOOD) == (0, "check_docs: 2 documents are true\n")


@pytest.mark.parametrize(
    "text, problem",
    [
        ("`src/plan/gone.cpp`", "src/plan/gone.cpp does not exist"),
        ("`gone.hpp`", "no file is called gone.hpp"),
        ("`src/*/gone.cpp`", "src/*/gone.cpp does not exist"),
        ("`PlanTest.Gone`", "no test is called PlanTest.Gone"),
        ("`GoneTest.*`", "no test is called GoneTest.*"),
        ("`tests/test_plan.py::test_gone`", "no test is called tests/test_plan.py::test_gone"),
        ("[gone](docs/gone.md)", "docs/gone.md does not exist"),
        ("`make gone`", "make has no target gone"),
        ("```sh\nmake gone\n```", "make has no target gone"),
        ("```sh\ncmake --workflow --preset gone\n```", "no preset is called gone"),
        ("```sh\nscripts/gone --now\n```", "scripts/gone does not exist"),
        ("`weft gone --json x`", "weft has no subcommand gone"),
        ("`weft bench --gone`", "weft bench has no option --gone"),
        ("`weft bench --js x`", "weft bench has no option --js"),
        ("Set WEFT_GONE.", "nothing reads WEFT_GONE"),
        ("word " * 25, "a line of 125 characters (at most 120): word word"),
        ("<!-- quote examples/a.cpp -->\n```cpp\nother();\n```", "does not go on with: other();"),
        ("<!-- quote examples/a.cpp -->\n```cpp\ncall();\nend();\n```", "does not go on with: end();"),
        ("<!-- quote examples/gone.cpp -->\n```cpp\ncall();\n```", "examples/gone.cpp does not exist"),
    ],
)
def test_refuses(tmp_path, text, problem):
    status, out = check(tmp_path, text + "\n")
    assert status == 1
    assert f"README.md: {problem}" in out or problem in out


def test_refuses_a_source_comment_that_names_a_missing_document(tmp_path):
    write_tree(tmp_path / "tree", {"src/a.hpp": "// See docs/gone.md and docs/launch.md.\n"})
    status, out = check(tmp_path, GOOD)
    assert status == 1
    assert out.startswith("src/a.hpp: docs/gone.md does not exist\ncheck_docs: 1 findings")


def test_runs_marked_blocks_only(tmp_path):
    text = "<!-- run -->\n```sh\ntouch ran\n```\n\n```sh\ntouch did_not_run\n```\n"
    assert check(tmp_path, text, "--run")[0] == 0
    assert (tmp_path / "tree/ran").exists() and not (tmp_path / "tree/did_not_run").exists()


def test_reports_a_marked_block_that_fails(tmp_path):
    status, out = check(tmp_path, "<!-- run -->\n```sh\nexit 3\n```\n", "--run")
    assert status == 1
    assert "README.md: exit status 3" in out


QUOTE = "before\n<!-- output weft say a 'b  c' -->\n```text\nold\n```\nafter\n" * 2
FILLED = QUOTE.replace("old", "a\nb  c")


def test_fills_blocks_with_outputs_and_then_finds_them_true(tmp_path):
    status, out = check(tmp_path, QUOTE, "--outputs", "check")
    assert status == 1 and "README.md: weft say a 'b  c' prints something else" in out
    readme = tmp_path / "tree/README.md"
    assert readme.read_text() == QUOTE
    assert check(tmp_path, QUOTE, "--outputs", "write")[0] == 0
    assert readme.read_text() == FILLED
    assert check(tmp_path, FILLED, "--outputs", "check") == (0, "check_docs: 2 documents are true\n")


@pytest.mark.parametrize(
    "text, problem",
    [
        ("<!-- output weft gone -->\n```text\nold\n```\n", "README.md: weft gone ended with 2"),
        ("<!-- output weft say -->\n\n```text\n```\n", "README.md: no ```text block follows output weft say"),
    ],
)
def test_leaves_a_block_that_it_cannot_fill(tmp_path, text, problem):
    status, out = check(tmp_path, text, "--outputs", "write")
    assert status == 1 and problem in out
    assert (tmp_path / "tree/README.md").read_text() == text


def test_leaves_outputs_of_programs_that_are_not_built(tmp_path):
    assert check(tmp_path, QUOTE.replace("weft", "other"), "--outputs", "check")[0] == 0
