# SPDX-License-Identifier: Apache-2.0
"""Delayed weight gradients against torch's own, and their queue."""

import pytest
import torch

from weft.overlap import DelayedExperts, DelayedLinear, WeightGradientQueue
from weft.overlap.wgrad import delayed_modules, drop_pending


@pytest.mark.parametrize("bias", [True, False])
def test_linear(bias):
    torch.manual_seed(0)
    plain = torch.nn.Linear(6, 4, bias)
    delayed = DelayedLinear(6, 4, bias, delay_wgrad_compute=True)
    delayed.load_state_dict(plain.state_dict())
    assert delayed.weight.skip_backward_post_hook
    for _ in range(2):
        x = torch.randn(3, 5, 6, requires_grad=True)
        y = x.detach().clone().requires_grad_()
        out, expected = delayed(x), plain(y)
        torch.testing.assert_close(out, expected)
        before = None if delayed.weight.grad is None else delayed.weight.grad.clone()
        out.square().sum().backward()
        expected.square().sum().backward()
        if before is None:
            assert delayed.weight.grad is None
        else:
            assert torch.equal(delayed.weight.grad, before)
        torch.testing.assert_close(x.grad, y.grad)
        delayed.backward_dw()
        torch.testing.assert_close(delayed.weight.grad, plain.weight.grad)
        if bias:
            torch.testing.assert_close(delayed.bias.grad, plain.bias.grad)


@pytest.mark.parametrize("delay", [False, True])
def test_linear_under_autocast(delay):
    torch.manual_seed(0)
    plain = torch.nn.Linear(16, 8)
    delayed = DelayedLinear(16, 8, delay_wgrad_compute=delay)
    delayed.load_state_dict(plain.state_dict())
    x = torch.randn(5, 16, requires_grad=True)
    y = x.detach().clone().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        out, expected = delayed(x), plain(y)
    out.float().square().sum().backward()
    expected.float().square().sum().backward()
    delayed.backward_dw()
    pairs = [(x, y), (delayed.weight, plain.weight), (delayed.bias, plain.bias)]
    for one, other in pairs:
        assert one.grad.dtype == torch.float32
        torch.testing.assert_close(one.grad, other.grad, rtol=0.02, atol=0.1)


@pytest.mark.parametrize("recompute", [False, True])
def test_grouped_experts(recompute):
    torch.manual_seed(0)
    plain = DelayedExperts(3, 6, 8)
    delayed = DelayedExperts(3, 6, 8, delay_wgrad_compute=True, recompute_activation=recompute)
    plain.load_state_dict(delayed.state_dict())
    counts = torch.tensor([4, 0, 3])
    rows = torch.randn(7, 6, requires_grad=True)
    probs = torch.rand(7, requires_grad=True)
    copies = [t.detach().clone().requires_grad_() for t in (rows, probs)]
    out, expected = delayed(rows, counts, probs), plain(copies[0], counts, copies[1])
    torch.testing.assert_close(out, expected)
    out.square().sum().backward()
    expected.square().sum().backward()
    assert delayed.up.grad is None and delayed.down.grad is None
    torch.testing.assert_close(rows.grad, copies[0].grad)
    torch.testing.assert_close(probs.grad, copies[1].grad)
    delayed.backward_dw()
    torch.testing.assert_close(delayed.up.grad, plain.up.grad)
    torch.testing.assert_close(delayed.down.grad, plain.down.grad)
    assert not delayed.up.grad[1].any() and delayed.up.grad[0].any()


def test_activation_is_really_recomputed():
    calls = []

    class Counting(DelayedExperts):
        def _activate(self, inner, probs, ends):
            calls.append(inner.shape[0])
            return super()._activate(inner, probs, ends)

    for recompute in (False, True):
        calls.clear()
        experts = Counting(1, 4, 4, recompute_activation=recompute)
        experts(torch.ones(2, 4), torch.tensor([2]), torch.ones(2)).sum().backward()
        assert len(calls) == 1 + recompute


def test_frozen_weight_has_no_gradient():
    linear = DelayedLinear(3, 3, bias=False, delay_wgrad_compute=True)
    linear.weight.requires_grad_(False)
    x = torch.ones(2, 3, requires_grad=True)
    linear(x).sum().backward()
    linear.backward_dw()
    assert linear.weight.grad is None and x.grad is not None


def test_without_delay_the_backward_does_it_all():
    linear = DelayedLinear(3, 3)
    called = []
    linear.register_wgrad_accumulation_and_reduce_hooks(lambda: called.append(1))
    linear(torch.ones(2, 3)).sum().backward()
    grad = linear.weight.grad.clone()
    linear.backward_dw()
    assert torch.equal(linear.weight.grad, grad) and not called
    assert not linear.weight.skip_backward_post_hook


def test_hooks_come_once_after_all_gradients():
    linear = DelayedLinear(3, 3, delay_wgrad_compute=True)
    seen = []
    linear.register_wgrad_accumulation_and_reduce_hooks(
        lambda: seen.append(linear.weight.grad.sum().item())
    )
    for _ in range(2):
        linear(torch.ones(1, 3)).sum().backward()
    assert len(linear.wgrad_queue) == 2
    linear.backward_dw()
    linear.backward_dw()
    assert seen == [18.0]


def test_error_leaves_the_rest_and_calls_no_hook():
    queue, called = WeightGradientQueue(), []
    weight = torch.nn.Parameter(torch.zeros(1))

    def fail():
        raise RuntimeError("no memory")

    queue.put(weight, lambda: torch.ones(1))
    queue.put(weight, fail)
    queue.put(weight, lambda: torch.ones(1))
    queue.add_hook(lambda: called.append(1))
    with pytest.raises(RuntimeError, match="no memory"):
        queue.run()
    assert len(queue) == 1 and weight.grad.item() == 1 and not called
    queue.clear()
    assert len(queue) == 0


def test_outermost_modules_with_a_backward_dw():
    first, second = DelayedLinear(2, 2), DelayedLinear(2, 2)
    nested = torch.nn.Sequential(first, torch.nn.Sequential(torch.nn.ReLU(), second))
    assert list(delayed_modules([None, nested])) == [first, second]
    first.wgrad_queue.put(first.weight, lambda: torch.ones(2, 2))
    drop_pending(nested)
    assert len(first.wgrad_queue) == 0
