"""Settings of search, browse and cache: ranges, and what one needs of another."""

import pytest
from omegaconf import OmegaConf

from mega_agentrl.config.choices import SearchSource
from mega_agentrl.config.search_schema import (
    BrowseToolConfig,
    CacheConfig,
    SearchToolConfig,
    WebConfig,
)


def test_the_defaults_are_valid_and_off():
    for section in (SearchToolConfig, BrowseToolConfig, WebConfig, CacheConfig):
        OmegaConf.to_object(OmegaConf.structured(section))
    assert not SearchToolConfig().enabled
    assert not BrowseToolConfig().enabled


def test_what_makes_a_search_tool():
    assert SearchToolConfig(source="c.jsonl").enabled
    assert SearchToolConfig(
        backend=SearchSource.retrieve, source="http://host:8000/retrieve"
    ).enabled


@pytest.mark.parametrize(
    ("section", "key", "value"),
    [
        (SearchToolConfig, "search.top_k", 0),
        (WebConfig, "web.timeout_s", 0.0),
        (WebConfig, "web.calls_per_second", -0.1),
    ],
)
def test_values_out_of_range_name_their_key_and_value(section, key, value):
    with pytest.raises(ValueError, match="expected") as caught:
        section(**{key.split(".")[1]: value})
    assert f"tool.{key}={value}" in str(caught.value)


@pytest.mark.parametrize("backend", [SearchSource.retrieve, SearchSource.web])
@pytest.mark.parametrize("url", ["", "host:8000", "ftp://host"])
def test_a_remote_back_end_needs_its_address(backend, url):
    with pytest.raises(
        ValueError, match=rf"tool.search.source={url}: .*tool.search.backend={backend}"
    ):
        SearchToolConfig(backend=backend, source=url)


@pytest.mark.parametrize(
    "domain", ["https://a.org", "a.org/x", "*.a.org", "a.org:80", "", ".", "ä.org"]
)
@pytest.mark.parametrize("key", ["allow", "deny"])
def test_lists_hold_domains(key, domain):
    with pytest.raises(ValueError, match=rf"tool.browse.{key}="):
        BrowseToolConfig(**{key: ["ok.org", domain]})


def test_browsing_is_on_where_something_may_be_read():
    assert BrowseToolConfig(allow=["a.org"]).only == ("a.org",)
    every = BrowseToolConfig(allow=["*"], deny=["b.org"])
    assert every.enabled and every.only == ()
    with pytest.raises(ValueError, match=r"tool.browse.allow=\*: .*or \* alone"):
        BrowseToolConfig(allow=["a.org", "*"])
    with pytest.raises(ValueError, match=r"tool.browse.deny=\*"):
        BrowseToolConfig(allow=["*"], deny=["*"])


def test_boundaries_pass():
    SearchToolConfig(top_k=1)
    BrowseToolConfig(allow=["a.org", "10.0.0.1"])
    WebConfig(calls_per_second=0)
    CacheConfig(path="")
