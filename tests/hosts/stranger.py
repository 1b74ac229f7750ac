# SPDX-License-Identifier: Apache-2.0
"""A rank of another build, as far as the rendezvous goes (src/group/tcp/handshake.hpp): proves the
secret, claims a version and prints what rank 0 makes of it.
usage: stranger.py ADDRESS RANK NUM_RANKS VERSION"""

import hashlib
import hmac
import os
import socket
import struct
import sys
import time

from job import LIMIT_S, PORT, SECRET

MAGIC = b"weft-rdv"
FAILURE = 4  # kind of a frame


def connect(address):
    """Knocks until rank 0 listens."""
    end = time.monotonic() + LIMIT_S
    while True:
        try:
            return socket.create_connection((address, PORT), timeout=LIMIT_S)
        except ConnectionRefusedError:
            if time.monotonic() > end:
                raise
            time.sleep(0.05)


def receive(connection, size):
    received = b""
    while len(received) < size:
        more = connection.recv(size - len(received))
        if not more:
            raise SystemExit("stranger: rank 0 closed the connection")
        received += more
    return received


def join(address, rank, num_ranks, version):
    key = hashlib.blake2b(SECRET.encode(), digest_size=32, key=b"weft rendezvous key").digest()
    own = os.urandom(32)
    with connect(address) as connection:
        connection.sendall(MAGIC + own)
        challenge = receive(connection, 72)
        claim = struct.pack("<Iii", version, rank, num_ranks)
        proof = hmac.digest(key, b"weft rank r " + own + challenge[8:40] + claim, "sha512")[:32]
        connection.sendall(claim + proof)
        kind, _, size = struct.unpack("<IIQ", receive(connection, 16))
        return kind, receive(connection, size).decode()


if __name__ == "__main__":
    kind, text = join(sys.argv[1], *map(int, sys.argv[2:]))
    print("refused" if kind == FAILURE else "welcome", text)
