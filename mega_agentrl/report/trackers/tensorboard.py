"""TensorBoard event files in the run folder, a scalar for each metric as ``stage/name``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch.utils.tensorboard import SummaryWriter

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path


class TensorBoardTracker:
    """A `types.watch.Tracker`; a run that goes on adds a file to the same folder."""

    run_id = ""

    def __init__(self, run_dir: Path) -> None:
        self._writer = SummaryWriter(str(run_dir / "tensorboard"))  # type: ignore[no-untyped-call]

    def configure(self, settings: Mapping[str, object], text: str) -> None:
        """See `types.watch.Tracker`; a text of its own, as Markdown shows it."""
        indented = "\n".join(f"    {line}" for line in text.splitlines())
        self._writer.add_text("config", indented)  # type: ignore[no-untyped-call]

    def log(self, stage: str, step: int, numbers: Mapping[str, float]) -> None:
        """See `types.watch.Tracker`."""
        for name, value in numbers.items():
            self._writer.add_scalar(f"{stage}/{name}", value, step)  # type: ignore[no-untyped-call]

    def close(self) -> None:
        """See `types.watch.Tracker`."""
        self._writer.close()  # type: ignore[no-untyped-call]
