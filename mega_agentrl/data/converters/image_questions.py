r"""Converts questions about images: Geometry3K, ChartQA and ViRL39K.

| data set | question | images | answer | form |
| --- | --- | --- | --- | --- |
| Geometry3K | `problem` | `images` | `answer` | hiyouga/geometry3k |
| ChartQA | `query` | `image` | `label`, any of which counts | HuggingFaceM4/ChartQA |
| ViRL39K | `question` | `image` | `answer`, in `\boxed{}` | TIGER-Lab/ViRL39K |

A row gets the column `images` of `data.image_key`: structs with the bytes of a file, or with its
path, which is relative to the converted file. Questions without a marker `<image>` get one for each
image in front. A system message asks for an answer in `\boxed{}`, as the reward `accuracy` reads
it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mega_agentrl.data.converters.source_row import (
    ConversionResult,
    SourceRow,
    convert_each,
    make_rl_row,
    unique_row_id,
)

IMAGE_MARKER = "<image>"
BOXED_PROMPT = (
    "Reason between <think> and </think>, then give the final answer, as short as possible, in "
    "\\boxed{}."
)


def convert_geometry3k(rows: Sequence[SourceRow], data_source: str) -> ConversionResult:
    """Convert Geometry3K rows; an `id` identifies them, if they have one."""
    row_ids: set[str] = set()

    def convert(row: SourceRow, place: int) -> list[dict[str, Any]]:
        made = _make_row(
            row,
            data_source,
            question=row.get_text("problem"),
            images=_images(row, "images"),
            answers=[_plain_answer(row.get_text("answer"))],
            index=unique_row_id(row, place, row_ids),
        )
        return [made]

    return convert_each(rows, convert)


def convert_chartqa(rows: Sequence[SourceRow], data_source: str) -> ConversionResult:
    """Convert ChartQA rows; their position is their index."""

    def convert(row: SourceRow, place: int) -> list[dict[str, Any]]:
        label = row.get("label")
        answers = [label] if isinstance(label, str) else row.get_list("label")
        if not answers or not all(isinstance(text, str) and text.strip() for text in answers):
            raise row.error("label", label, "a non-empty list of texts")
        question, images = row.get_text("query"), _images(row, "image")
        made = _make_row(
            row,
            data_source,
            question=question,
            images=images,
            answers=[text.strip() for text in answers],
            index=str(place),
        )
        return [made]

    return convert_each(rows, convert)


def convert_virl39k(rows: Sequence[SourceRow], data_source: str) -> ConversionResult:
    """Convert ViRL39K rows, which `qid` identifies; their `category` is kept."""
    row_ids: set[str] = set()

    def convert(row: SourceRow, place: int) -> list[dict[str, Any]]:
        values = {**row.values, "id": row.get_text("qid")}
        identified = SourceRow(row.file, row.place, values)
        made = _make_row(
            row,
            data_source,
            question=row.get_text("question"),
            images=_images(row, "image"),
            answers=[_plain_answer(row.get_text("answer"))],
            index=unique_row_id(identified, place, row_ids),
        )
        category = row.values.get("category")
        made["extra_info"]["category"] = category if isinstance(category, str) else ""
        return [made]

    return convert_each(rows, convert)


def _make_row(
    row: SourceRow,
    data_source: str,
    *,
    question: str,
    images: list[dict[str, Any]],
    answers: list[str],
    index: str,
) -> dict[str, Any]:
    num_markers = question.count(IMAGE_MARKER)
    if num_markers not in (0, len(images)):
        raise row.error(
            "images or image",
            f"{len(images)} images",
            f"one for each of the {num_markers} markers {IMAGE_MARKER} of the question",
            "a damaged row",
        )
    markers = "" if num_markers else IMAGE_MARKER * len(images)
    made = make_rl_row(
        data_source=data_source,
        messages=(
            {"role": "system", "content": BOXED_PROMPT},
            {"role": "user", "content": markers + question.strip()},
        ),
        ground_truth=answers,
        ability="vision",
        extra_info={"index": index},
    )
    return {**made, "images": images}


def _images(row: SourceRow, name: str) -> list[dict[str, Any]]:
    """Return the images of a field, which holds one or a list, as structs of bytes and path."""
    cell = row.get(name)
    cells = cell if isinstance(cell, list) else [cell]
    images = [_image(item) for item in cells]
    if not images or None in images:
        raise row.error(name, type(cell).__name__, "images: paths, or structs with bytes or path")
    return [image for image in images if image is not None]


def _image(cell: Any) -> dict[str, Any] | None:
    """Return the struct of an image, None if the cell is none."""
    if isinstance(cell, str) and cell:
        return {"bytes": None, "path": cell}
    if not isinstance(cell, dict):
        return None
    data, path = cell.get("bytes"), cell.get("path")
    if isinstance(data, bytes) and data:
        return {"bytes": data, "path": None}
    return {"bytes": None, "path": path} if isinstance(path, str) and path else None


def _plain_answer(answer: str) -> str:
    r"""Return an answer without the `\boxed{}` around it."""
    text = answer.strip()
    is_boxed = text.startswith("\\boxed{") and text.endswith("}")
    return text.removeprefix("\\boxed{").removesuffix("}").strip() if is_boxed else text
