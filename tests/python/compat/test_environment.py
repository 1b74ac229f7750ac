# SPDX-License-Identifier: Apache-2.0
"""Environment variables of other libraries: docs/compat.md, the code and the effects agree."""

import os
import re
import socket
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from buffer_cases import Case, dispatch

import weft
from domain_cases import two_domains
from weft.compat import environment
from weft.compat.deep_ep import Buffer
from weft.compat.deep_ep.elastic import model
from weft.compat.uccl import UCCLBuffer, fabric
from weft.fused_a2a import set_uccl_num_sms_from_environment

ROOT = Path(__file__).resolve().parents[3]
WITHOUT_EFFECT = "Accepted without effect"  # a heading of the page
WEFT = ("WEFT_FABRIC", "WEFT_FABRIC_ADDRESS")
SM_NUMS = ("UCCL_EP_SM_NUMS", "DEEP_EP_SM_NUMS")  # the first is the stronger one


@pytest.fixture(autouse=True)
def nothing_set(monkeypatch):
    for name in (*environment.HONOURED, *variables_under(WITHOUT_EFFECT), *WEFT):
        monkeypatch.delenv(name, raising=False)


def variables_under(heading):
    """Variables in the first column of the table under a heading of the page."""
    text = (ROOT / "docs" / "compat.md").read_text()
    section = text.split(f"\n### {heading}\n")[1].split("\n#")[0]
    cells = [line.split("|")[1] for line in section.splitlines() if line.startswith("|")]
    return sorted(name for cell in cells for name in re.findall(r"`([A-Z_]+)`", cell))


def test_page_lists_what_the_code_knows():
    assert variables_under("Honoured") == sorted(environment.HONOURED)


def test_code_reads_what_it_says():
    package = Path(environment.__file__).parents[1]
    folders = ("compat/**/*.py", "dispatcher/*.py", "fused_a2a/*.py")
    sources = [path for folder in folders for path in package.glob(folder)]
    texts = {path.relative_to(package).as_posix(): path.read_text() for path in sources}
    del texts["compat/environment.py"]
    code = "\n".join(texts.values())
    assert "compat/uccl/fabric.py" in texts and "getenv" not in code
    assert [name for name in environment.HONOURED if f'"{name}"' not in code] == []
    without = variables_under(WITHOUT_EFFECT)
    assert len(without) > 20 and [name for name in without if f'"{name}"' in code] == []
    # But Weft's own variables, everything goes through the one place.
    assert [
        path for path, text in texts.items() if "environ[" in text or "environ.get" in text
    ] == ["compat/uccl/fabric.py"]


def test_values(monkeypatch):
    names = SM_NUMS
    assert environment.text(*names) is None and environment.number(*names, default=6) == 6
    monkeypatch.setenv("DEEP_EP_SM_NUMS", "24")
    assert environment.number(*names, default=6) == 24
    monkeypatch.setenv("UCCL_EP_SM_NUMS", "")
    assert environment.text(*names) == "24"
    for wrong in ("0", "-3", "many", "1.5", "²"):
        monkeypatch.setenv("UCCL_EP_SM_NUMS", wrong)
        with pytest.raises(weft.InvalidArgument, match=f"UCCL_EP_SM_NUMS = '{wrong}'"):
            environment.number(*names, default=6)


def test_numbers_of_multiprocessors(monkeypatch):
    before = UCCLBuffer.num_sms
    try:
        of_uccl, of_both = SM_NUMS
        cases = [({}, 20), ({of_both: "24"}, 24), ({of_uccl: "32"}, 32), ({of_uccl: "0"}, 0)]
        for given, want in cases:
            for name, value in given.items():
                monkeypatch.setenv(name, value)
            set_uccl_num_sms_from_environment()
            assert UCCLBuffer.num_sms == want
    finally:
        UCCLBuffer.set_num_sms(before)


@pytest.mark.parametrize(
    ("wanted", "found"),
    [
        ("eth1", "eth1"),
        ("eth", "eth0"),
        ("=eth", None),
        ("=eth1,ib0", "eth1"),
        ("ib,eth1", "eth1"),
        ("^eth", "docker0"),
        ("^eth,docker", "ib0"),
        ("^eth,docker,ib", None),
        ("wlan", None),
        ("lo", "lo"),
    ],
)
def test_interface_of_a_list(wanted, found):
    assert fabric.interface_of(wanted, ["lo", "eth0", "eth1", "docker0", "ib0"]) == found


@pytest.fixture
def cards(tmp_path):
    """A folder of network cards as the system shows them."""
    for name, driver in (("mlx5_0", "mlx5_core"), ("mlx5_1", "mlx5_core"), ("rdmap7s0", "efa")):
        (tmp_path / "drivers" / driver).mkdir(parents=True, exist_ok=True)
        (tmp_path / "cards" / name / "device").mkdir(parents=True)
        (tmp_path / "cards" / name / "device" / "driver").symlink_to(tmp_path / "drivers" / driver)
    return tmp_path / "cards"


