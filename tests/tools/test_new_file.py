# SPDX-License-Identifier: Apache-2.0
from run_tool import run_tool


def test_writes_header_source_and_test(tmp_path):
    status, out = run_tool("new_file", tmp_path, "src/plan/slot_map.cpp", "Where rows lie.")
    assert status == 0
    assert "wrote src/plan/slot_map.cpp; list it in src/plan/CMakeLists.txt" in out
    header = (tmp_path / "src/plan/slot_map.hpp").read_text()
    assert header.startswith("// SPDX-License-Identifier: Apache-2.0\n// Where rows lie.\n#pragma once")
    assert '#include "plan/slot_map.hpp"' in (tmp_path / "src/plan/slot_map.cpp").read_text()
    test = (tmp_path / "tests/unit/plan/slot_map_test.cpp").read_text()
    assert "TEST(SlotMapTest, " in test


def test_refuses_to_overwrite(tmp_path):
    arguments = ("new_file", tmp_path, "src/plan/slot_map.cpp", "Where rows lie.")
    assert run_tool(*arguments)[0] == 0
    status, out = run_tool(*arguments)
    assert status == 2
    assert "src/plan/slot_map.hpp exists already" in out


def test_refuses_a_place_outside_the_sources(tmp_path):
    status, out = run_tool("new_file", tmp_path, "apps/x.cpp", "Anything.")
    assert status == 2
    assert "apps/x.cpp is not below src/" in out
