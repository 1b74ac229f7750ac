# SPDX-License-Identifier: Apache-2.0
"""Two engines of vLLM on CPUs that share experts, without a server: engines.py MODEL PROMPTS
ANSWERS BACKEND PORT. PROMPTS: a JSON list of lists of tokens. ANSWERS: for each prompt its tokens,
and the log-probabilities of each step's two best."""

import contextlib
import json
import multiprocessing
import os
import queue
import sys
import time
from pathlib import Path

NUM_ENGINES = 2


def engine(at, model, prompts, backend, port, answers):
    os.environ |= {
        "VLLM_DP_RANK": str(at),
        "VLLM_DP_RANK_LOCAL": str(at),
        "VLLM_DP_SIZE": str(NUM_ENGINES),
        "VLLM_DP_MASTER_IP": "127.0.0.1",
        "VLLM_DP_MASTER_PORT": str(port),
    }
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=model,
        skip_tokenizer_init=True,
        seed=0,
        dtype="bfloat16",
        enforce_eager=True,
        max_model_len=256,
        max_num_seqs=8,
        enable_expert_parallel=True,
        all2all_backend=backend,
    )
    greedy = SamplingParams(
        temperature=0.0, max_tokens=16, ignore_eos=True, detokenize=False, logprobs=2
    )
    done = llm.generate([{"prompt_token_ids": one} for one in prompts], greedy, use_tqdm=False)
    told = []
    for request in done:
        out = request.outputs[0]
        best = [sorted(entry.logprob for entry in step.values())[-2:] for step in out.logprobs]
        told.append((list(out.token_ids), best))
    answers.put((at, told))
    time.sleep(1)  # the other engine may be in a step that this one takes part in


def main(model, prompts, out, backend, port):
    given = json.loads(Path(prompts).read_text())
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    engines = [
        context.Process(target=engine, args=(at, model, given[at::2], backend, port, answers))
        for at in range(NUM_ENGINES)
    ]
    for one in engines:
        one.start()
    told = [None] * len(given)
    num_told = 0
    while num_told < NUM_ENGINES and not any(one.exitcode for one in engines):
        with contextlib.suppress(queue.Empty):
            at, part = answers.get(timeout=1)
            told[at::NUM_ENGINES] = part
            num_told += 1
    for one in engines:
        if num_told < NUM_ENGINES:
            one.terminate()
        one.join()
    Path(out).write_text(json.dumps(told))
    sys.exit(any(one.exitcode for one in engines))


if __name__ == "__main__":
    main(*sys.argv[1:])
