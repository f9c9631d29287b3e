"""No spelling, name, list or address leads anywhere but to the public web."""

import ipaddress
import socket

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mega_agentrl.tool.browse.url_rules import (
    PageRefusedError,
    RefusalReason,
    UrlRules,
    is_public_address,
    resolve_host,
)

OPEN = UrlRules()


READABLE = """
https://example.org/a?b=c http://example.org:80/ https://example.org:443 http://93.184.216.34/
http://[2606:2800:220:1::1]/ HTTPS://Example.ORG https://3com.com/ https://xn--bcher-kva.example/
""".split()
REFUSED = """
example.org ftp://example.org/ file:///etc/passwd gopher://example.org/ data:text/html,x
javascript:alert(1) http:// http:///x https://user@example.org/ https://user:secret@example.org/
http://example.org:22/ http://example.org:443/ https://example.org:8443/ http://example.org:99999/
http://[::1
""".split()
WITH_SPACES = ["", "http://exa mple.org/", "http://example.org\n.evil/"]


@pytest.mark.parametrize("url", READABLE)
def test_a_public_page_may_be_read(url):
    assert OPEN.check_url(url).host


@pytest.mark.parametrize("url", [*REFUSED, *WITH_SPACES, "https://example.org/" + "x" * 2000])
def test_any_other_url_is_refused(url):
    with pytest.raises(PageRefusedError):
        OPEN.check_url(url)


ODD_SPELLINGS = """
2130706433 017700000001 0x7f000001 0x7f.0.0.1 0177.0.0.1 127.1 127.0.1 0 0x 127.0.0.01 1.2.3.4.5
256.1.1.1 example.1 127.0.0.1.0x1 2130706433.
""".split()


@pytest.mark.parametrize("host", ODD_SPELLINGS)
def test_an_odd_spelling_of_an_address_is_refused(host):
    with pytest.raises(PageRefusedError) as caught:
        OPEN.check_url(f"http://{host}/")
    assert caught.value.reason in (RefusalReason.spelling, RefusalReason.not_a_web_address)


LOOK_ALIKES = ["\uff11\uff12\uff17.0.0.1", "①②⑦.0.0.1", "127。0。0。1", "ⓛⓞⓒⓐⓛhost"]


@pytest.mark.parametrize("host", ["localhost", "localhost.", *LOOK_ALIKES])
async def test_no_spelling_of_this_host_is_resolved(host):
    with pytest.raises(PageRefusedError):
        await OPEN.resolve_public(OPEN.check_url(f"http://{host}/"), resolve_host)


NOT_PUBLIC = """
0.0.0.0 0.1.2.3 10.0.0.1 100.64.0.1 100.100.100.200 127.0.0.1 127.255.255.254 169.254.169.254
172.16.0.1 172.31.255.255 192.0.0.1 192.0.0.192 192.0.2.1 192.88.99.1 192.168.0.1 198.18.0.1
198.51.100.1 203.0.113.1 224.0.0.1 239.255.255.255 240.0.0.1 255.255.255.255 168.63.129.16
:: ::1 ::2 ::127.0.0.1 ::8.8.8.8 ::ffff:127.0.0.1 ::ffff:10.0.0.1 ::ffff:169.254.169.254
64:ff9b::7f00:1 64:ff9b::a00:1 64:ff9b:1::808:808 100::1 2001::1 2001:db8::1 2002:7f00:1::1
2002:808:808::1 fc00::1 fd00:ec2::254 fe80::1 fe80::1%lo fec0::1 ff02::1 4000::1 2001:10::1
""".split()
PUBLIC = "8.8.8.8 1.1.1.1 93.184.216.34 172.32.0.1 2606:4700::1111 ::ffff:8.8.8.8 64:ff9b::808:808"


@pytest.mark.parametrize("address", NOT_PUBLIC)
def test_addresses_of_private_and_special_networks_are_not_public(address):
    assert not is_public_address(ipaddress.ip_address(address))


@pytest.mark.parametrize("address", PUBLIC.split())
def test_addresses_of_the_internet_are_public(address):
    assert is_public_address(ipaddress.ip_address(address))


