"""The file of a bootstrap pass, from which a killed pass continues: JSON lines.

    {"format": 2, "num_chunks": 120, "settings": {"seed": 1, "rollout.temperature": 1.0, ...}}
    {"chunk": 0, "ids": [...], "prompt_ids": [...], "correct": [...], "windows": ["...", ...], ...}
    ...

Each line is flushed to the disk before the next chunk starts; an incomplete last line is cut off
when the file is opened again. Floats are little-endian float32 in base64, about five bytes a token;
the token at which a window starts is not stored. When the pass is over, the file shrinks to its
first line and `{"result": {...}}`. A file with other settings is refused. Only one process writes.
"""

from __future__ import annotations

import base64
import json
import os
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from mega_agentrl.train.ares.entropy_stats import EntropyStats
from mega_agentrl.train.resume.run_dir import write_atomic

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

FORMAT_VERSION = 2


class EntropyStatsFile:
    """The file of one pass."""

    def __init__(self, path: Path, settings: Mapping[str, Any], num_chunks: int) -> None:
        """Open the file, or create it.

        Args:
            path: The file.
            settings: Plain values, by name, that determine the statistics.
            num_chunks: Chunks of the whole pass.

        Raises:
            ValueError: The file is damaged, or has other settings, which the error names.
        """
        self._path = path
        self._header = json.loads(
            json.dumps(
                {"format": FORMAT_VERSION, "num_chunks": num_chunks, "settings": dict(settings)}
            )
        )
        self.num_chunks_done = 0
        self.result: dict[str, Any] | None = None
        """The result; None until `finish`."""
        if not path.exists():
            self._rewrite([self._header])
            return
        self._check_header()
        self._recover()

    def append(self, stats: EntropyStats) -> None:
        """Write the statistics of the next chunk."""
        assert self.result is None, "the pass is over"
        line = {"chunk": self.num_chunks_done, **_stats_to_dict(stats)}
        with self._path.open("a", encoding="utf-8") as file:
            file.write(_to_json_line(line))
            file.flush()
            os.fsync(file.fileno())
        self.num_chunks_done += 1

    def read_chunks(self) -> Iterator[EntropyStats]:
        """Yield the statistics of each chunk; its windows are without their positions."""
        for line, _ in self._read_lines():
            if "chunk" in line:
                yield _stats_from_dict(line)

    def finish(self, result: Mapping[str, Any]) -> None:
        """Replace the chunks by the result, plain values."""
        self._rewrite([self._header, {"result": dict(result)}])
        self.result = dict(result)

    def _recover(self) -> None:
        """Count the chunks, read the result and cut off an incomplete last line."""
        end_of_last_line = 0
        for line, end in self._read_lines():
            end_of_last_line = end
            if "result" in line:
                self.result = line["result"]
            elif "chunk" in line:
                if line["chunk"] != self.num_chunks_done:
                    raise ValueError(
                        f"{self._path}: got chunk {line['chunk']} after "
                        f"{self.num_chunks_done} others, expected them in order; probable "
                        "cause: two runs wrote into one folder"
                    )
                self.num_chunks_done += 1
        with self._path.open("rb+") as file:
            file.truncate(end_of_last_line)

    def _read_lines(self) -> Iterator[tuple[dict[str, Any], int]]:
        """Yield complete lines, and the offset at which each one ends."""
        end = 0
        with self._path.open("rb") as file:
            for number, text in enumerate(file, start=1):
                if not text.endswith(b"\n"):
                    return
                try:
                    line = json.loads(text)
                except ValueError as error:
                    raise ValueError(
                        f"{self._path}:{number}: got a line that is no JSON ({error}); expected "
                        "the statistics of a chunk; probable cause: a damaged disk. Without the "
                        "file the pass starts over"
                    ) from None
                end += len(text)
                yield line, end

    def _check_header(self) -> None:
        head = next((line for line, _ in self._read_lines()), {})
        if head == self._header:
            return
        got, expected = ({**one, **one.get("settings", {})} for one in (head, self._header))
        names = sorted({*got, *expected} - {"settings"})
        other = [name for name in names if got.get(name) != expected.get(name)]
        differences = ", ".join(
            f"{name}={got.get(name)!r}, not {expected.get(name)!r}" for name in other
        )
        raise ValueError(
            f"{self._path}: made with {differences}; expected the settings of this run; probable "
            "cause: a setting was changed and the run went on in the same folder. Without the "
            "file the pass starts over"
        )

    def _rewrite(self, lines: list[dict[str, Any]]) -> None:
        """Replace the whole file atomically."""
        write_atomic(self._path, "".join(map(_to_json_line, lines)), fsync=True)


def _to_json_line(line: Mapping[str, Any]) -> str:
    return json.dumps(line, separators=(",", ":")) + "\n"


def _stats_to_dict(stats: EntropyStats) -> dict[str, Any]:
    return {
        "ids": list(stats.trajectory_ids),
        "prompt_ids": list(stats.prompt_ids),
        "correct": [int(one) for one in stats.is_correct_B.tolist()],
        "p95": _encode_floats(stats.entropy_p95_B),
        "entropy": _encode_floats(stats.mean_entropy_B),
        "windows": [
            _encode_floats(window_N[window_N.isfinite()]) for window_N in stats.window_entropies
        ],
    }


def _stats_from_dict(line: Mapping[str, Any]) -> EntropyStats:
    return EntropyStats(
        trajectory_ids=tuple(line["ids"]),
        prompt_ids=tuple(line["prompt_ids"]),
        is_correct_B=torch.tensor(line["correct"], dtype=torch.bool),
        entropy_p95_B=_decode_floats(line["p95"]),
        mean_entropy_B=_decode_floats(line["entropy"]),
        window_entropies=tuple(map(_decode_floats, line["windows"])),
    )


def _encode_floats(values_N: torch.Tensor) -> str:
    return base64.b64encode(values_N.numpy().astype("<f4").tobytes()).decode("ascii")


def _decode_floats(text: str) -> torch.Tensor:
    return torch.from_numpy(np.frombuffer(base64.b64decode(text), dtype="<f4").astype("f4"))
