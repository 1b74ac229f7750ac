# SPDX-License-Identifier: Apache-2.0
"""The buffers that the module keeps, with stand-ins for them."""

import ast
from pathlib import Path
from unittest.mock import MagicMock, Mock

import pytest
import torch

import weft.fused_a2a as fa
from weft.fused_a2a import buffers

STATE = ("_buffer", "_uccl_buffer", "_hybrid_ep_buffer", "_elastic_buffer", "_nvshmem_available")


@pytest.fixture(autouse=True)
def no_state(monkeypatch):
    for name in STATE:
        monkeypatch.setattr(fa, name, None)
    monkeypatch.setattr(buffers, "parked", {})


def group_of(size=2):
    group = Mock()
    group.size.return_value = size
    return group


class Sized:
    """A stand-in for a class of buffers: hints are 100 and 10 times the bytes asked for."""

    made: list

    def __init__(self, group, nvl, rdma, explicitly_destroy=False):
        self.group, self.num_nvl_bytes, self.num_rdma_bytes = group, nvl, rdma
        self.explicitly_destroy, self.destroyed = explicitly_destroy, 0
        type(self).made.append(self)

    def destroy(self):
        assert self.explicitly_destroy
        self.destroyed += 1

    @staticmethod
    def get_dispatch_config(size):
        config = Mock()
        config.get_nvl_buffer_size_hint = lambda hidden_bytes, size: 100 * hidden_bytes
        config.get_rdma_buffer_size_hint = lambda hidden_bytes, size: 10 * hidden_bytes
        return config

    @staticmethod
    def get_combine_config(size):
        config = Mock()
        config.get_nvl_buffer_size_hint = lambda hidden_bytes, size: 90 * hidden_bytes
        config.get_rdma_buffer_size_hint = lambda hidden_bytes, size: 20 * hidden_bytes
        return config

    @staticmethod
    def is_sm90_compiled():
        return True


def sized(base=Sized):
    return type("Fresh", (base,), {"made": []})


@pytest.fixture(params=["deepep", "uccl"])
def library(request, monkeypatch):
    """(the class, its get function, the name of its state)."""
    kind = sized()
    if request.param == "deepep":
        monkeypatch.setattr(fa, "Buffer", kind)
        return kind, fa.get_buffer, "_buffer"
    monkeypatch.setattr(fa, "UCCLBuffer", kind)
    return kind, fa.get_uccl_buffer, "_uccl_buffer"


def test_flags():
    assert fa.HAVE_DEEP_EP is fa.HAVE_UCCL_EP is fa.HAVE_HYBRIDEP is fa.HAVE_DEEP_EP_V2 is True
    assert fa.HAVE_TE_EP is True
    assert fa.HYBRIDEP_TOKEN_ALIGNMENT == 64


def test_functions_are_there():
    assert all(callable(getattr(fa, name)) for name in fa.__all__ if name.islower())


def test_free_buffer_destroys_once_and_clears():
    buffer, uccl, hybrid = MagicMock(), MagicMock(), MagicMock()
    fa._buffer, fa._uccl_buffer, fa._hybrid_ep_buffer = buffer, uccl, hybrid
    fa.free_buffer()
    fa.free_buffer()
    buffer.destroy.assert_called_once_with()
    assert fa._buffer is None
    assert fa._uccl_buffer is uccl and fa._hybrid_ep_buffer is hybrid
    uccl.destroy.assert_not_called()
    hybrid.destroy.assert_not_called()


def test_free_buffer_without_one():
    fa.free_buffer()
    assert fa._buffer is None


def test_free_buffer_swallows_errors():
    buffer = MagicMock()
    buffer.destroy.side_effect = RuntimeError("boom")
    fa._buffer = buffer
    fa.free_buffer()
    buffer.destroy.assert_called_once_with()
    assert fa._buffer is None


def test_is_kept_for_its_group(library):
    kind, get, name = library
    group = group_of()
    first = get(group, 1024)
    assert getattr(fa, name) is first and first.group is group
    assert (first.num_nvl_bytes, first.num_rdma_bytes) == (102400, 20480)
    assert get(group, 1024) is first and get(group, 512) is first
    assert len(kind.made) == 1
    assert first.explicitly_destroy == (name == "_buffer")


def test_another_group_has_another(library):
    kind, get, name = library
    first = get(group_of(), 1024)
    second = get(group_of(), 1024)
    assert second is not first and getattr(fa, name) is second
    assert first.destroyed == 0  # that would be a call of the other group


