# SPDX-License-Identifier: Apache-2.0
"""Several hosts on one machine: network, name, processes and shared memory of their own.

Each is a set of Linux namespaces held by one process. When that ends, so do all of the host's
processes, and its network is gone; they all end with the process that made them. So nothing has a
name outside, and nothing is left to be cleaned up.
"""

import ctypes
import os
import shutil
import signal
import subprocess
import tempfile

from panel import Panel

START_S = 20
NAMESPACES = ["--net", "--uts", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]

_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None, use_errno=True)


def end_with_parent():
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def child_of(pid):
    """The only one, as seen from here."""
    with open(f"/proc/{pid}/task/{pid}/children") as file:
        return int(file.read().split()[0])


def run(*command):
    """For set-up: takes no failure."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=START_S)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(map(str, command))}: {done.stderr.strip()}")


def obstacle():
    """Why this machine cannot play several hosts; empty if it can."""
    if os.geteuid() != 0:
        return "hosts as network namespaces need root"
    for tool in ("ip", "unshare", "nsenter"):
        if shutil.which(tool) is None:
            return f"{tool} is not installed (packages iproute2, util-linux)"
    if not os.path.exists("/dev/net/tun"):
        return "there is no /dev/net/tun"
    probe = "ip link add br0 type bridge && ip link add va type veth peer name vb"
    try:
        run("unshare", *NAMESPACES, "sh", "-c", probe)
    except (RuntimeError, OSError, subprocess.TimeoutExpired) as error:
        return f"no namespaces here: {error}"
    return ""


class Host:
    """Namespaces, and the process that holds them."""

    def __init__(self, name, address, folder):
        self.name = name
        self.address = address
        self._started = []
        steps = [
            f"hostname {name}",
            f"mount --bind {folder}/hosts /etc/hosts",
            "mount -t tmpfs none /dev/shm",
            "ip link set lo up",
            "echo up",
            "exec sleep infinity",
        ]
        self._holder = subprocess.Popen(
            ["unshare", *NAMESPACES, "sh", "-c", " && ".join(steps)],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            preexec_fn=end_with_parent,
        )
        if self._holder.stdout.readline() != "up\n":
            raise RuntimeError(f"host {name} did not start")
        self.pid = child_of(self._holder.pid)  # of its first process, as seen from outside

    def inside(self, *command, spaces=("net", "uts", "mount", "pid")):
        """Returns the command line that runs `command` on this host."""
        words = [f"--target={self.pid}", *(f"--{space}" for space in spaces), "--", *command]
        return ["nsenter", *map(str, words)]

    def start(self, *command, spaces=("net", "uts", "mount", "pid"), **options):
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        process = subprocess.Popen(
            self.inside(*command, spaces=spaces),
            preexec_fn=end_with_parent,
            **{**pipes, **options},
        )
        self._started.append(process)
        return process

    def join(self, port):
        """Gives an Ethernet port of this host its address."""
        run(*self.inside("ip", "address", "add", f"{self.address}/24", "dev", port))
        run(*self.inside("ip", "link", "set", port, "up"))

    def kill(self):
        """Ends every process at once. The kernel still says farewell to peers; only a host that has
        been cut off before vanishes in silence."""
        if self._holder.poll() is None:
            os.kill(self.pid, signal.SIGKILL)
            for process in self._started:  # a stopped one would never see its child's end
                process.kill()
        self._holder.wait(START_S)
        self._holder.stdout.close()


class Lab:
    """Hosts a, b, c ... plugged into one switch: a bridge on a host of its own, named login, or,
    for links that are worse than that, a Panel."""

    def __init__(self, num_hosts, link=None):
        self.folder = tempfile.mkdtemp(prefix="weft_lab_")
        self.panel = None
        names = ["login"] + [chr(ord("a") + i) for i in range(num_hosts)]
        addresses = {name: f"10.77.0.{i + 1}" for i, name in enumerate(names)}
        with open(f"{self.folder}/hosts", "w") as file:
            file.write("127.0.0.1 localhost\n")
            file.writelines(f"{address} {name}\n" for name, address in addresses.items())
        self._all = []
        try:
            for name in names:
                self._all.append(Host(name, addresses[name], self.folder))
            self.login, *self.hosts = self._all
            if link is None:
                self._build_bridge()
            else:
                self.panel = Panel([host.pid for host in self.hosts], link)
            for host in self.hosts:
                host.join("eth0")
        except BaseException:
            self.close()
            raise

    def _build_bridge(self):
        run(*self.login.inside("ip", "link", "add", "eth0", "type", "bridge"))
        self.login.join("eth0")
        for host in self.hosts:
            # Made outside, each end at once in its place.
            here = ["netns", str(self.login.pid)]
            there = ["peer", "name", "eth0", "netns", str(host.pid)]
            run("ip", "link", "add", f"to_{host.name}", *here, "type", "veth", *there)
            run(*self.login.inside("ip", "link", "set", f"to_{host.name}", "up"))
            self.mend(host)

    def cut(self, host):
        """Pulls the host's plug out of the switch: nothing passes, and nobody is told."""
        run(*self.login.inside("ip", "link", "set", f"to_{host.name}", "nomaster"))

    def mend(self, host):
        run(*self.login.inside("ip", "link", "set", f"to_{host.name}", "master", "eth0"))

    def part(self, one, other):
        """Frames between two hosts go to a port that nobody has: neither hears of the other."""
        for host, peer in ((one, other), (other, one)):
            nobody = ["lladdr", "02:00:00:00:00:01", "nud", "permanent", "dev", "eth0"]
            run(*host.inside("ip", "neighbour", "replace", peer.address, *nobody))

    def close(self):
        if self.panel is not None:
            self.panel.close()
        for host in reversed(self._all):
            host.kill()
        shutil.rmtree(self.folder, ignore_errors=True)

    def __enter__(self):
        return self

    def __exit__(self, *unused):
        self.close()
