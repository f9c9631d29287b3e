"""Reading of files that a setting names: every failure is a `ConfigError` with setting and file.

    with reading("data.train", path, "a parquet file"):
        table = pq.read_table(path)

Parsers of damaged files raise errors of many kinds, some of them only for certain bytes, so all
are converted; the original error is the `__cause__`.
"""

from __future__ import annotations

import json
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import yaml

from mega_agentrl.config.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

MAX_DEPTH = 64
"""Maximum nesting of a value; recursive code has room for it on Python's stack."""
_MAX_YAML_NODES = 100_000
"""Maximum number of values in a yaml file; a value counts once for each alias."""


@contextmanager
def reading(key: str, got: object, expected: str, problem: str = "") -> Iterator[None]:
    """Convert any error of the block into a `ConfigError`, unless it is one.

    Args:
        key: dotted key of the setting that names the file, also with the row: `data.train=FILE row
            3`.
        got: path of the file, or the part of it that is read.
        expected: what should be there.
        problem: what is wrong, such as "not valid yaml"; the original error follows.
    """
    try:
        yield
    except ConfigError:
        raise
    except Exception as error:
        lead = f"{problem}: " if problem else ""
        cause = " ".join(f"{lead}{type(error).__name__}: {error}".split())
        raise ConfigError(key, str(got), expected, cause) from error


def parse_json(text: str | bytes, *, unique_keys: bool = False) -> Any:
    """Return the value of a JSON text.

    Raises:
        ValueError: It is not JSON, is nested more than `MAX_DEPTH` deep, or has a text that UTF-8
            cannot encode; with `unique_keys` also if an object has a key twice.
    """
    text = text.decode() if isinstance(text, bytes) else text
    try:
        value = json.loads(text, object_pairs_hook=_unique_pairs if unique_keys else None)
    except RecursionError as error:
        raise ValueError(f"nested more than {MAX_DEPTH} deep") from error
    if text.count("[") + text.count("{") > MAX_DEPTH:
        _check_size(value, max_nodes=len(text))
    if "\\ud" in text or "\\uD" in text:
        json.dumps(value, ensure_ascii=False).encode()  # raises `UnicodeEncodeError`, a ValueError
    return value


def _unique_pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        raise ValueError(f"a key occurs twice among {sorted(value)}")
    return value


def read_json(path: Path, key: str, expected: str) -> dict[str, Any]:
    """Return the object in a JSON file, which the setting `key` names.

    Raises:
        ConfigError: The file cannot be read, or holds another value.
    """
    with reading(key, path, expected):
        value = parse_json(path.read_text(encoding="utf-8"))
    if not isinstance(value, dict):
        raise ConfigError(key, str(path), expected, f"it holds a {type(value).__name__}")
    return value


def decoder_settings(model: dict[str, Any]) -> dict[str, Any]:
    """Return a `config.json` with the keys of its decoder at the top.

    transformers 5 nests them in `text_config` if the model has other parts, such as a vision tower.
    """
    nested = model.get("text_config")
    if not nested:
        return model
    outer: dict[str, Any] = {
        name: model[name] for name in ("architectures", "model_type") if name in model
    }
    # transformers reads the outer key, and that of older Qwen2.5-VL files if this one is not set.
    tied = model.get("tie_word_embeddings", False)
    if model.get("model_type") == "qwen2_5_vl":
        tied = tied or nested.get("tie_word_embeddings", False)
    outer["tie_word_embeddings"] = tied
    return {**model, **nested, **outer}


class _Loader(yaml.SafeLoader):
    """A safe loader that refuses a key which occurs twice in a mapping."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        lines: dict[tuple[str, str], int] = {}
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode) or key.value == "<<":
                continue
            line = key.start_mark.line + 1
            if first := lines.get((key.tag, key.value)):
                raise ValueError(f"the key {key.value!r} is in line {first} and again in {line}")
            lines[key.tag, key.value] = line
        return node


def read_yaml(path: Path, key: str, expected: str) -> Any:
    """Return the value in a yaml file, which the setting `key` names.

    Raises:
        ConfigError: The file cannot be read, has a key twice in one mapping, or its values are too
            many or nested too deeply.
    """
    with reading(key, path, expected, "not valid yaml"):
        value = yaml.load(path.read_text(encoding="utf-8"), _Loader)
        _check_size(value, max_nodes=_MAX_YAML_NODES)
    return value


def _check_size(value: Any, *, max_nodes: int) -> None:
    """Raise `ValueError` for a value that is nested too deeply or has too many members."""
    level, depth, num_nodes = [value], 0, 1
    while level:
        depth += 1
        if depth > MAX_DEPTH:
            raise ValueError(f"nested more than {MAX_DEPTH} deep")
        below: list[Any] = []
        for node in level:
            if isinstance(node, dict | list):
                num_nodes += len(node)
                if num_nodes > max_nodes:
                    raise ValueError(f"more than {max_nodes} values")
                below.extend(node.values() if isinstance(node, dict) else node)
        level = below
