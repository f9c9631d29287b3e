"""A dataset in one class, `data.dataset_class=examples/my_dataset.py:CsvRows`: docs/data.md."""

import csv
from typing import Any


class CsvRows:
    """The rows of CSV files with the columns `question` and `answer`."""

    def __init__(self, paths: list[str], key: str) -> None:
        """Read all files; `key` is the setting that lists them, for example `data.train`."""
        self._rows: list[dict[str, str]] = []
        for path in paths:
            with open(path, newline="", encoding="utf-8") as file:
                rows = list(csv.DictReader(file))
            if rows and not {"question", "answer"} <= rows[0].keys():
                raise ValueError(f"{key}={path}: got {list(rows[0])}, expected question, answer")
            self._rows += rows

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Return a row of the RL format."""
        row = self._rows[index]
        return {
            "prompt": row["question"],
            "data_source": "my_questions",
            "reward_model": {"ground_truth": row["answer"]},
            "extra_info": {"index": index},
        }
