"""Which tools are enabled, and lists of domains."""

import pytest

from mega_agentrl.config.enums import SearchBackend
from mega_agentrl.config.sections.tools import BrowseToolConfig, PythonToolConfig, SearchToolConfig
from tests.config.refusals import refused_setting


def test_a_sandbox_has_four_times_the_limit_of_a_process():
    assert PythonToolConfig(memory_limit_mib=64).total_memory_mib == 256


def test_a_source_enables_the_search_tool():
    assert not SearchToolConfig().is_enabled
    assert SearchToolConfig(source="c.jsonl").is_enabled
    remote = SearchToolConfig(backend=SearchBackend.retrieve, source="http://host:8000/retrieve")
    assert remote.is_enabled


@pytest.mark.parametrize(
    "domain", ["https://a.org", "a.org/x", "*.a.org", "a.org:80", "", ".", "ä.org"]
)
@pytest.mark.parametrize("key", ["allowed_domains", "denied_domains"])
def test_an_entry_that_is_no_domain_is_refused(key, domain):
    got = refused_setting(BrowseToolConfig, **{key: ["ok.org", domain]})
    assert got == (f"tool.browse.{key}", domain)


def test_allowed_domains_enable_browsing():
    assert not BrowseToolConfig().is_enabled
    assert BrowseToolConfig(allowed_domains=["a.org", "10.0.0.1"]).domain_filter[0] == "a.org"
    every = BrowseToolConfig(allowed_domains=["*"], denied_domains=["b.org"])
    assert every.is_enabled and every.domain_filter == ()
    some_and_all = refused_setting(BrowseToolConfig, allowed_domains=["a.org", "*"])
    assert some_and_all == ("tool.browse.allowed_domains", "*")
    none = refused_setting(BrowseToolConfig, allowed_domains=["*"], denied_domains=["*"])
    assert none == ("tool.browse.denied_domains", "*")
