"""Records as they are read back from a file."""

import json

from mega_agentrl.types.serialization import from_builtins, to_builtins


def through_json(value):
    """The record that is restored from the JSON of a record."""
    return from_builtins(type(value), json.loads(json.dumps(to_builtins(value))), "record")
