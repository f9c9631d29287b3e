"""The order in which pages of several sites are parsed."""

from concurrent.futures import Future

import pytest

from mega_agentrl.tool.browse import parse_queue
from mega_agentrl.tool.browse.parse_queue import ParsedPage, ParseQueue, site_of


class Workers:
    """Workers that parse a page when the test says so."""

    def __init__(self, num_workers=2):
        self.queue = ParseQueue(num_workers)
        self.started = []
        self._parsing = {}

    def submit(self, host):
        def parse():
            self.started.append(host)
            self._parsing[host] = Future()
            return self._parsing[host]

        return self.queue.submit(host, parse)

    def finish(self, host, cpu_s=0.1, is_refused=False):
        page = ParsedPage(text=host, cpu_s=cpu_s, is_refused=is_refused)
        self._parsing.pop(host).set_result(page)

    def refuse(self, host):
        self.submit(host)
        self.finish(host, cpu_s=1.5, is_refused=True)


def test_each_page_gets_its_own_result_or_error():
    workers = Workers(1)
    first, second, third = map(workers.submit, ("a.org", "b.org", "c.org"))
    assert workers.started == ["a.org"]
    workers.finish("a.org")
    assert first.result(0).text == "a.org"
    workers._parsing.pop("b.org").set_exception(OSError("lost"))
    assert isinstance(second.exception(0), OSError)
    workers.finish("c.org")
    assert third.result(0).text == "c.org"


def test_a_page_whose_worker_cannot_be_asked_fails_alone():
    queue = ParseQueue(1)
    assert isinstance(queue.submit("a.org", lambda: {}["x"]).exception(0), KeyError)
    workers = Workers(1)
    workers.queue = queue
    workers.submit("a.org")
    assert workers.started == ["a.org"]


def test_sites_take_turns_however_many_pages_one_has_waiting():
    workers = Workers(1)
    workers.submit("a.org")
    for number in range(5):
        workers.submit(f"{number}.a.org")
    workers.submit("b.org")
    workers.finish("a.org")
    assert workers.started == ["a.org", "b.org"]
    workers.finish("b.org")
    assert workers.started[2:] == ["0.a.org"]


def test_sites_whose_last_page_took_long_wait_for_the_others():
    workers = Workers(1)
    workers.submit("slow.org")
    workers.finish("slow.org", cpu_s=1.4)
    for host in ("a.org", "slow.org", "b.org"):
        workers.submit(host)
    workers.submit("a.org")
    for host in ("a.org", "b.org", "a.org"):
        workers.finish(host)
    assert workers.started[1:] == ["a.org", "b.org", "a.org", "slow.org"]


def test_one_worker_remains_for_others_than_sites_with_refused_pages(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(parse_queue.time, "monotonic", lambda: now[0])
    workers = Workers(2)
    workers.refuse("a.org")
    workers.refuse("b.org")
    workers.started.clear()
    for host in ("a.org", "b.org", "x.a.org"):
        workers.submit(host)
    assert workers.started == ["a.org"]
    workers.submit("c.org")
    assert workers.started == ["a.org", "c.org"]
    workers.finish("a.org", cpu_s=1.5)
    assert workers.started == ["a.org", "c.org", "b.org"]
    now[0] += parse_queue.REFUSAL_EFFECT_S
    workers.finish("c.org")
    assert workers.started[3:] == ["x.a.org"]


def test_a_single_worker_serves_sites_with_refused_pages_too():
    workers = Workers(1)
    workers.refuse("a.org")
    workers.submit("a.org")
    assert workers.started == ["a.org", "a.org"]


def test_a_page_that_nobody_waits_for_is_not_parsed():
    workers = Workers(1)
    workers.submit("a.org")
    assert workers.submit("b.org").cancel()
    workers.submit("c.org")
    workers.finish("a.org")
    assert workers.started == ["a.org", "c.org"]


def test_the_memory_of_sites_is_bounded(monkeypatch):
    monkeypatch.setattr(parse_queue, "MAX_SITES", 3)
    workers = Workers(1)
    for number in range(10):
        workers.refuse(f"{number}.org")
    assert list(workers.queue._sites) == ["7.org", "8.org", "9.org"]


@pytest.mark.parametrize(
    ("host", "site"),
    [
        ("a.b.Example.org", "example.org"),
        ("example.org.", "example.org"),
        ("localhost", "localhost"),
        ("93.184.216.34", "93.184.216.34"),
        ("2001:db8::1", "2001:db8::1"),
    ],
    ids=["name", "dot", "label", "ipv4", "ipv6"],
)
def test_the_names_of_a_domain_are_one_site(host, site):
    assert site_of(host) == site
