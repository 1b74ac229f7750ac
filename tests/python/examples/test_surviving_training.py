# SPDX-License-Identifier: Apache-2.0
"""The example that loses a rank and takes it back, against the same steps without Weft."""

import os
import subprocess
import sys

import pytest
import torch

from weft.examples import surviving_training as example

VICTIM, KILL, BACK, STEPS, EVERY = 2, 7, 11, 14, 5
LAST_SAVED = 5  # steps that the last checkpoint before the loss has
REPLICATED, ALONE = 4, 5  # the victim's experts


def experts_at_first():
    return [example.first_weights(expert) for expert in range(example.EXPERTS)]


def layer(experts, x, idx, scores):
    """Each token by each of its experts, all of which are here."""
    out = torch.zeros_like(x)
    for expert, (first, second) in enumerate(experts):
        token, choice = torch.where(idx == expert)
        made = (x[token] @ first).relu() @ second
        out = out.index_add(0, token, made * scores[token, choice].unsqueeze(1))
    return out


def dense_step(experts, step, alive):
    """The experts after it, and the loss."""
    used = [[one.clone().requires_grad_() for one in expert] for expert in experts]
    loss = torch.zeros(())
    for rank in alive:
        x, idx, scores, target = example.batch(rank, step)
        loss = loss + example.loss_of(layer(used, x, idx, scores), target)
    loss.backward()
    return [[w.detach() - example.RATE * w.grad for w in one] for one in used], loss.item()


def reference(kill_at):
    """Losses, and the experts in the end."""
    everyone = list(range(example.RANKS))
    rest = [rank for rank in everyone if rank != VICTIM]
    experts, losses, history = experts_at_first(), [], []
    for step in range(STEPS):
        history.append(experts)
        if step == KILL:
            # Before it could give its replicas this step's weights, they are a step older.
            since = KILL - 1 if kill_at == "push" else KILL
            experts = list(experts)
            experts[REPLICATED] = history[since][REPLICATED]
            experts[ALONE] = history[LAST_SAVED][ALONE]
        alive = rest if KILL <= step < BACK else everyone
        experts, loss = dense_step(experts, step, alive)
        losses.append((step, loss, alive))
    return losses, experts


def run(kill_at, folder):
    numbers = {
        "steps": STEPS,
        "save-every": EVERY,
        "kill-rank": VICTIM,
        "kill-step": KILL,
        "back-step": BACK,
    }
    words = [word for name, value in numbers.items() for word in (f"--{name}", str(value))]
    command = [sys.executable, "-m", "weft.examples.surviving_training", *words]
    return subprocess.run(
        [*command, "--kill-at", kill_at, "--folder", str(folder)],
        capture_output=True,
        text=True,
        timeout=240,
        env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
    )


@pytest.mark.parametrize("kill_at", ["push", "backward"])
def test_all_goes_on_as_if_computed_without_weft(kill_at, tmp_path):
    folder = tmp_path / "run"
    done = run(kill_at, folder)
    assert done.returncode == 0, done.stdout + done.stderr
    losses, experts = reference(kill_at)
    found = example.curve(folder)
    assert [(step, alive) for step, _, alive in found] == [(s, alive) for s, _, alive in losses]
    for (_, loss, _), (step, wanted, _) in zip(found, losses):
        assert loss == pytest.approx(wanted, rel=1e-4), f"step {step}"
    for expert, wanted in enumerate(experts):  # those of the rank that came back, too
        torch.testing.assert_close(
            torch.load(folder / f"end{expert}.pt"), wanted, rtol=1e-3, atol=1e-4
        )
    last_line = done.stdout.splitlines()[-1]
    assert last_line.split()[0] == str(STEPS - 1) and last_line.endswith("[0, 1, 2, 3]")
