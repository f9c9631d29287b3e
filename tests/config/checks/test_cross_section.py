"""Every violated condition is an error with key, value, expected value and cause."""

import json

import pytest

from mega_agentrl.config.checks.cross_section import SUPPORTED_ARCHITECTURES, check_config
from mega_agentrl.config.enums import (
    AdvantageEstimator,
    Branching,
    CallProtocol,
    ForkBudgetMode,
    LossAggregation,
    PolicyLoss,
    SandboxIsolation,
)
from mega_agentrl.config.schema import TrainConfig
from mega_agentrl.reshard.mapping import model_shape

MODEL = {
    "architectures": ["Qwen3ForCausalLM"],
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "intermediate_size": 256,
    "max_position_embeddings": 512,
}


@pytest.fixture
def config(tmp_path):
    """A configuration that passes: 4 heads, 2 key/value heads, 2 layers, 512 positions."""
    for name in ("train", "validation", "sft", "dev"):
        (tmp_path / f"{name}.parquet").write_bytes(b"")
    (tmp_path / "corpus.jsonl").write_text("")
    (tmp_path / "model").mkdir()
    write_model(tmp_path)
    made = TrainConfig(run_dir=str(tmp_path / "run"))
    made.model.path = str(tmp_path / "model")
    made.data.train = str(tmp_path / "train.parquet")
    made.data.validation = str(tmp_path / "validation.parquet")
    made.data.max_prompt_tokens = 96
    made.rollout.max_response_tokens = 160
    made.engine.max_model_len = 256
    made.tool.search.source = str(tmp_path / "corpus.jsonl")
    return made


def write_model(folder, **changes):
    (folder / "model" / "config.json").write_text(json.dumps(MODEL | changes))


def message(config):
    with pytest.raises(ValueError, match="expected") as caught:
        check_config(config)
    text = str(caught.value)
    assert "probable cause" in text
    assert len(text.splitlines()) == 1
    return text


def test_a_good_configuration_passes(config):
    check_config(config)


def test_a_reference_has_the_same_architecture_and_is_used(config, tmp_path):
    config.model.reference_path = str(tmp_path / "other")
    assert "expected none with algo.kl_coef=0" in message(config)
    config.algo.kl_coef = 0.1
    assert f"model.reference_path='{tmp_path}/other': there is no config.json" in message(config)
    (tmp_path / "other").mkdir()
    path = tmp_path / "other" / "config.json"
    path.write_text(json.dumps(MODEL | {"vocab_size": 7}))
    assert "has vocab_size=7; expected None as in model.path" in message(config)
    path.write_text(json.dumps(MODEL | {"architectures": ["LlamaForCausalLM"]}))
    assert "has architectures=['LlamaForCausalLM']" in message(config)
    path.write_text(json.dumps(MODEL))
    check_config(config)


@pytest.mark.parametrize("key", ["train", "validation"])
def test_data_files_must_exist(config, key):
    setattr(config.data, key, "nowhere.parquet")
    assert f"data.{key}='nowhere.parquet'" in message(config)
    setattr(config.data, key, "")
    assert f"data.{key} is empty" in message(config)


def test_a_missing_corpus_fails_and_no_corpus_passes(config):
    config.tool.search.source = "nowhere.jsonl"
    assert "tool.search.source='nowhere.jsonl'" in message(config)
    config.tool.search.source = ""
    check_config(config)


def test_a_missing_user_tools_file_fails(config, tmp_path):
    config.tool.user_tools_file = "nowhere.yaml"
    assert "tool.user_tools_file='nowhere.yaml'" in message(config)
    config.tool.user_tools_file = str(tmp_path / "tools.yaml")
    (tmp_path / "tools.yaml").write_text("")
    check_config(config)


def test_the_warm_start_needs_its_files_only_when_it_runs(config, tmp_path):
    config.sft.train_data = "nowhere.parquet"
    check_config(config)
    config.sft.max_steps = 10
    assert "sft.train_data='nowhere.parquet'" in message(config)
    config.sft.train_data = str(tmp_path / "sft.parquet")
    assert "sft.dev_data is empty" in message(config)
    config.sft.dev_data = str(tmp_path / "dev.parquet")
    check_config(config)


def test_a_run_dir_that_is_a_file_fails(config, tmp_path):
    config.run_dir = str(tmp_path / "corpus.jsonl")
    assert "run_dir=" in message(config)


@pytest.mark.parametrize("path", ["", "nowhere", "Qwen/Qwen3-8B"])
def test_a_missing_model_folder_fails(config, path):
    config.model.path = path
    assert "there is no config.json" in message(config)


def test_a_model_of_another_architecture_fails(config, tmp_path):
    write_model(tmp_path, architectures=["LlamaForSequenceClassification"])
    text = message(config)
    assert "['LlamaForSequenceClassification']" in text
    assert "Qwen3ForCausalLM" in text
    write_model(tmp_path, architectures=None)
    assert "architectures=None" in message(config)


