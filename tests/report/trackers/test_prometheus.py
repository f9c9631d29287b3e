"""The endpoint, scraped over HTTP."""

from pathlib import Path
from socketserver import BaseServer
from urllib.request import urlopen

import pytest
from prometheus_client.parser import text_string_to_metric_families

from mega_agentrl.config.sections.runtime import ReportConfig
from mega_agentrl.report.trackers import prometheus
from mega_agentrl.report.trackers.factory import open_trackers
from mega_agentrl.report.trackers.prometheus import PrometheusTracker
from mega_agentrl.runtime.free_port import free_port
from tests.config.refusals import refused


@pytest.fixture(autouse=True)
def quick_ends(monkeypatch):
    """A server looks for its end twice a second, which every test would wait for."""
    monkeypatch.setattr(BaseServer.serve_forever, "__defaults__", (0.01,))


@pytest.fixture
def tracker():
    tracker = PrometheusTracker("127.0.0.1", 0)
    yield tracker
    tracker.close()


@pytest.fixture
def port(tracker):
    return tracker.port


def scrape(port):
    with urlopen(f"http://127.0.0.1:{port}/metrics", timeout=120) as answer:
        text = answer.read().decode()
    samples = [one for family in text_string_to_metric_families(text) for one in family.samples]
    return {
        (one.name, *one.labels.values()): one.value
        for one in samples
        if not one.name.endswith("_created")
    }


def test_the_latest_values_and_the_sums_are_served(tracker, port):
    tracker.log_config({"seed": 1}, "seed: 1\n")
    tracker.log("sft", 1, {"num_tokens": 10})
    tracker.log("rl", 1, {"actor/num_tokens": 5, "rollout/tool/search/num_calls": 2})
    tracker.log("rl", 2, {"actor/num_tokens": 7, "rollout/tool/search/num_calls": 3, "a-b": -1})
    assert scrape(port) == {
        ("mega_agentrl_steps_total", "sft"): 1,
        ("mega_agentrl_steps_total", "rl"): 2,
        ("mega_agentrl_tokens_total",): 22,
        ("mega_agentrl_tool_calls_total", "search"): 5,
        ("mega_agentrl_num_tokens", "sft"): 10,
        ("mega_agentrl_actor_num_tokens", "rl"): 7,
        ("mega_agentrl_rollout_tool_search_num_calls", "rl"): 3,
        ("mega_agentrl_a_b", "rl"): -1,
        ("mega_agentrl_step", "sft"): 1,
        ("mega_agentrl_step", "rl"): 2,
    }


@pytest.mark.parametrize("name", ["steps", "steps_total", "tokens", "tool/calls"])
def test_a_metric_named_like_a_counter_has_a_gauge_of_its_own(tracker, port, name):
    tracker.log("rl", 1, {name: 3.5})
    shown = f"mega_agentrl_{name.replace('/', '_')}_now"
    assert scrape(port)[shown, "rl"] == 3.5


def test_a_port_in_use_is_an_error_that_names_it(tracker, port):
    error = refused(PrometheusTracker, "127.0.0.1", port)
    assert (error.key, error.got) == ("report.prometheus_port", port)


def test_an_address_of_another_machine_is_an_error_that_names_it():
    error = refused(PrometheusTracker, "192.0.2.77", 0)
    assert (error.key, error.got) == ("report.prometheus_host", "192.0.2.77")


@pytest.mark.parametrize(
    ("settings", "address", "is_open"),
    [({}, "127.0.0.1", False), ({"prometheus_host": "0.0.0.0"}, "0.0.0.0", True)],
    ids=["default", "all_interfaces"],
)
def test_other_machines_reach_the_endpoint_only_if_that_is_set(
    tmp_path, settings, address, is_open
):
    port = free_port()
    config = ReportConfig(prometheus_port=port, trackers=[], **settings)
    with open_trackers(tmp_path, config) as (tracker,):
        assert tracker.host == address
        listening = Path("/proc/net/tcp").read_text().split()
        assert (f"00000000:{port:04X}" in listening) is is_open


def test_a_closed_endpoint_frees_its_port():
    first = PrometheusTracker("127.0.0.1", 0)
    first.close()
    second = PrometheusTracker("127.0.0.1", first.port)
    assert second.port == first.port
    second.close()


def test_names_beyond_the_bound_are_left_out_and_counted(tracker, port, monkeypatch):
    monkeypatch.setattr(prometheus, "MAX_GAUGES", 3)
    monkeypatch.setattr(prometheus, "MAX_TOOLS", 1)
    calls = {f"rollout/tool/t{index}/num_calls": 2.0 for index in range(5)}
    tracker.log("rl", 1, calls)
    tracker.log("rl", 2, calls)
    got = scrape(port)
    assert got["mega_agentrl_step", "rl"] == 2
    assert got["mega_agentrl_metrics_left_out", "rl"] == 3
    assert got["mega_agentrl_tool_calls_total", "t0"] == 4
    assert got["mega_agentrl_tool_calls_total", "other"] == 2 * 4 * 2
    assert len(got) == 1 + 1 + 3 + 1 + 2