def test_grows_and_destroys_the_old_one(library):
    kind, get, name = library
    group = group_of()
    first = get(group, 1024)
    second = get(group, 2048)
    assert second is not first and second.num_nvl_bytes == 204800
    assert first.destroyed == (1 if name == "_buffer" else 0)
    assert get(group, 1024) is second and len(kind.made) == 2


def test_one_host_has_no_rdma_bytes_and_is_kept(library):
    kind, get, _ = library

    class OneHost(kind):
        made: list = []

        def __init__(self, group, nvl, rdma, **options):
            super().__init__(group, nvl, 0, **options)

    name = "Buffer" if get is fa.get_buffer else "UCCLBuffer"
    setattr(fa, name, OneHost)  # undone by the fixture's monkeypatch
    group = group_of(16)
    assert get(group, 1024) is get(group, 1024)
    assert len(OneHost.made) == 1


def test_equal_groups_share(library, monkeypatch):
    kind, get, _ = library
    members = {}
    monkeypatch.setattr(buffers.dist, "get_process_group_ranks", lambda group: list(members[group]))
    one, twin, turned = group_of(), group_of(), group_of()
    members.update({one: (0, 1), twin: (0, 1), turned: (1, 0)})
    first = get(one, 1024)
    assert get(twin, 1024) is first
    second = get(turned, 1024)
    assert second is not first
    assert get(one, 1024) is first and get(turned, 1024) is second and get(twin, 1024) is first
    del members[one]  # destroyed: what was made on it serves no other
    third = get(twin, 1024)
    assert third is not first and third.group is twin
    assert len(kind.made) == 3


def test_free_buffer_frees_those_of_other_groups(monkeypatch):
    kind = sized()
    monkeypatch.setattr(fa, "Buffer", kind)
    monkeypatch.setattr(buffers.dist, "get_process_group_ranks", lambda group: [id(group)])
    fa.get_buffer(group_of(), 1024)
    fa.get_buffer(group_of(), 1024)
    fa.free_buffer()
    assert [buffer.destroyed for buffer in kind.made] == [1, 1]
    assert fa._buffer is None and not buffers.parked


def test_nvshmem_is_asked_once(monkeypatch):
    kind = sized()
    asked = Mock(return_value=False)
    monkeypatch.setattr(kind, "is_sm90_compiled", asked)
    monkeypatch.setattr(fa, "Buffer", kind)
    assert fa._is_nvshmem_available() is False and fa._nvshmem_available is False
    buffer = fa.get_buffer(group_of(8), 1024)
    assert buffer.num_rdma_bytes == 0
    with pytest.raises(RuntimeError, match="expert parallelism group size 9 > 8 requires inter"):
        fa.get_buffer(group_of(9), 1024)
    assert fa._buffer is buffer
    asked.assert_called_once_with()


def test_hidden_bytes():
    assert fa.get_hidden_bytes(torch.empty(3, 8, dtype=torch.bfloat16)) == 16
    assert fa.get_hidden_bytes(torch.empty(3, 8, dtype=torch.float32)) == 32
    assert fa.get_hidden_bytes(torch.empty(3, 8, dtype=torch.uint8)) == 16


def test_sm_setters(monkeypatch):
    monkeypatch.setattr(fa, "Buffer", MagicMock())
    monkeypatch.setattr(fa, "UCCLBuffer", MagicMock())
    fa.set_deepep_num_sms(24)
    fa.set_uccl_num_sms(12)
    fa.Buffer.set_num_sms.assert_called_once_with(24)
    fa.UCCLBuffer.set_num_sms.assert_called_once_with(12)


@pytest.mark.parametrize(
    "variables, want",
    [
        ({}, 20),
        ({"DEEP_EP_SM_NUMS": "10"}, 10),
        ({"DEEP_EP_SM_NUMS": "10", "UCCL_EP_SM_NUMS": "8"}, 8),
    ],
)
def test_uccl_sms_from_the_environment(monkeypatch, variables, want):
    for name in ("DEEP_EP_SM_NUMS", "UCCL_EP_SM_NUMS"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(fa, "UCCLBuffer", MagicMock())
    fa.set_uccl_num_sms_from_environment()
    fa.UCCLBuffer.set_num_sms.assert_called_once_with(want)


def test_no_waits_or_collectives_of_its_own():
    """Whatever waits for a device or for other ranks is the buffers' doing."""
    forbidden = {"item", "tolist", "cpu", "synchronize", "all_reduce", "all_gather", "barrier"}
    for path in Path(fa.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute):
                assert node.attr not in forbidden, f"{path.name}:{node.lineno}"
