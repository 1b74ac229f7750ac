# SPDX-License-Identifier: Apache-2.0
"""Runs a function of a test file on several ranks, each in a process of its own.

The processes live on between tests: starting one costs seconds, calling one a millisecond. Each
call gets a gloo process group of exactly the wanted size (also torch.distributed's default group).
"""

import contextlib
import faulthandler
import gc
import importlib.util
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
from datetime import timedelta
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
DEADLINE = 60.0  # seconds a call may take

after_call: list = []  # in a process of a rank: what undoes changes that outlive its call


def device_of(rank: int):
    """Device of the tensors of a rank: a GPU where there is one, which ranks may share."""
    import torch

    if not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def _load(path: str):
    """The test module of a file, once per process."""
    name = "ranks_" + path.replace("/", "_").replace(".", "_")
    if name not in sys.modules:
        for folder in (str(HERE), str(Path(path).parent)):
            if folder not in sys.path:
                sys.path.insert(0, folder)
        spec = importlib.util.spec_from_file_location(name, path)
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
    return sys.modules[name]


def _join(rank: int, num_ranks: int, store: str) -> None:
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(store, num_ranks),
        rank=rank,
        world_size=num_ranks,
        timeout=timedelta(seconds=40),
    )


def _serve(rank: int, pipe) -> None:
    """The life of one process: answers calls until the pipe closes."""
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in a shell's background
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    joined = None
    while True:
        try:
            store, num_ranks, path, function, args = pickle.loads(pipe.recv_bytes())
        except EOFError:
            return
        try:
            if joined != store:
                _join(rank, num_ranks, store)
                joined = store
            body = getattr(_load(path), function)
            answer = ("result", body(rank, num_ranks, dist.group.WORLD, *args))
        except BaseException:  # whatever it was, the test shall show it
            answer = ("error", traceback.format_exc())
        while after_call:
            after_call.pop()()
        if torch.cuda.is_available():
            # An exchange that a caught exception has kept gives its memory back, which waits for
            # all kernels of the GPU. In the next test some may wait for what comes after.
            gc.collect()
        pipe.send_bytes(pickle.dumps(answer))


class Ranks:
    def __init__(self) -> None:
        self._context = multiprocessing.get_context("spawn")
        self._workers: list = []
        self._folder = tempfile.TemporaryDirectory(prefix="weft_ranks_")
        self._joined = (0, "")  # size and store of the group that is up
        self._num_groups = 0

    def __call__(
        self,
        body,
        num_ranks: int,
        *args,
        dying: tuple[int, ...] = (),
        seconds: float = DEADLINE,
    ) -> list:
        """dying: ranks whose processes the body kills; their results are None. seconds: that the
        call may take."""
        self._start(num_ranks)
        if self._joined[0] != num_ranks:
            self._num_groups += 1
            self._joined = (num_ranks, f"{self._folder.name}/store{self._num_groups}")
        call = (self._joined[1], num_ranks, body.__code__.co_filename, body.__name__, args)
        workers = self._workers[:num_ranks]
        for _, pipe in workers:
            pipe.send_bytes(pickle.dumps(call))
        answers = self._collect(workers, seconds)
        killed = ("error", f"the process ended with {-signal.SIGKILL}")
        for rank in dying:
            if answers[rank] == killed:
                answers[rank] = ("result", None)
                self._workers[rank] = self._worker(rank)
                self._joined = (0, "")
            elif answers[rank][0] == "result":
                answers[rank] = ("error", "it was to be killed, and has returned")
        faults = [f"rank {r}: {text}" for r, (kind, text) in enumerate(answers) if kind == "error"]
        if faults:
            self.stop()  # the group may be out of step
            pytest.fail("\n".join(faults), pytrace=False)
        return [value for _, value in answers]

    def _start(self, num_ranks: int) -> None:
        # A process that takes a dead one's place must have libfabric's variables of the others.
        os.environ.update(
            GLOO_SOCKET_IFNAME="lo", OMP_NUM_THREADS="1", FI_OFI_RXM_BUFFER_SIZE="1024"
        )
        if len(self._workers) < num_ranks:
            self._joined = (0, "")
        while len(self._workers) < num_ranks:
            self._workers.append(self._worker(len(self._workers)))

    def _worker(self, rank: int) -> tuple:
        ours, theirs = self._context.Pipe()
        process = self._context.Process(target=_serve, args=(rank, theirs), daemon=True)
        process.start()
        theirs.close()
        return process, ours

    def _collect(self, workers, seconds: float) -> list:
        answers = []
        deadline = time.monotonic() + seconds
        for rank, (process, pipe) in enumerate(workers):
            if not pipe.poll(max(deadline - time.monotonic(), 0.0)):
                for late, _ in workers[rank:]:
                    if late.is_alive():
                        os.kill(late.pid, signal.SIGUSR1)  # prints its stacks
                time.sleep(0.5)
                said = []
                for other, (_, end) in enumerate(workers):
                    with contextlib.suppress(EOFError):  # its process has ended
                        if other > rank and end.poll(0):
                            said.append(f"rank {other}: {pickle.loads(end.recv_bytes())[1]}")
                self.stop()
                late = f"rank {rank} did not answer within {seconds:.0f} s"
                pytest.fail("\n".join([late, *said]), pytrace=False)
            try:
                answers.append(pickle.loads(pipe.recv_bytes()))
            except EOFError:
                process.join(5)
                answers.append(("error", f"the process ended with {process.exitcode}"))
        return answers

    def stop(self) -> None:
        for process, pipe in self._workers:
            pipe.close()
            process.kill()
            process.join()
        self._workers.clear()
        self._joined = (0, "")


@pytest.fixture(scope="session")
def ranks():
    """`ranks(body, num_ranks, *args)` -> the results of `body(rank, num_ranks, group, *args)`."""
    pool = Ranks()
    yield pool
    pool.stop()
