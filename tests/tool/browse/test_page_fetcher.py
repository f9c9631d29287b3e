"""One page: redirects, connected addresses, size limits and refusals."""

import asyncio
import gzip
import ssl
import subprocess
import zlib

import pytest

from mega_agentrl.tool.browse.page_fetcher import PageFetcher
from mega_agentrl.tool.browse.url_rules import PageRefusedError, RefusalReason, UrlRules
from mega_agentrl.tool.web.retry import TransientError
from tests.tool.local_server import Reply, serving

HTML = {"Content-Type": "text/html; charset=utf-8"}


def names(**hosts):
    """A resolver of a few names; each use takes the next of its addresses."""
    left = {name.replace("_", "."): list(addresses) for name, addresses in hosts.items()}

    async def resolve(host, port):
        addresses = left[host]
        return addresses.pop(0) if len(addresses) > 1 else addresses[0]

    return resolve


HERE = [["127.0.0.1"]]


class NamedRules(UrlRules):
    """Lets names on the server's port through, as if it were the usual one."""

    def check_url(self, text):
        port = f":{self.exempt_address[1]}"
        url = super().check_url(text.replace(port, "", 1))
        return url.copy_with(port=self.exempt_address[1])


def fetcher(server, resolve=None, rules=NamedRules, **options):
    made = rules(exempt_address=("127.0.0.1", server.port), **options.pop("lists", {}))
    options = {"max_bytes": 1 << 20, "timeout_s": 60.0, **options}
    return PageFetcher(made, resolve=resolve or names(site_test=HERE), **options)


def page(body, **headers):
    return lambda _: Reply(body, headers={**HTML, **headers})


async def test_a_page_and_its_host_header():
    with serving(page(b"<p>hello")) as server:
        found = await fetcher(server).fetch(f"http://site.test:{server.port}/a?b=c#d")
    assert (found.body, found.media_type, found.charset) == (b"<p>hello", "text/html", "utf-8")
    assert found.url_chain == (f"http://site.test:{server.port}/a?b=c",)
    (asked,) = server.requests
    assert (asked.method, asked.path) == ("GET", "/a?b=c")
    assert asked.headers["host"] == f"site.test:{server.port}"
    assert "cookie" not in asked.headers


async def test_a_name_is_resolved_once_and_connected_to_as_checked():
    """Had it been asked a second time, for the connection, the name would mean another host."""
    rebinding = names(site_test=[["127.0.0.1"], ["127.0.0.9"]])
    with serving(page(b"x")) as server:
        reader = fetcher(server, rebinding)
        await reader.fetch(f"http://site.test:{server.port}/")
        assert len(server.requests) == 1
        with pytest.raises(PageRefusedError) as caught:
            await reader.fetch(f"http://site.test:{server.port}/")
        assert caught.value.reason is RefusalReason.not_public
    assert len(server.requests) == 1


async def test_private_addresses_are_never_connected_to():
    with serving(page(b"secret")) as server:
        port = server.port
        reader = PageFetcher(UrlRules(), max_bytes=99, timeout_s=60, resolve=names(site_test=HERE))
        for url in (server.url, f"http://localhost:{port}", "http://site.test/", "http://[::1]/"):
            with pytest.raises(PageRefusedError):
                await reader.fetch(url)
    assert server.requests == []


async def test_redirects_are_followed_and_checked_one_by_one():
    def answer(asked):
        to = {"/a": "b", "/b": f"http://other.test:{server.port}/c?x", "/evil": "http://10.0.0.1/"}
        to |= {"/file": "file:///etc/passwd", "/name": "http://private.test/", "/loop": "/loop"}
        to["/denied"] = f"http://denied.test:{server.port}/"
        if asked.path in to:
            return Reply(status=302, headers={"Location": to[asked.path]})
        return Reply(b"arrived", headers=HTML)

    resolve = names(
        site_test=HERE, other_test=HERE, denied_test=HERE, private_test=[["192.168.0.1"]]
    )
    with serving(answer) as server:
        base = f"http://site.test:{server.port}"
        reader = fetcher(server, resolve, lists={"denied_domains": ("denied.test",)})
        found = await reader.fetch(f"{base}/a")
        assert found.body == b"arrived"
        hops = (f"{base}/a", f"{base}/b", f"http://other.test:{server.port}/c?x")
        assert found.url_chain == hops
        assert [asked.headers["host"].split(":")[0] for asked in server.requests] == [
            "site.test", "site.test", "other.test"
        ]  # fmt: skip
        for path in ("/evil", "/file", "/name", "/denied"):
            num_asked = len(server.requests)
            with pytest.raises(PageRefusedError):
                await reader.fetch(f"{base}{path}")
            assert len(server.requests) == num_asked + 1, path
        with pytest.raises(PageRefusedError) as caught:
            await reader.fetch(f"{base}/loop")
        assert caught.value.reason is RefusalReason.redirect


