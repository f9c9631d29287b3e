"""What is read before anything starts: steps by epochs, markers, trigger words."""

import json
import shutil

import pytest

from mega_agentrl.config.choices import AresMode, CotBlocks
from mega_agentrl.config.schema import DataConfig, ModelConfig, TrainConfig
from mega_agentrl.config.search_schema import SearchToolConfig
from mega_agentrl.config.tool_schema import ToolConfig
from mega_agentrl.runtime.inputs import read_inputs


@pytest.fixture
def config(assets, tmp_path):
    return TrainConfig(
        run_dir=str(tmp_path),
        model=ModelConfig(path=f"{assets}/model"),
        data=DataConfig(train=f"{assets}/train.parquet", validation=f"{assets}/validation.parquet"),
        tool=ToolConfig(search=SearchToolConfig(corpus=f"{assets}/corpus.jsonl")),
    )


def test_epochs_become_steps(config):
    config.data.prompts_per_step, config.epochs = 7, 3
    given = read_inputs(config)
    assert config.total_steps == -(-3 * len(given.prompts) // 7)
    config.epochs, config.total_steps = 0, 5
    read_inputs(config)
    assert config.total_steps == 5


def test_a_reference_must_have_the_policys_shape(config, assets, tmp_path):
    config.algo.kl_coef, config.model.reference = 0.1, f"{assets}/model"
    read_inputs(config)
    folder = tmp_path / "other"
    shutil.copytree(assets / "model", folder)
    path = folder / "config.json"
    values = json.loads(path.read_text())
    path.write_text(json.dumps(values | {"intermediate_size": values["intermediate_size"] * 2}))
    config.model.reference = str(folder)
    with pytest.raises(ValueError, match=r"model\.reference=.*other: got ffn=\d+; expected ffn="):
        read_inputs(config)


def test_markers_are_read_where_egpo_looks_for_them(config):
    assert read_inputs(config).cot_markers is None
    config.algo.egpo.lam = 0.4
    start, end = read_inputs(config).cot_markers
    codec = read_inputs(config).codec
    assert (codec.raw_text(start), codec.raw_text(end)) == ("<think>", "</think>")
    config.algo.egpo.blocks = CotBlocks.response
    assert read_inputs(config).cot_markers is None


def test_a_marker_that_melts_into_other_tokens_is_an_error(config):
    config.algo.egpo.lam = 0.4
    config.algo.egpo.markers = ["pric", "</think>"]
    with pytest.raises(ValueError, match=r"algo\.egpo\.markers"):
        read_inputs(config)


def test_trigger_words_become_tokens(config, tmp_path):
    path = tmp_path / "words.txt"
    path.write_text("price\nThe\n")
    config.algo.ares.mode, config.algo.ares.words = AresMode.paper, str(path)
    given = read_inputs(config)
    texts = {given.codec.decode([token_id]).strip().lower() for token_id in given.trigger_ids}
    assert texts <= {"price", "the"}
    assert texts
    path.write_text("zyzzyva\n")
    with pytest.raises(ValueError, match=r"algo\.ares\.words="):
        read_inputs(config)
