"""Questions about images: markers and images agree, and answers are what the reward compares."""

from __future__ import annotations

import pytest

from mega_agentrl.config.sections.data import DataConfig, DataFile
from mega_agentrl.data.converters.file_io import read_source_rows, write_rl_parquet
from mega_agentrl.data.converters.image_questions import (
    convert_chartqa,
    convert_geometry3k,
    convert_virl39k,
)
from mega_agentrl.data.converters.source_row import SourceRow
from mega_agentrl.data.prompt_images import PromptImageReader
from mega_agentrl.data.rl_dataset import read_prompts
from mega_agentrl.errors import InputError
from mega_agentrl.reward.ares import accuracy
from mega_agentrl.vision.placeholders import image_parts
from mega_agentrl.vision.processor import ImageProcessor
from tests.vision_models import make_picture, write_preprocessor_config


def source_rows(*values):
    return [SourceRow("x.parquet", f"row {index}", row) for index, row in enumerate(values)]


GEOMETRY = {
    "images": [{"bytes": make_picture(0), "path": "1.png"}],
    "problem": "<image>Find x.",
    "answer": "\\frac{9}{2}",
}
CHART = {"image": {"bytes": make_picture(1), "path": None}, "query": "Which bar?", "label": ["4.5"]}
VIRL = {
    "qid": "a-1",
    "question": "<image>\nWhich angle?",
    "image": ["images/a.png"],
    "answer": "\\boxed{B}",
    "category": "geometry",
}


def user_text(row):
    assert [message["role"] for message in row["prompt"]] == ["system", "user"]
    return row["prompt"][1]["content"]


def test_geometry_keeps_its_markers_and_the_bytes_of_its_images():
    (row,) = convert_geometry3k(source_rows(GEOMETRY), "geometry3k").rows
    assert user_text(row) == "<image>Find x."
    assert row["images"] == [{"bytes": make_picture(0), "path": None}]
    assert accuracy("\\boxed{4.5}", row["reward_model"]["ground_truth"]).correct


def test_charts_get_a_marker_and_each_label_counts():
    (row,) = convert_chartqa(source_rows(CHART | {"label": ["4.5", "Blue"]}), "chartqa").rows
    assert user_text(row) == "<image>Which bar?"
    assert row["reward_model"]["ground_truth"] == ["4.5", "Blue"]
    assert accuracy("\\boxed{blue}", row["reward_model"]["ground_truth"]).correct


def test_virl_answers_lose_their_box_and_images_are_paths():
    (row,) = convert_virl39k(source_rows(VIRL), "virl39k").rows
    assert row["images"] == [{"bytes": None, "path": "images/a.png"}]
    assert row["reward_model"]["ground_truth"] == ["B"]
    assert row["extra_info"] == {"index": "a-1", "category": "geometry"}


@pytest.mark.parametrize(
    ("values", "field"),
    [
        pytest.param({"images": []}, "images", id="no_image"),
        pytest.param({"images": [{"bytes": b"", "path": None}]}, "images", id="empty_struct"),
        pytest.param({"problem": "<image><image>?"}, "images or image", id="a_marker_too_many"),
        pytest.param({"answer": " "}, "answer", id="no_answer"),
    ],
)
def test_a_bad_row_is_named(values, field):
    with pytest.raises(InputError) as caught:
        convert_geometry3k(source_rows(GEOMETRY | values), "geometry3k")
    assert caught.value.name == f"x.parquet row 0, field {field}"


def test_converted_rows_of_all_three_are_prompts_with_images(tmp_path):
    (tmp_path / "images").mkdir()
    (tmp_path / "images" / "a.png").write_bytes(make_picture(2))
    write_preprocessor_config(tmp_path)
    sources = [
        (convert_geometry3k, GEOMETRY, "geometry3k"),
        (convert_chartqa, CHART, "chartqa"),
        (convert_virl39k, VIRL, "virl39k"),
    ]
    for convert, values, name in sources:
        path = tmp_path / f"{name}.parquet"
        write_rl_parquet(convert(source_rows(values), name).rows, path)
        assert len(read_source_rows([path])) == 1
        reader = PromptImageReader(
            DataConfig(), ImageProcessor(tmp_path), cache_folder=tmp_path / "cache"
        )
        (read,) = read_prompts([DataFile(str(path))], DataConfig(), key="data.train", images=reader)
        (image,) = image_parts(read.prompt.messages)
        assert (image.width, image.height) == (56, 28)
        assert read.prompt.data_source == name
