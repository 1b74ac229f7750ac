# SPDX-License-Identifier: Apache-2.0
"""Runs what docs/launch.md tells people to type, where it says: on the login node or on hosts.

mpirun is real, and reaches hosts by a remote shell that enters their namespaces. srun and scontrol
are played, for Slurm has to be installed by the site; so is torchrun where there is none.
"""

import os
import shutil
import stat
import sys

from job import clean_environment

# Starts one process for each task, host by host, and passes on the worst exit code.
SRUN = """
import os, subprocess, sys
args = sys.argv[1:]
assert args[0] == "--nodes" and args[2] == "--ntasks", args
nodes, tasks = int(args[1]), int(args[3])
started = []
for task in range(tasks):
    told = {{"SLURM_PROCID": task, "SLURM_NTASKS": tasks, "SLURM_NNODES": nodes}}
    told |= {{"SLURM_JOB_ID": 4711, "SLURM_STEP_ID": 0}}
    environment = dict(os.environ) | {{k: str(v) for k, v in told.items()}}
    host = "{names}"[task * nodes // tasks]
    started.append(subprocess.Popen(["{remote_shell}", host, *args[4:]], env=environment))
sys.exit(max(one.wait() for one in started))
"""

TORCHRUN = """
import argparse, os, socket, subprocess, sys
parser = argparse.ArgumentParser()
for name in ("--nnodes", "--nproc-per-node"):
    parser.add_argument(name, type=int)
for name in ("--rdzv-backend", "--rdzv-endpoint"):
    parser.add_argument(name)
parser.add_argument("--no-python", action="store_true")
parser.add_argument("command", nargs=argparse.REMAINDER)
args = parser.parse_args()
address, port = args.rdzv_endpoint.split(":")
node = "{names}".index(socket.gethostname())
started = []
for local_rank in range(args.nproc_per_node):
    told = {{"RANK": node * args.nproc_per_node + local_rank, "LOCAL_RANK": local_rank}}
    told |= {{"WORLD_SIZE": args.nnodes * args.nproc_per_node}}
    told |= {{"LOCAL_WORLD_SIZE": args.nproc_per_node}}
    told |= {{"MASTER_ADDR": address, "MASTER_PORT": port, "TORCHELASTIC_RUN_ID": "none"}}
    environment = dict(os.environ) | {{k: str(v) for k, v in told.items()}}
    started.append(subprocess.Popen(args.command, env=environment))
sys.exit(max(one.wait() for one in started))
"""

# Small inputs: the page's words are what is tested here, not the exchange.
WEFT = """#!/bin/sh
command=$1; shift
case $command in
  check) set -- --only "expert_major bfloat16" "$@" ;;
  bench) set -- --smoke "$@" ;;
esac
exec {program} $command "$@"
"""

# As ssh: the host's name, then words that a shell there puts together; a path is looked for here.
REMOTE_SHELL = """#!/bin/sh
host=$1; shift
case $host in
{cases}
  *) echo "no host $host" >&2; exit 255 ;;
esac
{join}
"""


class Login:
    def __init__(self, lab, program):
        self._lab = lab
        self._bin = f"{lab.folder}/bin"
        home = f"{lab.folder}/home"
        os.mkdir(self._bin)
        os.mkdir(home)
        self._environment = {
            **clean_environment(),
            "PATH": f"{self._bin}:{os.environ['PATH']}",
            "HOME": home,  # which all hosts see
            "OMPI_MCA_plm_rsh_agent": f"{self._bin}/rsh",
            "OMPI_MCA_oob_tcp_if_include": "eth0",
            "OMPI_MCA_rmaps_base_oversubscribe": "1",
            "OMPI_ALLOW_RUN_AS_ROOT": "1",
            "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        }
        self._environment.pop("XDG_RUNTIME_DIR", None)
        names = "".join(host.name for host in lab.hosts)
        enter = "nsenter --target=$pid --net --uts --mount --pid --"
        cases = "\n".join(f"  {host.name}) pid={host.pid} ;;" for host in lab.hosts)
        self._write("rsh", REMOTE_SHELL.format(cases=cases, join=f'exec {enter} sh -c "$*"'))
        self._write("exec_on", REMOTE_SHELL.format(cases=cases, join=f'exec {enter} "$@"'))
        python = f"#!{sys.executable}\n"
        self._write("srun", python + SRUN.format(names=names, remote_shell=f"{self._bin}/exec_on"))
        lines = "".join(f"echo {host.name}\n" for host in lab.hosts)
        self._write("scontrol", "#!/bin/sh\n" + lines)
        self._write("weft", WEFT.format(program=os.path.abspath(program)))
        if shutil.which("torchrun") is None:
            self._write("torchrun", python + TORCHRUN.format(names=names))

    def _write(self, name, text):
        path = f"{self._bin}/{name}"
        with open(path, "w") as file:
            file.write(text)
        os.chmod(path, os.stat(path).st_mode | stat.S_IXUSR)

    def start(self, block):
        """Starts a block of shell in the place that its first line names; a list of processes."""
        place, _, _ = block.partition("\n")
        script = ["bash", "-euo", "pipefail", "-c", block]
        if place == "# on every host":
            return [host.start(*script, env=self._environment) for host in self._lab.hosts]
        for host in self._lab.hosts:
            if place == f"# on host {host.name}":
                return [host.start(*script, env=self._environment)]
        assert place == "# on the login node", block
        # Processes and files as outside, for the way to the hosts leads through them.
        names = f'mount --bind {self._lab.folder}/hosts /etc/hosts && exec "$@"'
        return [
            self._lab.login.start(
                *["unshare", "--mount", "sh", "-c", names, "sh", *script],
                spaces=["net", "uts"],
                env=self._environment,
            )
        ]
