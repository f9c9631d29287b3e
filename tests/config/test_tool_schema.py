"""What the tools' settings say without being set."""

import pytest
from omegaconf import OmegaConf

from mega_agentrl.config.search_schema import SearchToolConfig
from mega_agentrl.config.tool_schema import ToolConfig


def test_by_default_there_is_python_alone():
    config = OmegaConf.to_object(OmegaConf.structured(ToolConfig))
    assert isinstance(config, ToolConfig)
    assert config.file == ""
    assert not config.search.enabled
    assert not config.browse.enabled


def test_an_answer_has_room_for_every_document():
    search = SearchToolConfig(top_k=10)
    assert ToolConfig(answer_tokens=40, search=search).answer_tokens == 40
    with pytest.raises(ValueError, match=r"tool\.answer_tokens=39: .* at least 40, .*top_k=10"):
        ToolConfig(answer_tokens=39, search=search)
    with pytest.raises(ValueError, match=r"tool\.answer_tokens=15: expected at least 16"):
        ToolConfig(answer_tokens=15)
