# SPDX-License-Identifier: Apache-2.0
"""Ranks on the hosts of a Lab, started as a launcher would."""

import os
import signal
import threading
import time

from lab import child_of

SECRET = "0123456789abcdef0123456789abcdef"
PORT = 29700

# Nothing in these tests takes longer; a sanitizer or a busy machine makes everything slower.
LIMIT_S = 120


def clean_environment():
    """Without what a launcher or a user's shell may have set."""
    ours = ("WEFT_", "OMPI_", "PMIX_", "SLURM_", "FI_")
    launch = ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    kept = {k: v for k, v in os.environ.items() if not k.startswith(ours) and k not in launch}
    # Small buffers: libfabric sets many MB aside for each of these many ranks.
    return {**kept, "OPENBLAS_NUM_THREADS": "1", "FI_OFI_RXM_BUFFER_SIZE": "1024"}


def hand(rank, num_ranks, per_host, address):
    return {
        "WEFT_RANK": rank,
        "WEFT_NUM_RANKS": num_ranks,
        "WEFT_ADDRESS": address,
        "WEFT_PORT": PORT,
    }


def torchrun(rank, num_ranks, per_host, address):
    return {
        "RANK": rank,
        "WORLD_SIZE": num_ranks,
        "LOCAL_RANK": rank % per_host,
        "LOCAL_WORLD_SIZE": per_host,
        "MASTER_ADDR": address,
        "MASTER_PORT": 29500,
        "TORCHELASTIC_RUN_ID": "none",
    }


def mpirun(rank, num_ranks, per_host, address):
    return {
        "OMPI_COMM_WORLD_RANK": rank,
        "OMPI_COMM_WORLD_SIZE": num_ranks,
        "OMPI_COMM_WORLD_LOCAL_SIZE": per_host,
        "PMIX_NAMESPACE": "2719416321",
        "WEFT_ADDRESS": address,
    }


def srun(rank, num_ranks, per_host, address):
    return {
        "SLURM_PROCID": rank,
        "SLURM_NTASKS": num_ranks,
        "SLURM_STEP_NUM_TASKS": num_ranks,
        "SLURM_STEP_NUM_NODES": num_ranks // per_host,
        "SLURM_JOB_ID": 4711,
        "SLURM_STEP_ID": 0,
        "WEFT_ADDRESS": address,
    }


LAUNCHERS = {"hand": hand, "torchrun": torchrun, "mpirun": mpirun, "srun": srun}


class Rank:
    """One process. What it writes is collected as it comes."""

    def __init__(self, host, command, environment):
        self.host = host
        self.out = []
        self.err = []
        self._news = threading.Condition()
        self._process = host.start(*command, env=environment)
        self._readers = [
            threading.Thread(target=self._collect, args=pipe, daemon=True)
            for pipe in ((self._process.stdout, self.out), (self._process.stderr, self.err))
        ]
        for reader in self._readers:
            reader.start()

    def _collect(self, pipe, lines):
        for line in pipe:
            with self._news:
                lines.append(line.rstrip("\n"))
                self._news.notify_all()
        pipe.close()

    def say(self):
        return f"on {self.host.name}: " + "\n".join([*self.out[-40:], *self.err[-20:]])

    def wait_for(self, start, limit_s=LIMIT_S):
        """The first line that begins so."""
        end = time.monotonic() + limit_s
        with self._news:
            while True:
                for line in self.out:
                    if line.startswith(start):
                        return line
                left = end - time.monotonic()
                assert left > 0, f"no line {start!r} within {limit_s} s, {self.say()}"
                self._news.wait(min(left, 0.5))
                ended = self._process.poll() is not None and not self._readers[0].is_alive()
                found = any(line.startswith(start) for line in self.out)
                assert found or not ended, f"it ended without a line {start!r}, {self.say()}"

    def stop(self):
        os.kill(child_of(self._process.pid), signal.SIGSTOP)

    def kill(self):
        os.kill(child_of(self._process.pid), signal.SIGKILL)

    def resume(self):
        """nsenter stops with what it has started, and passes this on."""
        self._process.send_signal(signal.SIGCONT)

    def wait(self, limit_s=LIMIT_S):
        """Its exit code."""
        code = self._process.wait(limit_s)
        for reader in self._readers:
            reader.join(limit_s)
        return code


class Job:
    """`per_host` ranks of `command` on each of `hosts`, host by host. Rank 0 listens on the first
    one's address."""

    def __init__(self, hosts, command, per_host=2, launcher="hand", **variables):
        self.hosts = hosts
        self.command = command
        self.per_host = per_host
        self.num_ranks = per_host * len(hosts)
        self._launcher = LAUNCHERS[launcher]
        self._variables = {"WEFT_SECRET": SECRET, "WEFT_FABRIC_ADDRESS": "eth0", **variables}
        self.ranks = []

    def start(self, rank, command=None, **variables):
        """Starts one rank by hand; all_ranks() starts the rest."""
        host = self.hosts[rank // self.per_host]
        who = self._launcher(rank, self.num_ranks, self.per_host, self.hosts[0].address)
        settings = {**clean_environment(), **who, **self._variables, **variables}
        environment = {k: str(v) for k, v in settings.items() if v is not None}
        started = Rank(host, command or self.command, environment)
        self.ranks.append(started)
        return started

    def start_all(self):
        for rank in range(self.num_ranks):
            self.start(rank)
        return self

    def wait(self, code=0, limit_s=LIMIT_S):
        """All must end with the code; returns rank 0's output."""
        for rank, one in enumerate(self.ranks):
            found = one.wait(limit_s)
            assert found == code, f"rank {rank} ended with {found}, {one.say()}"
        return "\n".join(self.ranks[0].out)
