"""What the doctor says of one fact each, without ranks."""

import os
import socket
from pathlib import Path

import pytest

from fsharding.apps.cli import doctor
from fsharding.apps.cli.doctor import Finding, listening, on_socket, transport

needs_proc = pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="needs Linux's /proc")


@needs_proc
@pytest.mark.parametrize(
    ("family", "address", "said"),
    [
        (socket.AF_INET, "127.0.0.1", "127.0.0.1"),
        (socket.AF_INET, "0.0.0.0", "0.0.0.0"),
        (socket.AF_INET6, "::1", "::1"),
        (socket.AF_INET6, "::", "::"),
        (socket.AF_INET6, "::ffff:127.0.0.1", "127.0.0.1"),
    ],
)
def test_sockets_that_listen_are_found_with_their_addresses(family, address, said):
    with socket.socket(family) as it:
        if family == socket.AF_INET6:
            it.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        it.bind((address, 0))
        port = it.getsockname()[1]
        assert (said, port) not in listening(os.getpid()), "it does not listen yet"
        it.listen()
        assert (said, port) in listening(os.getpid())
    assert (said, port) not in listening(os.getpid())


def test_who_reaches_an_address():
    found = [on_socket("rank 0", address, 1) for address in ("127.0.0.1", "::1", "0.0.0.0", "::", "10.0.0.1")]
    assert [finding.grave for finding in found] == [False, False, True, True, True]
    assert ["outside" in finding.value for finding in found] == [False, False, True, True, True]
    assert on_socket("rank 0", "::", 7).name == "listening on [::]:7"
    assert on_socket("rank 0", "10.0.0.1", 7).name == "listening on 10.0.0.1:7"


def test_variables_left_from_a_launcher_and_interfaces_that_are_not_there(monkeypatch):
    for name in [name for name in os.environ if name.startswith(doctor._PREFIXES) or name in doctor._NAMES]:
        monkeypatch.delenv(name)
    assert [*doctor._variables()] == [Finding("variables", "none set that ranks read")]
    for name, value in (
        ("RANK", "0"),
        ("GLOO_SOCKET_IFNAME", "nope0"),
        ("NCCL_SOCKET_IFNAME", "^docker"),
        ("NCCL_DEBUG", "INFO"),
    ):
        monkeypatch.setenv(name, value)
    found = {finding.name: finding for finding in doctor._variables()}
    assert found["RANK"].wrong.startswith("A launcher sets it") and found["RANK"].mend == "unset RANK"
    assert found["GLOO_SOCKET_IFNAME"].wrong.startswith("No such interface; found lo")
    assert not found["NCCL_SOCKET_IFNAME"].wrong and found["NCCL_DEBUG"] == Finding("NCCL_DEBUG", "INFO")
    for value, wrong in (("lo,lo", False), ("l", False), ("lo,nope0", True), ("^lo", True)):
        assert bool(doctor._trouble("GLOO_SOCKET_IFNAME", value)[0]) == wrong, value


def test_why_ranks_send_instead_of_sharing(monkeypatch):
    assert transport("shared_memory", "its ranks are processes of one machine")[1:] == ("", "")
    value, wrong, mend = transport("pairwise", "a reason")
    assert value == "pairwise: a reason" and "slower" in wrong and mend.startswith("Run all ranks as one user")
    monkeypatch.setenv("FSHARDING_SHARED_MEMORY", "0")
    assert transport("pairwise", "a reason")[2] == "unset FSHARDING_SHARED_MEMORY"


def test_few_open_files_are_told_with_the_command(monkeypatch):
    monkeypatch.setattr(doctor.resource, "getrlimit", lambda _: (1024, 2048))
    finding = doctor._open_files()
    assert finding.value == "1024, limit 2048" and finding.mend == "Run `ulimit -n 2048` first."
    monkeypatch.setattr(doctor.resource, "getrlimit", lambda _: (1 << 20, 1 << 20))
    assert not doctor._open_files().wrong


def test_which_formats_have_kernels():
    rows = {finding.name: finding for finding in doctor._kernels()}
    assert rows["TENSORWISE on cpu"].value.startswith("RowWise, with activations in float8_e4m3fn[row, float32]")
    assert "MXFP8" in rows["dequantized on cpu"].value and not any(row.wrong or row.grave for row in rows.values())
