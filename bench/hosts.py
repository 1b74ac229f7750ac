#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Plays several hosts on this machine (tests/hosts/lab.py) and runs a program on them, as root.

bench/hosts.py                                                     hosts_bench on 4 hosts of 2 ranks
bench/hosts.py --hosts 2 -- --tokens 2048 --json out.json          its options
bench/hosts.py --program build/cpu/apps/weft/weft -- check --quick another program
"""

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests" / "hosts"))

import job  # noqa: E402
import lab  # noqa: E402

LIMIT_S = 3600


def main():
    raw = argparse.RawTextHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--hosts", type=int, default=4)
    parser.add_argument("--ranks-per-host", type=int, default=2)
    parser.add_argument("--program", type=Path, default=ROOT / "build/cpu/bench/hosts_bench")
    parser.add_argument("options", nargs="*", help="of the program, behind --")
    args = parser.parse_args()
    reason = lab.obstacle()
    if reason:
        sys.exit(f"hosts.py: {reason}")
    command = [args.program.resolve(), *args.options]
    with lab.Lab(args.hosts) as hosts:
        run = job.Job(hosts.hosts, command, per_host=args.ranks_per_host).start_all()
        codes = [rank.wait(LIMIT_S) for rank in run.ranks]
    print("\n".join(run.ranks[0].out))
    for rank, one in enumerate(run.ranks):
        for line in one.err if codes[rank] != 0 else []:
            print(f"rank {rank}: {line}", file=sys.stderr)
    sys.exit(max(codes))


if __name__ == "__main__":
    main()
