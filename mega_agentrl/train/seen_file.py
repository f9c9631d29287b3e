"""What a long pass has seen, on disk, so that it goes on after a kill: JSON lines.

    {"format": 1, "num_chunks": 120, "settings": {"seed": 1, "rollout.temperature": 1.0, ...}}
    {"chunk": 0, "ids": [...], "prompt_ids": [...], "correct": [...], "windows": ["...", ...], ...}
    ...

A line is written, and on the disk, before the next chunk is begun; one that a kill cut short is
taken off when the file is opened again. Floats are little-endian float32 in base64, about five
bytes a token; which token a window starts at is not kept. When the pass is over the file shrinks
to its first line and `{"result": {...}}`. A file of other settings is refused. What the chunks
are is `bootstrap`'s business. One process writes.
"""

from __future__ import annotations

import base64
import json
import os
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from mega_agentrl.train.seen import Seen

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

FORMAT = 1


class SeenFile:
    """The file of one pass. num_done: chunks that are in it. result: None before `finish`."""

    def __init__(self, path: Path, settings: Mapping[str, Any], num_chunks: int) -> None:
        """Open it, or begin it where there is none.

        settings: plain values by name, which make what is seen. Raises `ValueError` for a file of
        other settings, naming them, and for a damaged one.
        """
        self._path = path
        self._head = json.loads(
            json.dumps({"format": FORMAT, "num_chunks": num_chunks, "settings": dict(settings)})
        )
        self.num_done = 0
        self.result: dict[str, Any] | None = None
        if not path.exists():
            self._replace([self._head])
            return
        self._check_head()
        self._open()

    def append(self, seen: Seen) -> None:
        """Keep what one more chunk showed."""
        assert self.result is None, "the pass is over"
        line = {"chunk": self.num_done, **_to_plain(seen)}
        with self._path.open("a", encoding="utf-8") as file:
            file.write(_dumped(line))
            file.flush()
            os.fsync(file.fileno())
        self.num_done += 1

    def chunks(self) -> Iterator[Seen]:
        """What the chunks showed, one after another; windows without their places."""
        for line, _ in self._lines():
            if "chunk" in line:
                yield _from_plain(line)

    def finish(self, result: Mapping[str, Any]) -> None:
        """Keep the result, plain values, in place of the chunks."""
        self._replace([self._head, {"result": dict(result)}])
        self.result = dict(result)

    def _open(self) -> None:
        """Count the chunks, take up the result, cut off what is no whole line."""
        whole = 0
        for line, end in self._lines():
            whole = end
            if "result" in line:
                self.result = line["result"]
            elif "chunk" in line:
                if line["chunk"] != self.num_done:
                    raise ValueError(
                        f"{self._path}: got chunk {line['chunk']} behind {self.num_done} others, "
                        "expected them in order; probable cause: two runs wrote into one folder"
                    )
                self.num_done += 1
        with self._path.open("rb+") as file:
            file.truncate(whole)

    def _lines(self) -> Iterator[tuple[dict[str, Any], int]]:
        """Whole lines, and where each ends in the file."""
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
                        "what one chunk showed; is the disk damaged? Without the file the pass "
                        "starts over"
                    ) from None
                end += len(text)
                yield line, end

    def _check_head(self) -> None:
        head = next((line for line, _ in self._lines()), {})
        if head == self._head:
            return
        got, expected = ({**one, **one.get("settings", {})} for one in (head, self._head))
        names = sorted({*got, *expected} - {"settings"})
        other = [name for name in names if got.get(name) != expected.get(name)]
        shown = ", ".join(f"{name}={got.get(name)!r}, not {expected.get(name)!r}" for name in other)
        raise ValueError(
            f"{self._path}: made with {shown}; expected the settings of this run; probable cause: "
            "a setting was changed and the run went on in the same folder. Without the file the "
            "pass starts over"
        )

    def _replace(self, lines: list[dict[str, Any]]) -> None:
        """All of the file at once."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        partial = self._path.with_name(f".{self._path.name}.partial")
        with partial.open("w", encoding="utf-8") as file:
            file.writelines(map(_dumped, lines))
            file.flush()
            os.fsync(file.fileno())
        partial.replace(self._path)


def _dumped(line: Mapping[str, Any]) -> str:
    return json.dumps(line, separators=(",", ":")) + "\n"


def _to_plain(seen: Seen) -> dict[str, Any]:
    return {
        "ids": list(seen.ids),
        "prompt_ids": list(seen.prompt_ids),
        "correct": [int(one) for one in seen.correct_B.tolist()],
        "p95": _packed(seen.p95_B),
        "entropy": _packed(seen.entropy_B),
        "windows": [_packed(window_N[window_N.isfinite()]) for window_N in seen.windows],
    }


def _from_plain(line: Mapping[str, Any]) -> Seen:
    return Seen(
        ids=tuple(line["ids"]),
        prompt_ids=tuple(line["prompt_ids"]),
        correct_B=torch.tensor(line["correct"], dtype=torch.bool),
        p95_B=_unpacked(line["p95"]),
        entropy_B=_unpacked(line["entropy"]),
        windows=tuple(map(_unpacked, line["windows"])),
    )


def _packed(values_N: torch.Tensor) -> str:
    return base64.b64encode(values_N.numpy().astype("<f4").tobytes()).decode("ascii")


def _unpacked(text: str) -> torch.Tensor:
    return torch.from_numpy(np.frombuffer(base64.b64decode(text), dtype="<f4").astype("f4"))
