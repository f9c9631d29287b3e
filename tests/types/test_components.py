"""The components of a run are typed by protocol, not by class."""

import dataclasses

from mega_agentrl.types import protocols
from mega_agentrl.types.components import Components


def test_components_are_typed_by_protocol():
    kinds = {field.name: str(field.type) for field in dataclasses.fields(Components)}
    given = {"policy", "generator", "tools", "codec", "rubric", "prompt_source"}
    assert given <= set(kinds)
    assert all(hasattr(protocols, kinds[name]) for name in given)


def test_components_are_passed_by_name():
    assert all(field.kw_only for field in dataclasses.fields(Components))
