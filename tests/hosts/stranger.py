# SPDX-License-Identifier: Apache-2.0
"""A rank of another build, as far as the rendezvous goes (src/group/tcp/handshake.hpp): proves the
secret, claims a version and prints what rank 0 makes of it.
usage: stranger.py ADDRESS RANK NUM_RANKS VERSION"""

import ctypes
import hashlib
import hmac
import socket
import struct
import sys
import time

from job import LIMIT_S, PORT, SECRET

MAGIC = b"weft-rv4"
PURPOSE = b"weft rendezvous 4"
FAILURE = 4  # kind of a frame
SODIUM = ctypes.CDLL("libsodium.so.23")


def digest(data, size):
    return hashlib.blake2b(data, digest_size=size, key=PURPOSE).digest()


def sodium(name, size, *arguments):
    """A function of libsodium that fills a buffer."""
    result = ctypes.create_string_buffer(size)
    getattr(SODIUM, name)(result, *arguments)
    return result.raw


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
    SODIUM.sodium_init()
    point = sodium("crypto_core_ristretto255_from_hash", 32, digest(SECRET.encode(), 64))
    factor = sodium("crypto_core_ristretto255_scalar_random", 32)
    own = sodium("crypto_scalarmult_ristretto255", 32, factor, point)
    with connect(address) as connection:
        connection.sendall(MAGIC + own)
        other = receive(connection, 40)[8:]
        shared = sodium("crypto_scalarmult_ristretto255", 32, factor, other)
        key = digest(shared + own + other, 32)
        claim = struct.pack("<Iii", version, rank, num_ranks)
        connection.sendall(claim + hmac.digest(key, b"rank r " + claim, "sha512")[:32])
        if receive(connection, 32) != hmac.digest(key, b"rank 0 " + claim, "sha512")[:32]:
            raise SystemExit("stranger: rank 0 holds another secret")
        kind, _, size = struct.unpack("<IIQ", receive(connection, 16))
        return kind, receive(connection, size).decode()


if __name__ == "__main__":
    kind, text = join(sys.argv[1], *map(int, sys.argv[2:]))
    print("refused" if kind == FAILURE else "welcome", text)
