#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Checks a model with SPIN. Without a mutation no property may be violated; with one, some property must be.

usage: check_model.py MODEL.pml [MUTATION] [--night]     --night: more calls, and more that happens at once
       check_model.py --night                            all models so
"""

import argparse
import re
import subprocess
import sys
import tempfile
from pathlib import Path

# Smaller bounds than the models' own, for every change.
DAY = {"ballots": ["C=1"], "eager": ["C=2"], "pipeline": ["ITEMS=3"]}
NIGHT = {
    "answers": ["N=3"],
    "ballots": ["N=4", "C=1"],
    "captured": ["STEPS=8"],
    "clearing": ["REPLAYS=4"],
    "cpu": ["NIGHT"],
    "copies": ["C=4"],
    "dispatch": ["C=4"],
    "domains": ["C=4"],
    "eager": ["C=4"],
    "losses": ["NIGHT"],
    "parking": [],
    "pipeline": ["ITEMS=5"],
    "readmission": ["N=4", "DEATHS=1"],
    "repeats": ["CALLS=3"],
    "roll": ["NIGHT"],
}
# What a mutation needs besides itself to be found.
NEEDS = {
    "EXPIRED_STAYS_GIVEN_UP": ["MAX_REFUSALS=2"],
    "READS_ONCE": ["NIGHT", "N=4", "C=1"],
    "ONE_SLOT": ["NIGHT", "C=1"],
    "HEEDS_LOST": ["DEATHS=1"],
    "RETURNS_ALONE": ["N=4", "C=1"],
    "NEWCOMERS_ONCE": ["N=4", "DEATHS=1"],
    "ANY_VOTES": ["N=4", "C=1"],
    "KEEPS_ITS_FIRST": ["N=4", "C=1"],
    "TAKES_FROM_THE_LEFT_OUT": ["N=4", "C=1"],
    "ONLY_DECIDERS_TELL": ["N=4", "C=1"],
}
# Process types of a model have `provided` clauses, which forbid partial order reduction.
COMPILE = ["gcc", "-w", "-DNOREDUCE", "-DSAFETY", "-DNOCLAIM", "-DVECTORSZ=4096", "-DMEMLIM=8000", "-o", "pan", "pan.c"]


def run(command, folder):
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout + done.stderr


def check(model, mutation, night, folder):
    """Returns the output of pan, and the steps of a trail if there is one."""
    bounds = NIGHT[model.stem] if night else [] if mutation else DAY.get(model.stem, [])
    names = bounds + ([mutation, *NEEDS.get(mutation, [])] if mutation else [])
    defines = [f"-D{name}" for name in names]
    # By day, and for a mutation, the compiler takes as long as the search. At night states are kept
    # as hashes of 64 bits (HC4), to save memory.
    options = ["-O0"] if mutation else ["-O2", "-DHC4"] if night else ["-O1"]
    for command in [["spin", *defines, "-a", model], [*COMPILE, *options]]:
        status, out = run(command, folder)
        if status != 0 or "Error" in out:
            sys.exit(f"{' '.join(map(str, command))}:\n{out}")
    _, out = run(["./pan", "-m1000000"], folder)
    trail = f"{model.name}.trail"
    if (Path(folder) / trail).exists():
        status, steps = run(["spin", *defines, "-k", trail, "-p", model], folder)
        out += "".join(line + "\n" for line in steps.splitlines() if "(state -)" not in line)
    return out


def report(model, mutation, night):
    """0: it is as it should be."""
    with tempfile.TemporaryDirectory() as folder:
        out = check(model, mutation, night, folder)
    errors = re.search(r"errors: (\d+)", out)
    states = re.search(r"(\S+) states, stored", out)
    seconds = re.search(r"elapsed time (\S+)", out)
    is_whole = errors and states and not re.search(r"max search depth too small|out of memory|memory exhausted|interrupted", out)
    violated = re.search(r"pan:1: (assertion violated|invalid end state)", out)
    told = f"{states and states.group(1)} states, {seconds.group(1) if seconds else 0} s"
    if mutation and violated:
        print(f"{model.stem}: {mutation} is found: {violated.group(1)} ({told})", flush=True)
    elif not mutation and is_whole and int(errors.group(1)) == 0:
        print(f"{model.stem}: no property is violated ({told})", flush=True)
    else:
        print(f"{out}\n{model.stem}: {f'{mutation} is not found' if mutation else 'see above'} ({told})", flush=True)
        return 1
    return 0


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path, nargs="?")
    parser.add_argument("mutation", nargs="?", help="one that the head of the model lists")
    parser.add_argument("--night", action="store_true", help="with larger bounds")
    args = parser.parse_args()
    if args.model:
        return report(args.model.resolve(), args.mutation, args.night)
    if not args.night:
        parser.error("which model?")
    return max(report(Path(__file__).with_name(f"{name}.pml"), None, True) for name in NIGHT)


if __name__ == "__main__":
    sys.exit(main())
