# SPDX-License-Identifier: Apache-2.0
"""A switch whose links are bad: late, lossy, out of order.

It is a thread that hands Ethernet frames from host to host. `tc qdisc ... netem` would do the same,
but many kernels are built without it.
"""

import ctypes
import fcntl
import heapq
import os
import random
import select
import struct
import threading
import time
from dataclasses import dataclass

_CLONE_NEWNET = 0x40000000
_TUNSETIFF = 0x400454CA
_IFF_TAP_NO_PI = 0x1002
_LIBC = ctypes.CDLL(None, use_errno=True)
_FRAME_BYTES = 65536


@dataclass(frozen=True)
class Link:
    """Delay, loss and reordering of frames on their way."""

    delay_s: float = 0.0
    loss: float = 0.0  # probability
    reorder: float = 0.0  # probability of coming 5 ms later than those behind it
    seed: int = 1


class Panel:
    def __init__(self, pids, link):
        """Gives the network of each process `pids` a port eth0."""
        self._link = link
        self._random = random.Random(link.seed)
        self._pids = pids
        self._ports = []
        self._port_of = {}  # by Ethernet address
        self._waiting = []  # heap of (time due, number, port, frame)
        self._count = 0
        self.num_lost = 0
        self.num_late = 0
        self._stop, self._stopped = os.pipe()
        self._is_ready = threading.Event()
        self._problem = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        self._is_ready.wait()
        if self._problem is not None:
            raise self._problem

    def close(self):
        if self._thread.is_alive():
            os.close(self._stopped)
            self._thread.join()
            os.close(self._stop)

    def _run(self):
        try:
            self._ports = [self._open_port(pid) for pid in self._pids]
        except OSError as error:
            self._problem = error
            return
        finally:
            self._is_ready.set()
        try:
            self._pass_frames()
        finally:
            for port in self._ports:
                os.close(port)

    @staticmethod
    def _open_port(pid):
        """Moves this thread, and only it, into the network where the port is to be."""
        network = os.open(f"/proc/{pid}/ns/net", os.O_RDONLY)
        try:
            if _LIBC.setns(network, _CLONE_NEWNET) != 0:
                raise OSError(ctypes.get_errno(), "setns")
        finally:
            os.close(network)
        port = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
        fcntl.ioctl(port, _TUNSETIFF, struct.pack("16sH", b"eth0", _IFF_TAP_NO_PI))
        return port

    def _pass_frames(self):
        poll = select.poll()
        for fd in [self._stop, *self._ports]:
            poll.register(fd, select.POLLIN)
        while True:
            ready = [fd for fd, _ in poll.poll(self._time_left_ms())]
            if self._stop in ready:
                return
            for fd in ready:
                self._take_frames(fd)
            while self._waiting and self._waiting[0][0] <= time.monotonic():
                _, _, port, frame = heapq.heappop(self._waiting)
                self._give(port, frame)

    def _time_left_ms(self):
        if not self._waiting:
            return None
        return max(0.0, 1000 * (self._waiting[0][0] - time.monotonic()))

    def _take_frames(self, port):
        for _ in range(64):  # then the others' turn
            try:
                frame = os.read(port, _FRAME_BYTES)
            except OSError:  # none is left, or the port is not up
                return
            target, source = frame[:6], frame[6:12]
            self._port_of[source] = port
            for out in self._ports:
                if out != port and self._port_of.get(target, out) == out:
                    self._send(out, frame)

    def _send(self, port, frame):
        if self._random.random() < self._link.loss:
            self.num_lost += 1
            return
        due = time.monotonic() + self._link.delay_s
        if self._random.random() < self._link.reorder:
            self.num_late += 1
            due += 0.005
        self._count += 1
        heapq.heappush(self._waiting, (due, self._count, port, frame))

    @staticmethod
    def _give(port, frame):
        try:
            os.write(port, frame)
        except OSError:  # the host is gone or its port is down
            pass
