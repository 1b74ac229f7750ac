# SPDX-License-Identifier: Apache-2.0
from run_tool import run_tool, write_tree

TREE = {
    "src/plan/CMakeLists.txt": "target_sources(weft PRIVATE plan.cpp)",
    "src/plan/plan.cpp": "",
    "tests/unit/CMakeLists.txt": "weft_test(plan_test plan/plan_test.cpp)",
    "tests/unit/plan/plan_test.cpp": "",
    "tests/manifest.txt": "# comment\nAll/Plan.Works\nOther.Works\n",
}
# What a configured and built tree leaves for ctest to read.
BUILT = """\
add_test(All/Plan.Works/0 true)
add_test(All/Plan.Works/1 true)
add_test(Other.Works true)
"""


def check(tmp_path, texts, built=BUILT, *arguments):
    build = write_tree(tmp_path / "out", {"CTestTestfile.cmake": built})
    root = write_tree(tmp_path / "tree", texts)
    return run_tool("check_tests", root, "--build", build, *arguments)


def test_accepts_a_complete_tree(tmp_path):
    assert check(tmp_path, TREE) == (
        0,
        "check_tests: every source is listed, all 2 tests are there\n",
    )


def test_understands_names_made_in_a_loop(tmp_path):
    looped = {
        "tests/unit/CMakeLists.txt": "foreach(x plan) weft_test(t plan/${x}_test.cpp) endforeach()"
    }
    assert check(tmp_path, TREE | looped)[0] == 0
    status, out = check(tmp_path, TREE | looped | {"tests/unit/plan/other_test.cpp": ""})
    assert status == 1
    assert "tests/unit/plan/other_test.cpp: no CMakeLists.txt lists it" in out


def test_refuses_a_test_file_that_no_list_names(tmp_path):
    status, out = check(tmp_path, TREE | {"tests/unit/plan/new_plan_test.cpp": ""})
    assert status == 1
    assert "tests/unit/plan/new_plan_test.cpp: no CMakeLists.txt lists it" in out


def test_refuses_a_source_whose_name_is_only_part_of_a_listed_one(tmp_path):
    status, out = check(tmp_path, TREE | {"src/plan/an.cpp": "", "tests/tools/test_x.py": ""})
    assert status == 1
    assert "src/plan/an.cpp: no CMakeLists.txt lists it" in out
    assert "tests/tools/test_x.py: no CMakeLists.txt lists it" in out


def test_refuses_a_test_that_has_disappeared(tmp_path):
    status, out = check(tmp_path, TREE, "add_test(Other.Works true)\n")
    assert status == 1
    assert "All/Plan.Works: listed in manifest.txt, but not built" in out


def test_refuses_a_test_that_is_not_in_the_manifest(tmp_path):
    status, out = check(tmp_path, TREE, BUILT + "add_test(New.Works true)\n")
    assert status == 1
    assert "New.Works: built, but not listed in manifest.txt" in out


def test_update_writes_the_manifest(tmp_path):
    status, _ = check(tmp_path, TREE, BUILT + "add_test(New.Works true)\n", "--update")
    assert status == 0
    lines = (tmp_path / "tree/tests/manifest.txt").read_text().splitlines()
    assert lines[1:] == ["All/Plan.Works", "New.Works", "Other.Works"]
