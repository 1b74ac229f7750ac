# SPDX-License-Identifier: Apache-2.0
"""`weft info` tells what the build and the machine can do."""

import json
import os

from conftest import weft


def info(**extra):
    return json.loads(weft("info", "--json", **extra).stdout)


def test_json_tells_what_was_built():
    build = info()["weft"]
    assert build["version"].startswith("0.")
    assert build["commit"]
    assert "cpu" in build["executors"]
    assert build["layouts"] == ["rank_major", "expert_major", "expert_strided"]
    assert build["combine_dtypes"] == ["bfloat16", "float16", "float32"]
    assert "byte" in build["dispatch_dtypes"]
    assert build["simd"]


def test_json_tells_what_the_machine_has():
    machine = info()["machine"]
    assert machine["usable_cores"] == len(os.sched_getaffinity(0))
    assert machine["memory_bytes"] > machine["available_bytes"] > 0
    assert machine["host"] == os.uname().nodename


def test_transports_say_where_they_work_or_why_not():
    transports = {t["name"]: t for t in info()["transports"]}
    assert transports["loopback"]["between_threads"] == "available"
    assert "threads of one process" in transports["loopback"]["between_processes"]
    assert transports["shm"]["between_processes"] == "available"


def test_fabric_says_which_provider_is_chosen_and_why():
    fabric = json.loads(weft("info", "--fabric", "--json").stdout)["fabric"]
    if not fabric["library"].startswith("libfabric 1"):
        assert fabric["chosen"] == "none" and not fabric["providers"]
        return
    states = {p["name"]: p["state"] for p in fabric["providers"]}
    assert list(states) == ["cxi", "efa", "verbs", "tcp", "shm"]
    assert states[fabric["chosen"]] == "chosen"
    assert fabric["bound_to"] == "127.0.0.1"
    asked = json.loads(weft("info", "--fabric", "--json", WEFT_FABRIC="shm").stdout)["fabric"]
    assert (asked["chosen"], asked["why"]) == ("shm", "asked for by name")
    assert "tcp" in weft("info", "--fabric").stdout


def test_fabric_of_an_unknown_name_is_an_error_that_lists_the_known_ones():
    done = weft("info", "--fabric", code=1, WEFT_FABRIC="avian")
    if "libfabric" not in done.stdout:
        assert "cxi, efa, verbs, tcp, shm" in done.stderr


def test_a_build_without_gpus_says_why():
    gpus = info()["gpus"]
    assert gpus["list"] or gpus["none_because"]
    assert {"ipc", "vmm", "fabric"} <= {entry["gpu_transport"] for entry in gpus["transports"]}


def test_environment_is_shown_but_for_secrets():
    environment = info(WEFT_LOG="error", WEFT_SECRET="do not show this one")["environment"]
    assert environment["WEFT_LOG"] == "error"
    assert environment["WEFT_SECRET"] == "(set)"


def test_tables_split_no_section():
    for section in weft("info").stdout.split("\n\n"):
        lines = section.splitlines()[1:]
        begin = next((i for i, line in enumerate(lines) if line[:1] != " "), len(lines))
        assert not any(line.startswith("  ") for line in lines[begin:]), section


def test_text_holds_what_the_json_holds():
    text = weft("info").stdout
    for word in ("version", "expert_major", "loopback", "shm", "usable cores", "gpus", "environment"):
        assert word in text


def test_a_wrong_variable_is_an_error_that_names_it():
    done = weft("info", code=1, WEFT_LOG="loud")
    assert 'WEFT_LOG = "loud"' in done.stderr