@pytest.mark.parametrize(
    ("transport", "wanted", "found"),
    [
        (None, None, None),
        ("cxi", None, "cxi"),
        ("rdma", None, None),
        (None, "mlx5_1", "verbs/mlx5_1"),
        (None, "=mlx5_1:1", "verbs/mlx5_1"),
        (None, "mlx5_0,mlx5_1", "verbs/mlx5_0,mlx5_1"),
        (None, "mlx5", "verbs/mlx5_0,mlx5_1"),
        (None, "=mlx5", "verbs/mlx5"),
        (None, "^mlx5_0", "verbs/mlx5_1"),
        (None, "^mlx5", "efa/rdmap7s0-rdm"),
        (None, "^mlx5,rdmap", None),
        ("efa", "mlx5,rdmap", "efa/rdmap7s0-rdm"),
        ("efa", "mlx5_0", "efa"),
        (None, "rdmap", "efa/rdmap7s0-rdm"),
        (None, "irdma0", "verbs/irdma0"),
        ("verbs", "mlx5_0", "verbs/mlx5_0"),
        ("cxi", "mlx5_0", "cxi"),
    ],
)
def test_fabric_of_transport_and_cards(cards, transport, wanted, found):
    assert fabric.fabric_of(transport, wanted, cards) == found


def test_network_of_the_process(monkeypatch, cards):
    monkeypatch.setattr(fabric, "_CARDS", cards)
    for name in WEFT:  # to be restored after the test
        monkeypatch.setenv(name, "")
    fabric.adopt_network()
    assert [os.environ[name] for name in WEFT] == ["", ""]
    monkeypatch.setenv("UCCL_SOCKET_IFNAME", "nosuch")
    monkeypatch.setenv("NCCL_IB_HCA", "mlx5_1")
    fabric.adopt_network()
    assert [os.environ[name] for name in WEFT] == ["verbs/mlx5_1", "nosuch"]
    monkeypatch.setenv("UCCL_IB_HCA", "mlx5_0")
    monkeypatch.setenv("UCCL_SOCKET_IFNAME", "lo")
    fabric.adopt_network()  # Weft's own variables are the stronger ones
    assert [os.environ[name] for name in WEFT] == ["verbs/mlx5_1", "nosuch"]
    for name in WEFT:
        monkeypatch.setenv(name, "")
    monkeypatch.setenv("UCCL_EP_TRANSPORT", "verbs")
    fabric.adopt_network()
    lo = next(name for _, name in socket.if_nameindex() if name.startswith("lo"))
    assert [os.environ[name] for name in WEFT] == ["verbs/mlx5_0", lo]


def network_is_used(rank, num_ranks, group):
    """Between hosts the choice reaches libfabric: what cannot be had is refused by its name."""
    given = {"UCCL_EP_TRANSPORT": "tcp", "UCCL_SOCKET_IFNAME": "nosuch"}
    try:
        os.environ.update(given)
        with two_domains() as hosts:
            case = Case(rank, hosts, 2 * num_ranks, 2, (3,))
            buffer = UCCLBuffer(hosts)
            with pytest.raises(weft.Error, match="nosuch"):
                dispatch(buffer, case)
            for name in WEFT:
                del os.environ[name]
            os.environ["UCCL_SOCKET_IFNAME"] = "lo"
            buffer = UCCLBuffer(hosts)
            assert torch.equal(dispatch(buffer, case)[0], case.rows(case.all_x))
    finally:
        for name in (*given, *WEFT):
            os.environ.pop(name, None)


def test_network_is_used(ranks):
    ranks(network_is_used, 4)


def late_rank(rank, num_ranks, group):
    os.environ["UCCL_EP_CPU_TIMEOUT_SECS"] = "1"
    try:
        buffer = UCCLBuffer(group)
    finally:
        del os.environ["UCCL_EP_CPU_TIMEOUT_SECS"]
    case = Case(rank, group, 2 * num_ranks, 2, (3,))
    *_, handle, _ = dispatch(buffer, case)
    if rank == 0:
        with pytest.raises(weft.TimeoutError, match="1.0 s"):
            buffer.dispatch(case.x, handle=handle)
    dist.barrier(group)  # the other rank is late until then


def test_deadline_of_calls(ranks):
    ranks(late_rank, 2)


def queue_depth(rank, num_ranks, group):
    assert Buffer(group).nvshmem_qp_depth == 1024
    os.environ["NVSHMEM_QP_DEPTH"] = "4096"
    try:
        assert Buffer(group).nvshmem_qp_depth == 4096
    finally:
        del os.environ["NVSHMEM_QP_DEPTH"]


def test_queue_depth_can_be_read(ranks):
    ranks(queue_depth, 1)


def test_rate_of_the_card(monkeypatch, tmp_path):
    (tmp_path / "ports" / "1").mkdir(parents=True)
    (tmp_path / "ports" / "1" / "rate").write_text("200 Gb/sec (4X HDR)\n")
    usual = model.rdma_gbs()
    # A path from the root: the folder that the name is looked for in does not matter then.
    monkeypatch.setenv("EP_NIC_NAME", str(tmp_path))
    assert model.rdma_gbs() == 25.0
    monkeypatch.setenv("EP_NIC_NAME", "")
    assert model.rdma_gbs() == usual