@pytest.mark.parametrize("encoding", ["gzip", "deflate"])
async def test_compressed_pages_are_read_up_to_the_limit(encoding):
    pack = gzip.compress if encoding == "gzip" else zlib.compress
    with serving(page(pack(b"hello"), **{"Content-Encoding": encoding})) as server:
        assert (await fetcher(server).fetch(server.url)).body == b"hello"
    bomb = pack(b"\0" * 50_000_000)
    with serving(page(bomb, **{"Content-Encoding": encoding})) as server:
        found = await fetcher(server, max_bytes=100_000).fetch(server.url)
    assert len(found.body) == 100_000


@pytest.mark.parametrize(
    ("reply", "reason"),
    [
        (page(b"x", **{"Content-Encoding": "br"}), RefusalReason.content),
        (page(b"x", **{"Content-Type": "application/pdf"}), RefusalReason.content),
        (page(b"x", **{"Content-Type": "multipart/mixed"}), RefusalReason.content),
        (lambda _: Reply(status=404), RefusalReason.status),
        (lambda _: Reply(status=403), RefusalReason.status),
    ],
    ids=["packing", "pdf", "multipart", "missing", "forbidden"],
)
async def test_a_page_that_cannot_be_read_is_refused(reply, reason):
    with serving(reply) as server:
        with pytest.raises(PageRefusedError) as caught:
            await fetcher(server).fetch(server.url)
    assert caught.value.reason is reason


@pytest.mark.parametrize(
    ("reply", "status"),
    [
        (page(b"no gzip", **{"Content-Encoding": "gzip"}), None),
        (lambda _: Reply(status=503), 503),
    ],
    ids=["broken", "overloaded"],
)
async def test_a_broken_answer_and_an_overloaded_server_are_transient(reply, status):
    with serving(reply) as server:
        with pytest.raises(TransientError) as caught:
            await fetcher(server).fetch(server.url)
    assert caught.value.status == status


async def test_a_page_without_end_is_read_up_to_the_limit():
    async def endless(reader, writer):
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\n\r\n")
        while not writer.is_closing():
            writer.write(b"x" * 10_000)
            try:
                await writer.drain()
            except ConnectionError:
                return

    blocked = await asyncio.start_server(endless, "127.0.0.1", 0)
    port = blocked.sockets[0].getsockname()[1]
    rules = UrlRules(exempt_address=("127.0.0.1", port))
    async with asyncio.timeout(60):
        found = await PageFetcher(rules, max_bytes=50_000, timeout_s=60).fetch(
            f"http://127.0.0.1:{port}/"
        )
    blocked.close()
    assert len(found.body) == 50_000


async def test_the_next_address_is_tried_where_one_takes_no_connection():
    class TwoAddresses(NamedRules):
        async def resolve_public(self, url, resolve):
            return "127.0.0.2", "127.0.0.1"

    with serving(page(b"x")) as server:
        assert (await fetcher(server, rules=TwoAddresses).fetch(server.url)).body == b"x"


async def test_the_name_not_the_address_is_proven_by_tls(tmp_path):
    key, cert = tmp_path / "key.pem", tmp_path / "cert.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2",
         "-keyout", key, "-out", cert, "-subj", "/CN=site.test",
         "-addext", "subjectAltName=DNS:site.test"],
        check=True, capture_output=True, timeout=120,
    )  # fmt: skip
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(cert, key)
    asked_for = []
    context.sni_callback = lambda _socket, name, _context: asked_for.append(name)

    async def answer(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nContent-Type: text/plain\r\n\r\nx")
        await writer.drain()
        writer.close()

    served = await asyncio.start_server(answer, "127.0.0.1", 0, ssl=context)
    port = served.sockets[0].getsockname()[1]
    rules = NamedRules(exempt_address=("127.0.0.1", port))
    trust = ssl.create_default_context(cafile=str(cert))
    resolve = names(site_test=HERE, other_test=HERE)
    reader = PageFetcher(rules, max_bytes=99, timeout_s=60, resolve=resolve, ssl_context=trust)
    assert (await reader.fetch(f"https://site.test:{port}/")).body == b"x"
    with pytest.raises(Exception, match=r"not valid for 'other[.]test'"):
        await reader.fetch(f"https://other.test:{port}/")
    assert asked_for == ["site.test", "other.test"]
    served.close()
