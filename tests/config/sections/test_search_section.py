"""Ranges of the search, browse, web and cache settings."""

import pytest
from omegaconf import OmegaConf

from mega_agentrl.config.enums import SearchBackend
from mega_agentrl.config.sections.search import (
    BrowseToolConfig,
    SearchToolConfig,
    ToolCacheConfig,
    WebRequestConfig,
)


def test_the_defaults_are_valid_and_off():
    for section in (SearchToolConfig, BrowseToolConfig, WebRequestConfig, ToolCacheConfig):
        OmegaConf.to_object(OmegaConf.structured(section))
    assert not SearchToolConfig().is_enabled
    assert not BrowseToolConfig().is_enabled


def test_a_source_enables_the_search_tool():
    assert SearchToolConfig(source="c.jsonl").is_enabled
    assert SearchToolConfig(
        backend=SearchBackend.retrieve, source="http://host:8000/retrieve"
    ).is_enabled


@pytest.mark.parametrize(
    ("section", "key", "value"),
    [
        (SearchToolConfig, "search.top_k", 0),
        (WebRequestConfig, "web.timeout_s", 0.0),
        (WebRequestConfig, "web.max_calls_per_s", -0.1),
    ],
)
def test_values_out_of_range_name_their_key_and_value(section, key, value):
    with pytest.raises(ValueError, match="expected") as caught:
        section(**{key.split(".")[1]: value})
    assert f"tool.{key}={value}" in str(caught.value)


@pytest.mark.parametrize("backend", [SearchBackend.retrieve, SearchBackend.web])
@pytest.mark.parametrize("url", ["", "host:8000", "ftp://host"])
def test_a_remote_backend_needs_a_url(backend, url):
    with pytest.raises(
        ValueError, match=rf"tool.search.source={url}: .*tool.search.backend={backend}"
    ):
        SearchToolConfig(backend=backend, source=url)


@pytest.mark.parametrize(
    "domain", ["https://a.org", "a.org/x", "*.a.org", "a.org:80", "", ".", "ä.org"]
)
@pytest.mark.parametrize("key", ["allowed_domains", "denied_domains"])
def test_lists_hold_domains(key, domain):
    with pytest.raises(ValueError, match=rf"tool.browse.{key}="):
        BrowseToolConfig(**{key: ["ok.org", domain]})


def test_allowed_domains_enable_browsing():
    assert BrowseToolConfig(allowed_domains=["a.org"]).domain_filter == ("a.org",)
    every = BrowseToolConfig(allowed_domains=["*"], denied_domains=["b.org"])
    assert every.is_enabled and every.domain_filter == ()
    with pytest.raises(ValueError, match=r"tool.browse.allowed_domains=\*: .*or \* alone"):
        BrowseToolConfig(allowed_domains=["a.org", "*"])
    with pytest.raises(ValueError, match=r"tool.browse.denied_domains=\*"):
        BrowseToolConfig(allowed_domains=["*"], denied_domains=["*"])


def test_boundaries_pass():
    SearchToolConfig(top_k=1)
    BrowseToolConfig(allowed_domains=["a.org", "10.0.0.1"])
    WebRequestConfig(max_calls_per_s=0)
    ToolCacheConfig(path="")
