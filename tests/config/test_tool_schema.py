"""What the tools' settings say without being set."""

from omegaconf import OmegaConf

from mega_agentrl.config.tool_schema import ToolConfig


def test_by_default_there_is_python_alone():
    config = OmegaConf.to_object(OmegaConf.structured(ToolConfig))
    assert isinstance(config, ToolConfig)
    assert config.file == ""
    assert not config.search.enabled
    assert not config.browse.enabled
