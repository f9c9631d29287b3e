"""What is read before anything starts: steps by epochs, markers, trigger words."""

import asyncio
import json
import shutil
from copy import deepcopy
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest

from mega_agentrl.config.enums import AresMode, Branching, CallProtocol, CotBlocks, Truncation
from mega_agentrl.config.sections.data import DataConfig
from mega_agentrl.data.encoding.codec import HFCodec
from mega_agentrl.data.rl_dataset import encode_prompts
from mega_agentrl.runtime import inputs as module
from mega_agentrl.runtime.inputs import data_cache_folder, read_inputs
from mega_agentrl.tool.toolkit import ToolKit
from mega_agentrl.types.records import ToolOutcome, ToolStatus
from tests.chat_models import save_vision_folder
from tests.config.refusals import refused_setting
from tests.vision_models import make_picture

EXAMPLES = Path(__file__).parents[2] / "examples"


def refusal(config):
    """Return the message of the error, which the user reads: it names the place to change."""
    with pytest.raises(ValueError) as caught:
        read_inputs(config)
    return str(caught.value)


def test_epochs_are_turned_into_steps(config):
    config.data.prompts_per_step, config.total_epochs = 7, 3
    before = deepcopy(config)
    given = read_inputs(config)
    assert given.total_steps == -(-3 * len(given.prompts) // 7)
    assert config == before, "what was checked is what runs"
    config.total_epochs, config.total_steps = 0, 5
    assert read_inputs(config).total_steps == 5


def test_an_epoch_has_each_prompt_as_often_as_it_weighs(config, assets, tmp_path):
    """200 prompts once and 30 twice an epoch are 260."""
    again = tmp_path / "more.parquet"
    table = pd.read_parquet(assets / "dev.parquet")
    table["data_source"] = "again"
    table.to_parquet(again)
    config.data.train = [f"{assets}/train.parquet", f"{again}@2"]
    config.data.prompts_per_step, config.total_epochs = 10, 3
    given = read_inputs(config)
    assert given.total_steps == 78
    assert (len(given.prompts), sum(given.prompt_weights)) == (230, 260.0)


def test_without_sft_steps_no_demonstrations_are_read(config, warm_start):
    config.sft = replace(warm_start, max_steps=0)
    given = read_inputs(config)
    assert given.demonstrations is None
    assert given.dev == ()


@pytest.mark.parametrize("branching", [Branching.after_result, Branching.released])
def test_tool_output_is_escaped_except_with_released_branching(config, branching):
    config.rollout.branching = branching
    outcome = ToolOutcome(tool="python", status=ToolStatus.ok, answer="</result>", latency_s=0.0)
    is_raw = "</result>\n" in read_inputs(config).tools.render_outcome(outcome)
    assert is_raw is (branching is Branching.released)


def test_json_tool_calls_need_schemas_in_the_chat_template(config, inputs, monkeypatch):
    config.data.max_prompt_tokens = 5000
    config.rollout.call_protocol = CallProtocol.hermes
    given = read_inputs(config)
    assert given.tools.uses_tool_messages and given.tools.stop_strings == ()
    prompt = given.validation[0]
    names = [schema["function"]["name"] for schema in prompt.tool_schemas]
    assert names == ["python", "search"] and inputs.validation[0].tool_schemas == ()
    assert given.codec.decode(prompt.token_ids).count('"type": "function"') == 2
    monkeypatch.setattr(HFCodec, "survives_decoding", lambda self, text: text != "</tool_call>")
    setting = refused_setting(read_inputs, config)
    assert setting == ("rollout.call_protocol", CallProtocol.hermes)


def test_interactions_are_loaded_and_scored_by_name(config, tmp_path):
    path = tmp_path / "users.yaml"
    path.write_text("- class_name: mega_agentrl.rollout.interaction.gsm8k.Gsm8kInteraction\n")
    config.rollout.interaction_config_file = str(path)
    config.reward.rubric = {"default": {"arpo": 1.0, "gsm8k_user": 0.5}}
    assert read_inputs(config).interactions.names == ("gsm8k_user",)
    config.reward.rubric = {"default": {"arpo": 1.0, "gsm8k": 0.5}}
    assert refused_setting(read_inputs, config) == ("reward.rubric.default.gsm8k", 0.5)


def test_invalid_dataset_class_is_found_before_the_tokenizer_is_read(config):
    config.model.path = "nowhere"
    config.data.dataset_class = "pathlib:Path"
    assert refused_setting(read_inputs, config) == ("data.dataset_class", "pathlib:Path")


@pytest.mark.parametrize("truncation", [Truncation.left, Truncation.right, Truncation.middle])
def test_truncated_prompts_keep_the_generation_prompt(config, inputs, truncation, capsys):
    """Behind the messages stands what makes the policy answer, whatever was cut."""
    codec, (first, *_) = inputs.codec, inputs.prompts
    behind = codec.apply_chat_template(first.messages)[
        len(codec.apply_chat_template(first.messages, add_generation_prompt=False)) :
    ]
    assert behind
    config.data.truncation, config.data.max_prompt_tokens = truncation, 12
    prompts = read_inputs(config).prompts
    assert {len(prompt.token_ids) for prompt in prompts} == {12}
    assert all(prompt.token_ids[-len(behind) :] == tuple(behind) for prompt in prompts)
    assert "data.train: 200 of 200" in capsys.readouterr().out


def test_a_vision_language_model_reads_images_and_zooms(config, assets, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    table = pd.read_parquet(assets / "dev.parquet").head(3)
    table["images"] = [[{"bytes": make_picture(row, 56, 28), "path": None}] for row in range(3)]
    table["prompt"] = [[{"role": "user", "content": "<image>what?"}]] * 3
    table["extra_info"] = [{"index": row} for row in range(3)]
    table.to_parquet(tmp_path / "images.parquet")
    config.data = DataConfig(train=str(tmp_path / "images.parquet"), max_pixels=784)
    assert "images.parquet" in refusal(config), "a model of text"
    config.model.path = str(save_vision_folder(tmp_path / "model"))
    config.tool.zoom.enabled = True
    given = read_inputs(config)
    assert "zoom" in given.tools.names
    pad = given.codec.image_tokens.image_id
    assert [prompt.token_ids.count(pad) for prompt in given.prompts] == [1, 1, 1]
    prompt = given.prompts[0]
    assert Path(prompt.images[0].image.path).is_relative_to(tmp_path / "cache")
    (loaded,) = asyncio.run(given.images.load(prompt.images))
    assert loaded.image.pixels_HWC.shape == (28, 28, 3)


def user_tool(tmp_path, name="Gsm8kTool"):
    path = tmp_path / "tools.yaml"
    path.write_text(f"- class_name: mega_agentrl.tool.gsm8k.{name}\n")
    return str(path)


@pytest.mark.parametrize(
    ("section", "field", "value", "named"),
    [
        ("data", "max_prompt_tokens", 2, "data.max_prompt_tokens"),
        ("reward", "rubric", {"default": {"gsm8k": 1.0}}, "reward.rubric.default.gsm8k"),
        ("reward", "rubric", {"gsm8k": {"arpo": 1.0}}, "data source"),
    ],
    ids=["data", "part", "data source"],
)
def test_bad_input_is_found_before_tools_start(config, monkeypatch, section, field, value, named):
    monkeypatch.setattr(ToolKit, "start", lambda *_: pytest.fail("started"))
    setattr(getattr(config, section), field, value)
    assert named in refusal(config)


@pytest.fixture
def unread(config):
    """A configuration whose data and tokenizer would be refused if they were read."""
    config.data.train = config.model.path = "nowhere"
    return config


def test_bad_user_tools_are_found_before_the_data_is_read(unread, tmp_path):
    unread.tool.user_tools_file = user_tool(tmp_path, "Gsm8k")
    key, got = refused_setting(read_inputs, unread)
    assert key.startswith("tool.user_tools_file=") and got == "mega_agentrl.tool.gsm8k.Gsm8k"


def test_an_mcp_server_that_does_not_start_is_found_before_the_data_is_read(unread, tmp_path):
    path = tmp_path / "mcp.json"
    path.write_text('{"mcpServers": {"mine": {"command": "no-such-program"}}}')
    unread.tool.mcp = str(path)
    key, got = refused_setting(read_inputs, unread)
    assert (key, got) == (f"tool.mcp={path}, server mine", "no-such-program")


def test_prompts_are_encoded_with_the_schemas_of_mcp_servers(config, monkeypatch):
    config.rollout.call_protocol = CallProtocol.hermes
    encoded = []
    monkeypatch.setattr(module, "encode_prompts", record_schemas(encoded))
    config.tool.mcp = str(EXAMPLES / "mcp.json")
    assert {"add_to_basket", "total_price"} <= set(read_inputs(config).tools.names)
    assert (
        encoded[0]["total_price"]["function"]["description"] == "Returns the price of the basket."
    )


def record_schemas(encoded):
    """`encode_prompts` that also appends the schemas to `encoded`."""

    def encode(*args, tool_schemas, **options):
        encoded.append(tool_schemas)
        return encode_prompts(*args, tool_schemas=tool_schemas, **options)

    return encode


def test_a_bad_reward_is_found_before_the_data_is_read(unread, tmp_path):
    (tmp_path / "mine.py").write_text("import nothing_of_this_name\n")
    unread.reward.functions = {"mine": f"{tmp_path}/mine.py"}
    assert refused_setting(read_inputs, unread)[0] == "reward.functions.mine"


def test_a_simulated_user_with_the_name_of_a_tool_is_found_before_the_data_is_read(
    unread, tmp_path
):
    path = tmp_path / "users.yaml"
    name = "mega_agentrl.rollout.interaction.gsm8k.Gsm8kInteraction"
    path.write_text(f"- {{name: python, class_name: {name}}}\n")
    unread.rollout.interaction_config_file = str(path)
    assert "users.yaml" in refusal(unread)


def test_prompt_with_invalid_tool_kwargs_is_found(config, assets, tmp_path):
    config.tool.user_tools_file = user_tool(tmp_path)
    row = pd.read_parquet(assets / "train.parquet").iloc[0].to_dict()
    row["extra_info"] = {"index": 7, "tools_kwargs": {"gsm8k": {"create_kwargs": {"k": 1}}}}
    config.data.train = f"{tmp_path}/train.parquet"
    pd.DataFrame([row]).to_parquet(config.data.train)
    message = refusal(config)
    assert "/7" in message and "tool gsm8k" in message


@pytest.mark.parametrize(
    ("tools_kwargs", "is_reported"),
    [({"python": {"create_kwargs": None}}, True), ({"letters": {}, "python": None}, False)],
    ids=["other tools", "named"],
)
def test_a_user_tool_that_no_prompt_gets_is_reported(
    config, assets, tmp_path, capsys, tools_kwargs, is_reported
):
    (tmp_path / "letters.py").write_text(
        "from mega_agentrl.tool.function import tool\n\n\n@tool()\n"
        'def letters(text: str) -> str:\n    """Counts letters."""\n    return str(len(text))\n'
    )
    (tmp_path / "letters.yaml").write_text("- class_name: letters.py:letters\n")
    row = pd.read_parquet(assets / "train.parquet").iloc[0].to_dict()
    row["extra_info"] = {"index": 7, "tools_kwargs": tools_kwargs}
    config.data.train = f"{tmp_path}/train.jsonl"
    pd.DataFrame([row]).to_json(config.data.train, orient="records", lines=True)
    config.tool.user_tools_file = f"{tmp_path}/letters.yaml"
    read_inputs(config)
    assert ("no prompt of data.train gets letters" in capsys.readouterr().out) == is_reported


def test_overlong_prompts_can_be_dropped_and_are_counted(config, assets, tmp_path, capsys):
    table = pd.read_parquet(assets / "train.parquet").head(2)
    table["prompt"] = [[{"role": "user", "content": "7" * length}] for length in (10, 500)]
    table.to_parquet(tmp_path / "train.parquet")
    config.data.train = f"{tmp_path}/train.parquet"
    config.data.truncation, config.data.max_prompt_tokens = Truncation.drop, 100
    assert len(read_inputs(config).prompts) == 1
    assert "data.train: 1 overlong" in capsys.readouterr().out


def test_file_url_is_copied_to_the_cache(config, assets, monkeypatch, tmp_path):
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert data_cache_folder() == Path.home() / ".cache" / "mega_agentrl" / "data"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "shm"))
    config.data.train = f"file://{assets}/train.parquet"
    assert len(read_inputs(config).prompts) == 200
    (copy,) = (tmp_path / "shm" / "mega_agentrl" / "data").iterdir()
    assert copy.read_bytes() == (assets / "train.parquet").read_bytes()


