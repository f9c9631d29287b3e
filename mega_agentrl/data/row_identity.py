"""Identity of rows: which rows are one prompt, and whether a file has changed between two starts.

Published tables repeat their prompts (DAPO-Math-17k about 100 times, AIME-2024 32 times), and
several of them number their rows from 0. Rows with the same data source and index are one prompt if
they are equal; a row that differs gets an id of its own, `source/0~2`.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from mega_agentrl.types.images import ImageInput
from mega_agentrl.types.records import Prompt

_log = logging.getLogger(__name__)
_FINGERPRINT_BYTES = 16


@dataclass(frozen=True, slots=True)
class FileDigest:
    """Digest of the rows of a file in their order."""

    path: str
    """Path or URL, or the user's dataset class."""
    digest: str
    """Hash of messages, ground truths, tools, further columns and images of all prompts."""


def prompt_fingerprint(prompt: Prompt) -> bytes:
    """Return a hash of what a row says: everything but its id and its tokens."""
    row = (
        prompt.data_source,
        prompt.messages,
        prompt.ground_truth,
        prompt.tools_kwargs,
        prompt.extra_info,
        prompt.tool_schemas,
    )
    text = json.dumps(row, default=_stable_form, skipkeys=True)
    return hashlib.blake2b(text.encode(), digest_size=_FINGERPRINT_BYTES).digest()


def digest_files(fingerprints: Iterable[tuple[str, bytes]]) -> tuple[FileDigest, ...]:
    """Return the digest of each file, given its path and a fingerprint for each row, in order."""
    hashes: dict[str, Any] = {}
    for path, fingerprint in fingerprints:
        hashes.setdefault(path, hashlib.sha256()).update(fingerprint)
    return tuple(FileDigest(path, value.hexdigest()) for path, value in hashes.items())


class PromptIds:
    """Gives equal rows the same id and different rows different ones; counts both cases."""

    def __init__(self) -> None:
        self._ids: dict[tuple[str, bytes], str] = {}
        self._taken: set[str] = set()
        self._num_tried: Counter[str] = Counter()
        self._num_repeats = 0
        self._renamed: list[tuple[str, str]] = []

    def assign(self, prompt_id: str, fingerprint: bytes, location: str) -> tuple[str, bool]:
        """Return the id of a row, and whether the row is the first with it.

        Args:
            prompt_id: data source and index of the row.
            fingerprint: `prompt_fingerprint` of the row.
            location: setting, file and row.
        """
        key = (prompt_id, fingerprint)
        if key in self._ids:
            self._num_repeats += 1
            return self._ids[key], False
        name = prompt_id
        while name in self._taken:
            self._num_tried[prompt_id] += 1
            name = f"{prompt_id}~{self._num_tried[prompt_id] + 1}"
        if name != prompt_id:
            self._renamed.append((name, location))
        self._taken.add(name)
        self._ids[key] = name
        return name, True

    def report(self, key: str, repeats: str) -> None:
        """Log a line about repeated rows and one about ids that were made, if there are any.

        Args:
            key: configuration key of the files.
            repeats: what repeated rows are.
        """
        if self._num_repeats:
            num_rows = self._num_repeats + len(self._ids)
            _log.warning("%s: %s rows are %s prompts; %s", key, num_rows, len(self._ids), repeats)
        if self._renamed:
            name, location = self._renamed[0]
            _log.warning(
                "%s: %s rows have the extra_info.index of another row and get ids of their own, "
                "such as %s (%s)",
                *(key, len(self._renamed), name, location),
            )


def _stable_form(value: Any) -> Any:
    """Return a form for JSON that is the same at each start."""
    if isinstance(value, ImageInput):
        return value.image_id
    if isinstance(value, bytes | bytearray | memoryview):
        return hashlib.blake2b(value, digest_size=_FINGERPRINT_BYTES).hexdigest()
    convert = getattr(value, "tolist", None) or getattr(value, "isoformat", None)
    return type(value).__qualname__ if convert is None else convert()
