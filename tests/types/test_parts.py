"""The parts of a run name every port the loop needs, by protocol, not by class."""

import dataclasses

from mega_agentrl.types import ports
from mega_agentrl.types.parts import Parts


def test_the_parts_are_given_as_ports():
    kinds = {field.name: str(field.type) for field in dataclasses.fields(Parts)}
    given = {"policy", "generator", "tools", "codec", "rubric", "prompts"}
    assert given <= set(kinds)
    assert all(hasattr(ports, kinds[name]) for name in given)


def test_parts_are_passed_by_name():
    assert all(field.kw_only for field in dataclasses.fields(Parts))
