# SPDX-License-Identifier: Apache-2.0
import pytest
from run_tool import run_tool, write_tree

SOURCE = """
// a comment with store_relaxed_sys(x)
template <class T>
class Role {
  __device__ void tell(T n) const {
    const auto each = [&](int lane) { ptx::store_relaxed_sys(signal + lane, n); };
    if (n > 0) {
      ptx::fence_sys();
      ptx::fence_sys();
    }
  }
  __device__ bool hear() { return ptx::load_acquire_sys(signal) == 1; }
};
"""
DOCUMENT = """
| id | what |
|---|---|
| `rows` | rows |

| file | function | what stands there | releases | acquires |
|---|---|---|---|---|
| `src/cuda/a.cuh` | `tell` | `fence_sys` x 2, `store_relaxed_sys` | rows | |
| `src/cuda/a.cuh` | `hear` | `load_acquire_sys` | | rows |
"""


def check(tmp_path, source=SOURCE, document=DOCUMENT):
    texts = {"src/cuda/a.cuh": source, "docs/memory_model.md": document}
    return run_tool("check_memory_model", write_tree(tmp_path, texts))


def test_accepts_what_is_paired(tmp_path):
    assert check(tmp_path) == (0, "check_memory_model: 1 hand-overs, 2 ends, all paired\n")


def test_asks_for_no_release_of_the_callers(tmp_path):
    told = DOCUMENT.replace("| id | what |\n|---|---|", "| id | what | released by |\n|---|---|---|").replace("| rows | |", "| others | |")
    end = "| `src/cuda/a.cuh` | `hear` | `load_acquire_sys` | | rows"
    told = told.replace(end, end + ", others")
    row = "| `rows` | rows | {} |\n| `others` | rows | `tell` |"
    assert check(tmp_path, document=told.replace("| `rows` | rows |", row.format("the caller's kernel")))[0] == 0
    status, out = check(tmp_path, document=told.replace("| `rows` | rows |", row.format("somebody")))
    assert status == 1
    assert "rows has no release" in out


@pytest.mark.parametrize(
    "old, new, problem",
    [
        ("ptx::fence_sys();\n", "", "a.cuh: tell has `fence_sys`, `store_relaxed_sys`, the document says `fence_sys` x 2"),
        ("== 1; }", "== 1; }\n void more() { ptx::fence_sys(); }", "more has `fence_sys`, the document says nothing"),
        ("load_acquire_sys", "load", "hear has nothing, the document says `load_acquire_sys`"),
    ],
)
def test_finds_a_source_that_went_on(tmp_path, old, new, problem):
    status, out = check(tmp_path, source=SOURCE.replace(old, new, 1))
    assert status == 1
    assert problem in out


@pytest.mark.parametrize(
    "old, new, problem",
    [
        ("| | rows |", "| | |", "rows has no acquire"),
        ("| rows | |", "| others | |", "tell names others, which no row explains"),
        ("| rows | |", "| | |", "rows has no release"),
        ("| | rows |", "| | |", "hear serves no hand-over"),
    ],
)
def test_finds_a_hand_over_without_an_end(tmp_path, old, new, problem):
    status, out = check(tmp_path, document=DOCUMENT.replace(old, new, 1))
    assert status == 1
    assert problem in out


MODEL = """// Mutations:
//   NO_WAIT  a wait is missing
"""
MODELS = """
| hand-over | model | mutations that must be found |
|---|---|---|
| `rows` | `call` | `NO_WAIT` |
"""


def check_model(tmp_path, model=MODEL, models=MODELS):
    texts = {"src/cuda/a.cuh": SOURCE, "tests/model/call.pml": model, "docs/memory_model.md": DOCUMENT + models}
    return run_tool("check_memory_model", write_tree(tmp_path, texts))


def test_accepts_a_model_that_is_told(tmp_path):
    assert check_model(tmp_path)[0] == 0


@pytest.mark.parametrize(
    "model, models, problem",
    [
        (MODEL + "//   MORE  another\n", MODELS, "call.pml: MORE stands in the model alone"),
        ("// none", MODELS, "call.pml: NO_WAIT stands in the document alone"),
        (MODEL, MODELS.replace("rows", "others"), "model `call` names others, which no row explains"),
        (MODEL, "", "call.pml: NO_WAIT stands in the model alone"),
    ],
)
def test_finds_a_model_that_differs(tmp_path, model, models, problem):
    status, out = check_model(tmp_path, model, models)
    assert status == 1
    assert problem in out
