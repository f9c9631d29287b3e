"""The file of a bootstrap pass, from which a killed pass continues: a `types.journal` of JSON.

    {"format": 3, "num_chunks": 120, "settings": {"seed": 1, "rollout.temperature": 1.0, ...}}
    {"chunk": 0, "trajectory_ids": [...], "prompt_ids": [...], "window_entropies": [...], ...}
    ...

Each record is flushed to the disk before the next chunk starts. Floats are little-endian float32 in
base64, about five bytes a token; the token at which a window starts is not stored. When the pass is
over, the file shrinks to its first record and `{"result": {...}}`. A file with other settings is
refused.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from mega_agentrl.config.input_files import parse_json
from mega_agentrl.errors import InputError
from mega_agentrl.train.ares.entropy_stats import EntropyStats
from mega_agentrl.types.journal import Journal
from mega_agentrl.types.serialization import from_builtins, to_builtins

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

FORMAT_VERSION = 3


class EntropyStatsFile:
    """The file of one pass."""

    def __init__(self, path: Path, settings: Mapping[str, Any], num_chunks: int) -> None:
        """Open the file, or create it.

        Args:
            path: The file.
            settings: Plain values, by name, that determine the statistics.
            num_chunks: Chunks of the whole pass.

        Raises:
            ValueError: The file has other settings, which the error names, or its chunks are not
                in order.
        """
        self.path = path
        self._journal = Journal(path)
        self._chunk_offsets: list[int] = []
        self.result: dict[str, Any] | None = None
        """The result; None until `finish`."""
        header = {"format": FORMAT_VERSION, "num_chunks": num_chunks, "settings": dict(settings)}
        # In the form in which JSON returns it.
        self._header: dict[str, Any] = json.loads(_to_json(header))
        records = self._journal.recover(_parse_record)
        first = next(records, None)
        if first is None:
            self._journal.rewrite([_to_json(self._header)], fsync=True)
            return
        self._check_header(first[1])
        for offset, record in records:
            if "chunk" in record:
                self._add_chunk(record["chunk"], offset)
            elif "result" in record:
                self.result = record["result"]

    @property
    def num_chunks_done(self) -> int:
        """Number of chunks in the file."""
        return len(self._chunk_offsets)

    def append(self, stats: EntropyStats) -> None:
        """Write the statistics of the next chunk."""
        assert self.result is None, "the pass is over"
        record = to_builtins(_pack_stats(self.num_chunks_done, stats))
        self._chunk_offsets.append(self._journal.append(_to_json(record), fsync=True))

    def read_chunks(self) -> Iterator[EntropyStats]:
        """Yield the statistics of each chunk; the positions of its windows are lost."""
        for offset in self._chunk_offsets:
            record = json.loads(self._journal.read(offset))
            yield _unpack_stats(from_builtins(_StoredStats, record, str(self.path)))

    def finish(self, result: Mapping[str, Any]) -> None:
        """Replace the chunks by the result, plain values."""
        bodies = [_to_json(self._header), _to_json({"result": result})]
        self._journal.rewrite(bodies, fsync=True)
        self.result = dict(result)

    def _add_chunk(self, number: int, offset: int) -> None:
        if number != self.num_chunks_done:
            raise InputError(
                f"{self.path}: number of a chunk",
                number,
                f"{self.num_chunks_done}, the next one",
                "two runs wrote into one folder",
            )
        self._chunk_offsets.append(offset)

    def _check_header(self, header: Mapping[str, Any]) -> None:
        if header == self._header:
            return
        got, expected = ({**item, **item.get("settings", {})} for item in (header, self._header))
        names = sorted({*got, *expected} - {"settings"})
        changed = [name for name in names if got.get(name) != expected.get(name)]
        differences = ", ".join(
            f"{name}={got.get(name)!r}, not {expected.get(name)!r}" for name in changed
        )
        raise InputError(
            f"{self.path}: settings",
            differences,
            "those of this run, or no file, which starts the pass over",
            "a setting was changed and the run went on in the same folder",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _StoredStats:
    """`EntropyStats` of a chunk, with float32 tensors as bytes."""

    chunk: int
    trajectory_ids: tuple[str, ...]
    prompt_ids: tuple[str, ...]
    is_correct: tuple[bool, ...]
    entropy_p95: bytes
    mean_entropy: bytes
    window_entropies: tuple[bytes, ...]


def _parse_record(body: bytes) -> dict[str, Any]:
    """Return a record.

    Raises:
        ValueError: It is none.
    """
    record = parse_json(body.decode())
    if not isinstance(record, dict):
        raise InputError("a record", type(record).__name__, "an object")
    if "chunk" in record:
        from_builtins(_StoredStats, record, "the statistics of a chunk")
    elif not isinstance(record.get("result", record.get("settings", {})), dict):
        raise InputError("a record", sorted(record), "the settings, a chunk or the result")
    return record


def _pack_stats(chunk: int, stats: EntropyStats) -> _StoredStats:
    return _StoredStats(
        chunk=chunk,
        trajectory_ids=stats.trajectory_ids,
        prompt_ids=stats.prompt_ids,
        is_correct=tuple(stats.is_correct_B.tolist()),
        entropy_p95=_pack_floats(stats.entropy_p95_B),
        mean_entropy=_pack_floats(stats.mean_entropy_B),
        window_entropies=tuple(
            _pack_floats(window_N[window_N.isfinite()]) for window_N in stats.window_entropies
        ),
    )


def _unpack_stats(stored: _StoredStats) -> EntropyStats:
    return EntropyStats(
        trajectory_ids=stored.trajectory_ids,
        prompt_ids=stored.prompt_ids,
        is_correct_B=torch.tensor(stored.is_correct, dtype=torch.bool),
        entropy_p95_B=_unpack_floats(stored.entropy_p95),
        mean_entropy_B=_unpack_floats(stored.mean_entropy),
        window_entropies=tuple(map(_unpack_floats, stored.window_entropies)),
    )


def _pack_floats(values_N: torch.Tensor) -> bytes:
    return values_N.numpy().astype("<f4").tobytes()


def _unpack_floats(data: bytes) -> torch.Tensor:
    return torch.from_numpy(np.frombuffer(data, dtype="<f4").astype("f4"))


def _to_json(record: Mapping[str, Any]) -> bytes:
    return json.dumps(record, separators=(",", ":")).encode()