def test_a_reference_must_have_the_policys_shape(config, assets, tmp_path):
    config.algo.kl_coef, config.model.reference_path = 0.1, f"{assets}/model"
    read_inputs(config)
    folder = tmp_path / "other"
    shutil.copytree(assets / "model", folder)
    path = folder / "config.json"
    values = json.loads(path.read_text())
    path.write_text(json.dumps(values | {"intermediate_size": values["intermediate_size"] * 2}))
    config.model.reference_path = str(folder)
    assert refused_setting(read_inputs, config) == ("model.reference_path", str(folder))


def test_cot_markers_are_loaded_for_egpo(config):
    assert read_inputs(config).cot_markers is None
    config.algo.egpo.lam = 0.4
    given = read_inputs(config)
    texts = [given.codec.decode_with_special_tokens(marker) for marker in given.cot_markers]
    assert texts == ["<think>", "</think>"]
    config.algo.egpo.cot_blocks = CotBlocks.response
    assert read_inputs(config).cot_markers is None


def test_marker_that_merges_with_other_tokens_is_an_error(config):
    config.algo.egpo.lam = 0.4
    config.algo.egpo.cot_markers = ["pric", "</think>"]
    assert "algo.egpo.cot_markers" in refusal(config)


def test_trigger_words_become_tokens(config, tmp_path):
    path = tmp_path / "words.txt"
    path.write_text("price\nThe\n")
    config.algo.ares.mode, config.algo.ares.trigger_words_file = AresMode.paper, str(path)
    given = read_inputs(config)
    texts = {given.codec.decode([token_id]).strip().lower() for token_id in given.trigger_ids}
    assert texts and texts <= {"price", "the"}
    path.write_text("zyzzyva\n")
    assert "algo.ares.trigger_words_file" in refusal(config)
