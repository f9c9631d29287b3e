"""Nothing inside reaches a socket of the host."""

import os
import socket
import struct
import threading

import pytest

from tests.escape.outside import every_target, outside, with_values

CONNECT = """
import socket
link = socket.socket(family, socket.SOCK_STREAM)
link.settimeout(60)
try:
    link.connect(address)
    link.sendall(b'stolen')
    print('sent')
except OSError as error:
    print(type(error).__name__)
"""

SEND = """
import socket
link = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
try:
    link.sendto(b'stolen', ('127.0.0.1', port))
    print('sent')
except OSError as error:
    print(type(error).__name__)
"""

RESOLVE = """
import socket
name = b''.join(bytes([len(part)]) + part for part in (b'stolen', b'example'))
query = bytes.fromhex('123401000001000000000000') + name + b'\\0' + bytes.fromhex('00010001')
link = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
link.settimeout(60)
try:
    link.connect(('127.0.0.1', port))
    link.send(query)
    print(socket.inet_ntoa(link.recv(512)[-4:]))
except OSError as error:
    print(type(error).__name__)
"""


def received(server, wait_s=60.0):
    """Return what one connection or datagram brought, None if there was none."""
    server.settimeout(wait_s)
    try:
        if server.type == socket.SOCK_DGRAM:
            return server.recv(100)
        link, _ = server.accept()
        with link:
            return link.recv(100)
    except TimeoutError:
        return None


def listening(kind, folder):
    if kind == "tcp":
        server = socket.create_server(("127.0.0.1", 0))
    elif kind == "tcp6":
        server = socket.create_server(("::1", 0), family=socket.AF_INET6)
    else:
        server = socket.socket(socket.AF_UNIX)
        server.bind(f"\0escape{os.getpid()}" if kind == "abstract" else str(folder / "socket"))
        server.listen()
    return server


@pytest.mark.parametrize("kind", ["tcp", "tcp6", "unix", "abstract"])
async def test_no_connection_reaches_the_host(target, tmp_path, kind):
    if kind == "tcp6" and not os.path.exists("/proc/net/if_inet6"):
        pytest.skip("a machine without IPv6")
    with listening(kind, tmp_path) as server:
        address = server.getsockname()
        code = with_values(CONNECT, family=int(server.family), address=address)
        assert outside(code, tmp_path) == "sent"
        assert received(server) == b"stolen"
        result = await target.attack(code)
        # What was sent on this host would be there when the attack has ended.
        assert received(server, 0.05) is None
    refused = {"ConnectionRefusedError", "FileNotFoundError", "PermissionError", "OSError"}
    assert result.output in refused


async def test_no_datagram_reaches_the_host(target, tmp_path):
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as server:
        server.bind(("127.0.0.1", 0))
        code = with_values(SEND, port=server.getsockname()[1])
        assert outside(code, tmp_path) == "sent"
        assert received(server) == b"stolen"
        await target.attack(code)  # it may think it has sent something
        assert received(server, 0.05) is None


def answer_queries(server):
    """A name server that knows one address."""
    while True:
        query, peer = server.recvfrom(512)
        if not query:
            return
        answer = b"\xc0\x0c" + struct.pack(">HHIH", 1, 1, 60, 4) + socket.inet_aton("192.0.2.7")
        server.sendto(query[:2] + b"\x81\x80\0\1\0\1\0\0\0\0" + query[12:] + answer, peer)


async def test_no_name_server_is_reached(target, tmp_path):
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as server:
        server.bind(("127.0.0.1", 0))
        thread = threading.Thread(target=answer_queries, args=(server,))
        thread.start()
        code = with_values(RESOLVE, port=server.getsockname()[1])
        try:
            assert outside(code, tmp_path) == "192.0.2.7"
            result = await target.attack(code)
        finally:
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as last:
                last.sendto(b"", server.getsockname())
            thread.join(300)
    assert result.output in ("ConnectionRefusedError", "OSError", "PermissionError")
    lookup = "import socket; print(socket.getaddrinfo('example.com', 80))"
    assert "gaierror" in (await target.attack(lookup)).output


@every_target
async def test_there_is_no_interface_but_the_loopback(target):
    result = await target.attack(
        "import socket; print([name for _, name in socket.if_nameindex()])"
    )
    assert result.output in ("['lo']", "[]") or "Error" in result.output
