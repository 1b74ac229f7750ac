# SPDX-License-Identifier: Apache-2.0
"""Two engines of vLLM that share experts, without a server: engines.py PLAN ANSWERS, both JSON.

PLAN: "options" of vLLM's LLM, a free "port", and "tasks", which engines do one after the other. A
task has "name", "prompts" (for each engine a list of lists of tokens), "tokens" (how many follow
each prompt) and perhaps "best" (of how many tokens log-probabilities are told). Once both have
begun it, the second engine's processes may "pause" for some seconds, or be killed: "kill" says how
many seconds the first then has.
ANSWERS: by name "seconds" of each engine and its "answers": for each prompt its tokens, and for
each of them the best ones with their log-probabilities. "first" is there after "kill": the first
engine answered, ended, or hung."""

import contextlib
import json
import multiprocessing
import os
import queue
import signal
import sys
import time
from pathlib import Path

NUM_ENGINES = 2
MIDST_S = 0.3  # from the beginning of a task to what befalls it
GRACE_S = 2  # for the other engine, which may be in a step that this one takes part in


def engine(at, plan, may_begin, told):
    os.environ |= {
        "VLLM_DP_RANK": str(at),
        "VLLM_DP_RANK_LOCAL": str(at),
        "VLLM_DP_SIZE": str(NUM_ENGINES),
        "VLLM_DP_MASTER_IP": "127.0.0.1",
        "VLLM_DP_MASTER_PORT": str(plan["port"]),
    }
    from vllm import LLM, SamplingParams

    llm = LLM(skip_tokenizer_init=True, seed=0, dtype="bfloat16", **plan["options"])
    for task in plan["tasks"]:
        greedy = SamplingParams(
            temperature=0.0,
            max_tokens=task["tokens"],
            ignore_eos=True,
            detokenize=False,
            logprobs=task.get("best"),
        )
        prompts = [{"prompt_token_ids": one} for one in task["prompts"][at]]
        may_begin.acquire()
        told.put((at, task["name"], None, None))
        start = time.monotonic()
        done = llm.generate(prompts, greedy, use_tqdm=False)
        told.put((at, task["name"], time.monotonic() - start, [answer(one) for one in done]))
    time.sleep(GRACE_S)


def answer(request):
    out = request.outputs[0]
    best = [
        sorted(((token, one.logprob) for token, one in step.items()), key=lambda one: -one[1])
        for step in out.logprobs or ()
    ]
    return list(out.token_ids), best


def family(pid):
    """The process and all that it and its children started."""
    children = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            parent = int(path.read_text().rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(path.parent.name))
    found = [pid]
    for one in found:
        found += children.get(one, [])
    return found


def send(pids, number):
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


class Engines:
    def __init__(self, plan):
        context = multiprocessing.get_context("spawn")
        self.told = context.Queue()
        self.may_begin = [context.Semaphore(0) for _ in range(NUM_ENGINES)]
        self.processes = [
            context.Process(target=engine, args=(at, plan, self.may_begin[at], self.told))
            for at in range(NUM_ENGINES)
        ]
        for one in self.processes:
            one.start()

    def hear(self, needed, limit=float("inf")):
        """Returns what engines tell next; None if late or if one of `needed` ended with an
        error."""
        end = time.monotonic() + limit
        while time.monotonic() < end:
            ended = any(one.exitcode for one in needed)
            try:
                return self.told.get(timeout=0.2)
            except queue.Empty:
                if ended:
                    return None
        return None

    def do(self, task, answers):
        """Does the task; returns whether all went as the task has it."""
        mine = answers[task["name"]] = {"seconds": [None, None], "answers": [None, None]}
        num_begun = 0
        for one in self.may_begin:
            one.release()
        while None in mine["seconds"]:
            heard = self.hear(self.processes)
            if heard is None:
                return False
            at, name, seconds, answered = heard
            assert name == task["name"], heard
            mine["seconds"][at], mine["answers"][at] = seconds, answered
            num_begun += seconds is None
            if seconds is None and num_begun == NUM_ENGINES and "kill" in task:
                time.sleep(MIDST_S)
                mine["first"] = self.kill_second(task["kill"])
                return mine["first"] != "hung"
            if seconds is None and num_begun == NUM_ENGINES and "pause" in task:
                time.sleep(MIDST_S)
                self.pause_second(task["pause"])
        return True

    def pause_second(self, seconds):
        stopped = family(self.processes[1].pid)
        send(stopped, signal.SIGSTOP)
        time.sleep(seconds)
        send(stopped, signal.SIGCONT)

    def kill_second(self, patience):
        end = time.monotonic() + patience
        send(family(self.processes[1].pid), signal.SIGKILL)
        first = self.processes[:1]
        while heard := self.hear(first, end - time.monotonic()):
            if heard[0] == 0 and heard[2] is not None:
                return "answered"
        return "ended" if first[0].exitcode else "hung"

    def end(self, limit):
        for one in self.processes:
            one.join(limit)
            if one.is_alive():
                send(family(one.pid), signal.SIGKILL)
                one.join()


def main(plan, out):
    plan = json.loads(Path(plan).read_text())
    engines = Engines(plan)
    answers = {}
    good = True
    for task in plan["tasks"]:
        good = good and engines.do(task, answers)
        Path(out).write_text(json.dumps(answers))
    engines.end(60 if good else 0)
    killed = any("kill" in task for task in plan["tasks"])
    sys.exit(not good or (not killed and any(one.exitcode for one in engines.processes)))


if __name__ == "__main__":
    main(*sys.argv[1:])
