"""TensorBoard tracker: event files in the run folder, with metrics as ``stage/name``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch.utils.tensorboard import SummaryWriter

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path


class TensorBoardTracker:
    """Writes event files; a resumed run adds a file to the same folder."""

    run_id = ""

    def __init__(self, run_dir: Path) -> None:
        self._writer = SummaryWriter(str(run_dir / "tensorboard"))  # type: ignore[no-untyped-call]

    def log_config(self, settings: Mapping[str, object], text: str) -> None:
        """Log the settings as an indented Markdown text."""
        indented = "\n".join(f"    {line}" for line in text.splitlines())
        self._writer.add_text("config", indented)  # type: ignore[no-untyped-call]

    def log(self, stage: str, step: int, numbers: Mapping[str, float]) -> None:
        """Log metrics as scalars."""
        for name, value in numbers.items():
            self._writer.add_scalar(f"{stage}/{name}", value, step)  # type: ignore[no-untyped-call]

    def close(self) -> None:
        """Flush and close the file."""
        self._writer.close()  # type: ignore[no-untyped-call]