def test_a_damaged_model_config_fails(config, tmp_path):
    (tmp_path / "model" / "config.json").write_text('{"architectures": [')
    assert "config.json is no JSON" in message(config)
    write_model(tmp_path, num_hidden_layers=None)
    assert "num_hidden_layers=None" in message(config)


def test_supported_architectures_agree_with_the_model_mapping():
    assert SUPPORTED_ARCHITECTURES == model_shape.SUPPORTED_ARCHITECTURES


@pytest.mark.parametrize(
    ("section", "key", "value", "hint"),
    [
        ("parallel", "tensor", 3, "parallel.tensor=3: the model has 4 attention heads"),
        ("parallel", "expert", 2, "parallel.expert=2: expected 1, the model has no experts"),
        (
            "parallel",
            "virtual_pipeline",
            2,
            "parallel.virtual_pipeline=2: expected 1 with parallel.pipeline=1",
        ),
        ("parallel", "sequence_parallel", True, "parallel.sequence_parallel=True: expected False"),
        ("parallel", "pipeline", 4, "parallel.pipeline=4: the model has 2 layers"),
        (
            "engine",
            "tensor_parallel_size",
            3,
            "engine.tensor_parallel_size=3: the model has 4 attention heads",
        ),
    ],
)
def test_sizes_that_do_not_divide_the_model_fail(config, section, key, value, hint):
    setattr(getattr(config, section), key, value)
    assert hint in message(config)


@pytest.mark.parametrize("key", ["engine.tensor_parallel_size", "parallel.tensor"])
def test_ranks_may_share_key_value_heads_but_not_split_them_unevenly(config, tmp_path, key):
    section, name = key.split(".")
    setattr(getattr(config, section), name, 4)
    check_config(config)  # 2 key/value heads on 4 ranks: each on two
    write_model(tmp_path, num_attention_heads=12, num_key_value_heads=3, intermediate_size=240)
    assert f"{key}=4: the model's 3 key/value heads" in message(config)


def test_an_old_llama_has_a_key_and_value_for_every_head(config, tmp_path):
    write_model(tmp_path, architectures=["LlamaForCausalLM"], num_key_value_heads=None)
    config.parallel.tensor = 4
    check_config(config)


def test_virtual_stages_divide_the_layers_with_the_pipeline(config):
    config.parallel.pipeline = config.parallel.virtual_pipeline = 2
    assert "parallel.pipeline * parallel.virtual_pipeline=4: the model has 2 layers" in message(
        config
    )


MOE = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_experts": 4,
    "moe_intermediate_size": 6,
    "intermediate_size": 255,  # of no layer
}


def test_a_layout_that_fits_experts_passes(config, tmp_path):
    config.parallel.tensor = config.parallel.data = config.parallel.expert = 2
    config.parallel.sequence_parallel = True
    for expert_tensor in (None, 1, 2):
        config.parallel.expert_tensor = expert_tensor
        write_model(tmp_path, **MOE)
        check_config(config)
    write_model(tmp_path, **(MOE | {"num_experts": None, "num_local_experts": 4}))
    check_config(config)


@pytest.mark.parametrize(
    ("layout", "hint"),
    [
        ({"expert": 3}, "parallel.expert=3: the model has 4 experts"),
        ({"expert_tensor": 4}, "parallel.expert_tensor=4: the model has 6 channels in an expert"),
        (
            {"expert": 2, "expert_tensor": 2},
            "parallel.expert=2: with parallel.expert_tensor=2 it makes 4 ranks that hold the "
            "experts; expected a divisor of 2 = parallel.tensor=2 * parallel.context=1 * "
            "parallel.data=1",
        ),
        (
            {"sequence_parallel": False},
            "parallel.sequence_parallel=False: expected True with parallel.tensor=2",
        ),
    ],
)
def test_a_layout_that_does_not_fit_experts_fails(config, tmp_path, layout, hint):
    write_model(tmp_path, **MOE)
    for key, value in ({"tensor": 2, "sequence_parallel": True} | layout).items():
        setattr(config.parallel, key, value)
    assert hint in message(config)


def test_a_dense_layer_among_sparse_ones_is_checked_too(config, tmp_path):
    write_model(tmp_path, **MOE, mlp_only_layers=[1])
    config.parallel.tensor, config.parallel.sequence_parallel = 2, True
    assert "255 feed-forward channels" in message(config)
    write_model(tmp_path, **(MOE | {"num_experts": None}))
    assert "num_experts=None" in message(config)
    write_model(tmp_path, **MOE)
    config.parallel.tensor, config.parallel.sequence_parallel = 1, False
    config.engine.tensor_parallel_size = 4
    assert "engine.tensor_parallel_size=4: the model has 6 channels in an expert" in message(config)


