"""Defaults and ranges of `tool.*`."""

import pytest
from omegaconf import OmegaConf

from mega_agentrl.config.enums import PythonMode, SandboxIsolation, SearchBackend
from mega_agentrl.config.sections.tools import (
    BrowseToolConfig,
    PythonToolConfig,
    SearchToolConfig,
    ToolCacheConfig,
    ToolConfig,
    WebRequestConfig,
)
from tests.config.refusals import refused, refused_setting


def test_only_python_is_enabled_by_default_isolated_and_stateless():
    config = OmegaConf.to_object(OmegaConf.structured(ToolConfig))
    assert config.user_tools_file == ""
    assert not config.search.is_enabled
    assert not config.browse.is_enabled
    assert config.python.isolation is SandboxIsolation.bubblewrap
    assert config.python.mode is PythonMode.stateless
    assert config.python.preload_modules == ["numpy", "sympy", "pandas"]
    assert config.python.preload_modules is not PythonToolConfig().preload_modules
    assert config.python.num_hosts == 0


@pytest.mark.parametrize(
    ("section", "key", "value"),
    [
        (PythonToolConfig, "python.num_hosts", -1),
        (PythonToolConfig, "python.num_workers", 0),
        (PythonToolConfig, "python.timeout_s", 0.0),
        (PythonToolConfig, "python.memory_limit_mib", 63),
        (SearchToolConfig, "search.top_k", 0),
        (WebRequestConfig, "web.timeout_s", 0.0),
        (WebRequestConfig, "web.max_calls_per_s", -0.1),
    ],
)
def test_values_out_of_range_name_their_key_and_value(section, key, value):
    assert refused_setting(section, **{key.split(".")[1]: value}) == (f"tool.{key}", value)


def test_boundaries_pass():
    PythonToolConfig(num_workers=1, memory_limit_mib=64)
    SearchToolConfig(top_k=1)
    BrowseToolConfig(allowed_domains=["a.org", "10.0.0.1"])
    WebRequestConfig(max_calls_per_s=0)
    ToolCacheConfig(path="")


def test_a_sandbox_may_use_four_times_the_process_limit():
    assert PythonToolConfig(memory_limit_mib=64).total_memory_mib == 256


def test_a_source_enables_the_search_tool():
    assert SearchToolConfig(source="c.jsonl").is_enabled
    assert SearchToolConfig(
        backend=SearchBackend.retrieve, source="http://host:8000/retrieve"
    ).is_enabled


@pytest.mark.parametrize("backend", [SearchBackend.retrieve, SearchBackend.web])
@pytest.mark.parametrize("url", ["", "host:8000", "ftp://host"])
def test_a_remote_backend_needs_a_url(backend, url):
    error = refused(SearchToolConfig, backend=backend, source=url)
    assert (error.key, error.got) == ("tool.search.source", url)
    assert f"tool.search.backend={backend}" in error.expected


@pytest.mark.parametrize(
    "domain", ["https://a.org", "a.org/x", "*.a.org", "a.org:80", "", ".", "ä.org"]
)
@pytest.mark.parametrize("key", ["allowed_domains", "denied_domains"])
def test_lists_hold_domains(key, domain):
    got = refused_setting(BrowseToolConfig, **{key: ["ok.org", domain]})
    assert got == (f"tool.browse.{key}", domain)


def test_allowed_domains_enable_browsing():
    assert BrowseToolConfig(allowed_domains=["a.org"]).domain_filter == ("a.org",)
    every = BrowseToolConfig(allowed_domains=["*"], denied_domains=["b.org"])
    assert every.is_enabled and every.domain_filter == ()
    some_and_all = refused_setting(BrowseToolConfig, allowed_domains=["a.org", "*"])
    assert some_and_all == ("tool.browse.allowed_domains", "*")
    none = refused_setting(BrowseToolConfig, allowed_domains=["*"], denied_domains=["*"])
    assert none == ("tool.browse.denied_domains", "*")


def test_an_answer_has_room_for_every_document():
    search = SearchToolConfig(top_k=10)
    assert ToolConfig(max_response_tokens=40, search=search).max_response_tokens == 40
    error = refused(ToolConfig, max_response_tokens=39, search=search)
    assert (error.key, error.got) == ("tool.max_response_tokens", 39)
    assert "at least 40" in error.expected
    assert refused(ToolConfig, max_response_tokens=15).got == 15
    ToolConfig(max_response_tokens=16)
