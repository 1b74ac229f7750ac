# SPDX-License-Identifier: Apache-2.0
"""The order in which the nodes of two chunks are issued."""

from __future__ import annotations

from typing import Any

import torch

from . import issue_log, lanes


def issue_chunks(
    f: Any,
    b: Any,
    b_grad: Any,
    pre_forward: Any = None,
    pre_backward: Any = None,
    post_forward: Any = None,
    post_backward: Any = None,
) -> Any:
    """The forward of plan `f` and the backward of plan `b`; either may be None. Returns f's output.

    Raises AssertionError for a backward without a gradient.
    """
    if f is None and b is None:
        return None
    if b is not None and pre_backward is None:
        _check_grad(b_grad)
    f_input = None
    if f is not None:
        if pre_forward is not None:
            _note(f, "pre_forward", "comp")
            received = pre_forward(f.vp_stage)
            if isinstance(received, torch.Tensor):
                f.receive(received)
        f.record_current_stream()
        f_input = f.pre_process.forward()
    if b is not None:
        if pre_backward is not None:
            _note(b, "pre_backward", "comp")
            received = pre_backward(b.vp_stage)
            b_grad = received if isinstance(received, torch.Tensor) else b_grad
            _check_grad(b_grad)
        b.record_current_stream()
        if b.post_process is not None:
            b_grad = b.post_process.backward(b_grad)
            b.post_process.backward_dw()

    f_input, b_grad = _issue_layers(f, b, f_input, b_grad)

    if f is not None and post_forward is not None:
        _note(f, "post_forward", "comm")
        comm = lanes.get_comm_stream()
        with lanes.on_stream(comm):
            f.event.wait(comm)
            lanes.known_to([f_input], comm)  # a dense layer made it on the other
            post_forward(f_input, f.vp_stage)
    if b is not None:
        if post_backward is not None:
            _note(b, "post_backward", "comp")
            b.wait_current_stream()
            post_backward(b_grad, b.vp_stage)
        # Left until here so that it hides what post_backward sends.
        if b.layers:
            b.layers[0].pre_dispatch_computation.backward_dw()
    if f is not None and f.post_process is not None:
        f_input = f.post_process.forward(f_input)
    if b is not None:
        b.pre_process.backward(b_grad)
        b.pre_process.backward_dw()
    for plan in (f, b):
        if plan is not None:
            plan.wait_current_stream()
    lanes.known_to([f_input], lanes.get_comp_stream())  # a combine made it on the other
    if b is not None:
        b.release_state()
    return f_input


def _check_grad(b_grad: Any) -> None:
    if b_grad is None:
        raise AssertionError("run: the backward has no gradient (expected b_grad)")


def _note(plan: Any, hook: str, lane: str) -> None:
    issue_log.note(issue_log.Step(plan.name, hook, "", lane))


def _issue_layers(f: Any, b: Any, f_input: Any, b_grad: Any) -> tuple[Any, Any]:
    """The first layer of `f` with the last of `b`, and so on; what is left over runs alone."""
    run = type(f if f is not None else b).LAYER_SCHEDULE_PLAN_CLASS.run
    f_layers = [] if f is None else list(f.layers)
    b_layers = [] if b is None else list(reversed(b.layers))
    num_pairs = min(len(f_layers), len(b_layers))
    pairs = list(zip(f_layers, b_layers))
    pairs += [(None, layer) for layer in b_layers[num_pairs:]]
    pairs += [(layer, None) for layer in f_layers[num_pairs:]]
    for f_layer, b_layer in pairs:
        is_last = bool(b_layers) and b_layer is b_layers[-1]
        f_input, b_grad = run(f_layer, b_layer, f_input, b_grad, is_last_layer_in_bwd=is_last)
        if b_layer is not None:
            b_layer.release_state()
    return f_input, b_grad