def test_feed_forward_channels_are_divided(config, tmp_path):
    write_model(tmp_path, intermediate_size=255)
    config.parallel.tensor = 2
    assert "255 feed-forward channels" in message(config)


def test_prompt_and_response_must_fit_the_engine(config):
    config.engine.max_model_len = 255
    text = message(config)
    assert "engine.max_model_len=255" in text
    assert "at least 256 = data.max_prompt_tokens=96 + rollout.max_response_tokens=160" in text


def test_the_longest_trajectory_must_fit_a_micro_batch(config):
    config.optim.micro_batch_tokens = 256
    check_config(config)
    config.optim.micro_batch_tokens = 255
    assert "optim.micro_batch_tokens=255: expected at least 256" in message(config)


def test_context_ranks_share_the_longest_trajectory(config):
    config.parallel.context, config.optim.micro_batch_tokens = 2, 128
    check_config(config)
    config.optim.micro_batch_tokens = 127
    text = message(config)
    assert "optim.micro_batch_tokens=127: expected at least 128" in text
    assert "shared by parallel.context=2 ranks" in text


def test_the_engine_must_fit_the_model(config):
    config.engine.max_model_len = 512
    check_config(config)
    config.engine.max_model_len = 513
    assert "at most 512" in message(config)


def test_roots_fit_into_the_group(config):
    config.rollout.branch.initial_rollouts = 9
    assert "rollout.branch.initial_rollouts=9: expected 1 to" in message(config)
    config.rollout.branching = Branching.none
    check_config(config)
    config.rollout.branching = Branching.after_result
    config.rollout.branch.initial_rollouts = 8
    check_config(config)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("call_protocol", CallProtocol.hermes),
        ("trajectory_timeout_s", 1.0),
        ("use_inference_chat_template", True),
        ("interaction_config_file", __file__),
        ("branch.fork_budget", ForkBudgetMode.first_come),
        ("straggler_timeout_s", 5.0),
        ("partial_rollout", True),
        ("max_staleness", 1),
    ],
)
def test_settings_that_released_branching_does_not_support(config, key, value):
    config.rollout.branching = Branching.released
    check_config(config)
    *section, name = key.split(".")
    setattr(config.rollout.branch if section else config.rollout, name, value)
    assert f"rollout.{key}={value}: expected" in message(config)


def test_turns_as_separate_sequences(config):
    config.rollout.use_inference_chat_template = True
    check_config(config)
    config.optim.micro_batch_tokens = config.engine.max_model_len
    check_config(config)
    config.engine.max_model_len += 1
    assert "optim.micro_batch_tokens=256: expected at least engine.max_model_len=257" in message(
        config
    )
    config.algo.loss_aggregation = LossAggregation.seq_mean_token_mean
    assert "algo.loss_aggregation=seq_mean_token_mean: expected token_mean" in message(config)
    config.rollout.use_inference_chat_template = False
    check_config(config)


def test_a_missing_interaction_config_file_fails(config, tmp_path):
    config.rollout.interaction_config_file = str(tmp_path / "users.yaml")
    assert "rollout.interaction_config_file=" in message(config)
    (tmp_path / "users.yaml").write_text("")
    check_config(config)


def test_group_estimators_need_two_trajectories(config):
    config.rollout.group_size = 1
    assert "algo.advantage=grpo" in message(config)
    config.total_steps = 0
    check_config(config)


def test_minibatches_divide_the_batch(config):
    config.data.prompts_per_step, config.rollout.group_size = 3, 4
    config.optim.num_minibatches = 5
    assert "optim.num_minibatches=5: expected a divisor of 12" in message(config)
    config.optim.num_minibatches = 6
    check_config(config)
    config.parallel.data = 3
    assert "parallel.data=3: expected at most 2" in message(config)
    config.parallel.data, config.rollout.min_finished_fraction = 2, 0.3
    assert "rollout.min_finished_fraction=0.3: a step may have as few as 0 traj" in message(config)
    config.rollout.min_finished_fraction = 0.9
    check_config(config)


def test_bubblewrap_must_be_installed(config, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "apt-get install bubblewrap" in message(config)
    config.tool.python.num_hosts = 1  # needed on the hosts, not here
    check_config(config)
    config.tool.python.num_hosts = 0
    config.tool.python.isolation = SandboxIsolation.none
    check_config(config)


def test_the_objective_is_checked_against_the_rest(config):
    config.algo.loss = PolicyLoss.gspo
    config.parallel.context = 2
    assert "parallel.context=2: expected 1 with algo.loss=gspo" in message(config)


def test_single_trajectory_estimators_accept_groups_of_one(config):
    config.rollout.group_size, config.rollout.branching = 1, Branching.none
    assert "rollout.group_size=1: expected at least 2" in message(config)
    config.algo.advantage = AdvantageEstimator.reinforce_plus_plus
    check_config(config)