@given(st.integers(0, 2**32 - 1))
def test_an_embedded_address_is_as_public_as_itself(number):
    inner = ipaddress.IPv4Address(number)
    mapped = ipaddress.IPv6Address((0xFFFF << 32) + number)
    nat64 = ipaddress.IPv6Address(int(ipaddress.IPv6Address("64:ff9b::")) + number)
    assert is_public_address(mapped) == is_public_address(nat64) == is_public_address(inner)
    assert not (is_public_address(inner) and inner.is_private)
    assert not is_public_address(ipaddress.IPv6Address((0x2002 << 112) + (number << 80)))


def resolving(*addresses):
    async def resolve(host, port):
        return addresses

    return resolve


async def test_every_address_of_a_name_must_be_public():
    url = OPEN.check_url("https://example.org/")
    assert await OPEN.resolve_public(url, resolving("8.8.8.8", "1.1.1.1", "8.8.8.8")) == (
        "8.8.8.8",
        "1.1.1.1",
    )
    for bad in ("127.0.0.1", "::1", "169.254.169.254", "::ffff:10.0.0.1", "fe80::1%2"):
        with pytest.raises(PageRefusedError) as caught:
            await OPEN.resolve_public(url, resolving("8.8.8.8", bad))
        assert caught.value.reason is RefusalReason.not_public
    with pytest.raises(PageRefusedError) as caught:
        await OPEN.resolve_public(url, resolving())
    assert caught.value.reason is RefusalReason.no_address


async def test_an_address_is_not_resolved_but_checked():
    for text in ("http://127.0.0.1/", "http://[::1]/", "http://[::ffff:7f00:1]/"):
        with pytest.raises(PageRefusedError) as caught:
            await OPEN.resolve_public(OPEN.check_url(text), resolving("8.8.8.8"))
        assert caught.value.reason is RefusalReason.not_public
    literal = OPEN.check_url("http://[2606:4700::1111]/")
    assert await OPEN.resolve_public(literal, resolving("::1")) == ("2606:4700::1111",)


async def test_an_unknown_host_has_no_address_and_a_failed_resolver_raises(monkeypatch):
    def fail(code):
        def getaddrinfo(*_, **__):
            raise socket.gaierror(code, "so")

        monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)

    fail(socket.EAI_NONAME)
    assert await resolve_host("nowhere.invalid", 80) == []
    fail(socket.EAI_AGAIN)
    with pytest.raises(socket.gaierror):
        await resolve_host("example.org", 80)
    monkeypatch.undo()
    assert await resolve_host("x" * 70 + ".org", 80) == []
    assert await resolve_host("127.0.0.1", 80) == ["127.0.0.1"]


async def test_one_address_and_port_may_be_exempt():
    rules = UrlRules(exempt_address=("127.0.0.1", 8123))
    url = rules.check_url("http://127.0.0.1:8123/x")
    assert await rules.resolve_public(url, resolving()) == ("127.0.0.1",)
    for text in ("http://127.0.0.1:8124/", "http://127.0.0.2:8123/", "http://example.org:8123/"):
        with pytest.raises(PageRefusedError) as caught:
            rules.check_url(text)
        assert caught.value.reason is RefusalReason.port
    with pytest.raises(PageRefusedError) as caught:
        await rules.resolve_public(rules.check_url("http://127.0.0.1/"), resolving())
    assert caught.value.reason is RefusalReason.not_public


@pytest.mark.parametrize(
    ("allowed", "denied", "readable", "refused"),
    [
        ((), (), "example.org a.b.c", ""),
        (("example.Org",), (), "example.org www.example.org WWW.Example.Org. a.b.example.org",
         "badexample.org example.org.evil.com org other.org"),
        ((), ("example.org",), "example.com notexample.org", "example.org a.example.org"),
        (("org",), ("bad.org",), "good.org", "bad.org x.bad.org example.com"),
        ((".example.org",), (), "example.org", "example.com"),
    ],
)  # fmt: skip
def test_domain_lists_compare_whole_labels(allowed, denied, readable, refused):
    rules = UrlRules(allowed_domains=allowed, denied_domains=denied)
    for host in readable.split():
        rules.check_url(f"https://{host}/")
    for host in refused.split():
        with pytest.raises(PageRefusedError) as caught:
            rules.check_url(f"https://{host}/")
        assert caught.value.reason is RefusalReason.domain
