"""Every violated condition is an error with key, value, expected value and cause."""

import json

import pytest

from mega_agentrl.config.checks.cross_section import check_config
from mega_agentrl.config.checks.parallel import SUPPORTED_ARCHITECTURES
from mega_agentrl.config.enums import (
    Branching,
    CallProtocol,
    ForkBudgetMode,
    LossAggregation,
    SandboxIsolation,
)
from mega_agentrl.config.schema import TrainConfig
from mega_agentrl.reshard.mapping import model_shape
from tests.config.refusals import refused, refused_setting

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


def named(config):
    """Return key and value that the error of `check_config` names."""
    return refused_setting(check_config, config)


def test_a_good_configuration_passes(config):
    check_config(config)


def test_a_reference_has_the_same_architecture_and_is_used(config, tmp_path):
    config.model.reference_path = str(tmp_path / "other")
    reference = ("model.reference_path", f"{tmp_path}/other")
    assert named(config) == reference
    config.algo.kl_coef = 0.1
    assert named(config) == reference
    (tmp_path / "other").mkdir()
    path = tmp_path / "other" / "config.json"
    path.write_text(json.dumps(MODEL | {"vocab_size": 7}))
    error = refused(check_config, config)
    assert (error.key, error.got) == reference
    assert "vocab_size=None" in error.expected and "vocab_size=7" in error.cause
    path.write_text(json.dumps(MODEL | {"architectures": ["LlamaForCausalLM"]}))
    assert "architectures=['LlamaForCausalLM']" in refused(check_config, config).cause
    path.write_text(json.dumps(MODEL))
    check_config(config)


@pytest.mark.parametrize("key", ["train", "validation"])
def test_data_files_must_exist(config, key):
    setattr(config.data, key, "nowhere.parquet")
    assert named(config) == (f"data.{key}", "nowhere.parquet")


def test_training_data_are_needed_and_validation_data_are_not(config):
    config.data.validation = ""
    check_config(config)
    config.data.train = ""
    assert named(config) == ("data.train", "")


@pytest.mark.parametrize("case", ["evaluation_only", "evaluation_during_training"])
def test_an_evaluation_that_is_asked_for_needs_validation_data(config, case):
    config.data.validation = ""
    if case == "evaluation_only":
        config.total_steps = 0
    else:
        config.evaluate.every_steps = 2
    assert named(config) == ("data.validation", "")


def test_a_missing_corpus_fails_and_no_corpus_passes(config):
    config.tool.search.source = "nowhere.jsonl"
    assert named(config) == ("tool.search.source", "nowhere.jsonl")
    config.tool.search.source = ""
    check_config(config)


@pytest.mark.parametrize("key", ["user_tools_file", "mcp"])
def test_a_missing_file_of_tools_fails(config, tmp_path, key):
    setattr(config.tool, key, "nowhere")
    assert named(config) == (f"tool.{key}", "nowhere")
    setattr(config.tool, key, str(tmp_path / "file"))
    (tmp_path / "file").write_text("")
    check_config(config)


def test_the_warm_start_needs_its_files_only_when_it_runs(config, tmp_path):
    config.sft.train_data = "nowhere.parquet"
    check_config(config)
    config.sft.max_steps = 10
    assert named(config) == ("sft.train_data", "nowhere.parquet")
    config.sft.train_data = str(tmp_path / "sft.parquet")
    assert named(config) == ("sft.dev_data", "")
    config.sft.dev_data = str(tmp_path / "dev.parquet")
    check_config(config)


def test_a_run_dir_that_is_a_file_fails(config, tmp_path):
    config.run_dir = str(tmp_path / "corpus.jsonl")
    assert named(config) == ("run_dir", config.run_dir)


@pytest.mark.parametrize("path", ["", "nowhere", "Qwen/Qwen3-8B"])
def test_a_missing_model_folder_fails(config, path):
    config.model.path = path
    assert named(config) == ("model.path", path)


def test_a_model_of_another_architecture_fails(config, tmp_path):
    write_model(tmp_path, architectures=["LlamaForSequenceClassification"])
    error = refused(check_config, config)
    assert error.key == "model.path"
    assert "['LlamaForSequenceClassification']" in error.cause
    assert "Qwen3ForCausalLM" in error.expected
    write_model(tmp_path, architectures=None)
    assert named(config) == ("model.path", config.model.path)


def test_a_damaged_model_config_fails(config, tmp_path):
    path = tmp_path / "model" / "config.json"
    for damaged in ('{"architectures": [', "[]", "[" * 100_000):
        path.write_text(damaged)
        assert named(config) == ("model.path", str(path))
    write_model(tmp_path, num_hidden_layers=None)
    assert "num_hidden_layers" in refused(check_config, config).expected


VISION = {
    "architectures": ["Qwen3VLForConditionalGeneration"],
    "text_config": {key: value for key, value in MODEL.items() if key != "architectures"},
    "vision_config": {"deepstack_visual_indexes": [0, 1]},
} | dict.fromkeys(set(MODEL) - {"architectures"})


def test_the_first_stage_of_a_vision_model_has_all_layers_with_features(config, tmp_path):
    write_model(tmp_path, **VISION)
    check_config(config)
    config.parallel.pipeline = 2
    error = refused(check_config, config)
    assert (error.key, error.got) == ("parallel.pipeline", 2)
    assert "at most 1 stages" in error.expected


@pytest.mark.parametrize(
    ("num_heads", "width", "is_refused"),
    [(16, 3420, False), (16, 3421, True), (3, 3420, True)],
    ids=["divided", "width", "heads"],
)
def test_engines_split_the_vision_tower(num_heads, width, is_refused, config, tmp_path):
    tower = {"num_heads": num_heads, "intermediate_size": width, "deepstack_visual_indexes": []}
    write_model(tmp_path, **(VISION | {"vision_config": tower}))
    config.engine.tensor_parallel_size = 2
    if is_refused:
        error = refused(check_config, config)
        assert (error.key, error.got) == ("engine.tensor_parallel_size", 2)
        assert "vision tower" in error.expected
    else:
        check_config(config)


def test_a_critic_that_sees_images_fails(config, tmp_path):
    write_model(tmp_path, **VISION)
    config.algo.advantage = "gae"
    assert refused(check_config, config).key == "algo.advantage"


def test_a_hosted_reward_model_that_cannot_see_fails(config, tmp_path):
    write_model(tmp_path, **VISION)
    config.reward.rubric = {"default": {"model": 1.0}}
    config.reward.model.path_or_url = str(tmp_path / "reward")
    error = refused(check_config, config)
    assert (error.key, error.got) == ("reward.model.path_or_url", str(tmp_path / "reward"))


def test_a_text_model_has_no_tower_to_freeze(config, tmp_path):
    config.model.freeze_vision = True
    assert refused(check_config, config).key == "model.freeze_vision"
    write_model(tmp_path, **VISION)
    check_config(config)


def test_supported_architectures_agree_with_the_model_mapping():
    assert SUPPORTED_ARCHITECTURES == model_shape.SUPPORTED_ARCHITECTURES


@pytest.mark.parametrize(
    ("section", "key", "value", "expected"),
    [
        ("parallel", "tensor", 3, "4 attention heads (1, 2, 4)"),
        ("parallel", "expert", 2, "1, the model has no experts"),
        ("parallel", "virtual_pipeline", 2, "parallel.pipeline=1"),
        ("parallel", "sequence_parallel", True, "parallel.tensor=1"),
        ("parallel", "pipeline", 4, "2 layers (1, 2)"),
        ("engine", "tensor_parallel_size", 3, "4 attention heads (1, 2, 4)"),
    ],
)
def test_sizes_that_do_not_divide_the_model_fail(config, section, key, value, expected):
    setattr(getattr(config, section), key, value)
    error = refused(check_config, config)
    assert (error.key, error.got) == (f"{section}.{key}", value)
    assert expected in error.expected


@pytest.mark.parametrize("key", ["engine.tensor_parallel_size", "parallel.tensor"])
def test_ranks_may_share_key_value_heads_but_not_split_them_unevenly(config, tmp_path, key):
    section, name = key.split(".")
    setattr(getattr(config, section), name, 4)
    check_config(config)  # 2 key/value heads on 4 ranks: each on two
    write_model(tmp_path, num_attention_heads=12, num_key_value_heads=3, intermediate_size=240)
    error = refused(check_config, config)
    assert (error.key, error.got) == (key, 4)
    assert "3 key/value heads" in error.expected


def test_an_old_llama_has_a_key_and_value_for_every_head(config, tmp_path):
    write_model(tmp_path, architectures=["LlamaForCausalLM"], num_key_value_heads=None)
    config.parallel.tensor = 4
    check_config(config)


def test_virtual_stages_divide_the_layers_with_the_pipeline(config):
    config.parallel.pipeline = config.parallel.virtual_pipeline = 2
    assert named(config) == ("parallel.pipeline * parallel.virtual_pipeline", 4)


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
    ("layout", "key", "got", "expected"),
    [
        ({"expert": 3}, "expert", 3, "4 experts"),
        ({"expert_tensor": 4}, "expert_tensor", 4, "6 channels in an expert"),
        (
            {"expert": 2, "expert_tensor": 2},
            "expert",
            2,
            "a divisor of 2 = parallel.tensor=2 * parallel.context=1 * parallel.data=1",
        ),
        ({"sequence_parallel": False}, "sequence_parallel", False, "parallel.tensor=2"),
    ],
)
def test_a_layout_that_does_not_fit_experts_fails(config, tmp_path, layout, key, got, expected):
    write_model(tmp_path, **MOE)
    for name, value in ({"tensor": 2, "sequence_parallel": True} | layout).items():
        setattr(config.parallel, name, value)
    error = refused(check_config, config)
    assert (error.key, error.got) == (f"parallel.{key}", got)
    assert expected in error.expected


def test_a_dense_layer_among_sparse_ones_is_checked_too(config, tmp_path):
    write_model(tmp_path, **MOE, mlp_only_layers=[1])
    config.parallel.tensor, config.parallel.sequence_parallel = 2, True
    assert "255 feed-forward channels" in refused(check_config, config).expected
    write_model(tmp_path, **(MOE | {"num_experts": None}))
    assert "num_experts" in refused(check_config, config).expected
    write_model(tmp_path, **MOE)
    config.parallel.tensor, config.parallel.sequence_parallel = 1, False
    config.engine.tensor_parallel_size = 4
    error = refused(check_config, config)
    assert (error.key, error.got) == ("engine.tensor_parallel_size", 4)
    assert "6 channels in an expert" in error.expected


def test_feed_forward_channels_are_divided(config, tmp_path):
    write_model(tmp_path, intermediate_size=255)
    config.parallel.tensor = 2
    assert "255 feed-forward channels" in refused(check_config, config).expected


def test_prompt_and_response_must_fit_the_engine(config):
    config.engine.max_model_len = 255
    error = refused(check_config, config)
    assert (error.key, error.got) == ("engine.max_model_len", 255)
    longest = "256 = data.max_prompt_tokens=96 + rollout.max_response_tokens=160"
    assert longest in error.expected


def test_the_longest_trajectory_must_fit_a_micro_batch(config):
    config.optim.micro_batch_tokens = 256
    check_config(config)
    config.optim.micro_batch_tokens = 255
    error = refused(check_config, config)
    assert (error.key, error.got) == ("optim.micro_batch_tokens", 255)
    assert "at least 256" in error.expected


def test_context_ranks_share_the_longest_trajectory(config):
    config.parallel.context, config.optim.micro_batch_tokens = 2, 128
    check_config(config)
    config.optim.micro_batch_tokens = 127
    error = refused(check_config, config)
    assert (error.key, error.got) == ("optim.micro_batch_tokens", 127)
    assert "at least 128" in error.expected and "parallel.context=2" in error.expected


def test_the_engine_must_fit_the_model(config):
    config.engine.max_model_len = 512
    check_config(config)
    config.engine.max_model_len = 513
    error = refused(check_config, config)
    assert (error.key, error.got) == ("engine.max_model_len", 513)
    assert "at most 512" in error.expected


def test_roots_fit_into_the_group(config):
    config.rollout.branch.initial_rollouts = 9
    assert named(config) == ("rollout.branch.initial_rollouts", 9)
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
def test_settings_that_released_branching_does_not_support_are_refused(config, key, value):
    config.rollout.branching = Branching.released
    check_config(config)
    *section, name = key.split(".")
    setattr(config.rollout.branch if section else config.rollout, name, value)
    assert named(config) == (f"rollout.{key}", value)


def test_turns_as_separate_sequences_must_fit_a_micro_batch_each(config):
    config.rollout.use_inference_chat_template = True
    check_config(config)
    config.optim.micro_batch_tokens = config.engine.max_model_len
    check_config(config)
    config.engine.max_model_len += 1
    error = refused(check_config, config)
    assert (error.key, error.got) == ("optim.micro_batch_tokens", 256)
    assert "engine.max_model_len=257" in error.expected
    config.engine.max_model_len -= 1
    config.algo.loss_aggregation = LossAggregation.seq_mean_token_mean
    check_config(config)


def test_a_missing_interaction_config_file_fails(config, tmp_path):
    config.rollout.interaction_config_file = str(tmp_path / "users.yaml")
    assert named(config)[0] == "rollout.interaction_config_file"
    (tmp_path / "users.yaml").write_text("")
    check_config(config)


def test_minibatches_divide_the_batch(config):
    config.data.prompts_per_step, config.rollout.group_size = 3, 4
    config.optim.num_minibatches = 5
    error = refused(check_config, config)
    assert (error.key, error.got) == ("optim.num_minibatches", 5)
    assert "a divisor of 12" in error.expected
    config.optim.num_minibatches = 6
    check_config(config)
    config.parallel.data = 3
    assert named(config) == ("parallel.data", 3)
    config.parallel.data, config.rollout.min_finished_fraction = 2, 0.3
    assert named(config) == ("rollout.min_finished_fraction", 0.3)
    config.rollout.min_finished_fraction = 0.9
    check_config(config)


def test_bubblewrap_must_be_installed(config, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert named(config) == ("tool.python.isolation", SandboxIsolation.bubblewrap)
    config.tool.python.num_hosts = 1  # needed on the hosts, not here
    check_config(config)
    config.tool.python.num_hosts = 0
    config.tool.python.isolation = SandboxIsolation.none
    check_config(config)


def test_the_objective_is_checked_against_the_rest(config):
    config.algo.loss = "gspo"
    config.parallel.context = 2
    assert named(config) == ("parallel.context", 2)


def test_single_trajectory_estimators_accept_groups_of_one(config):
    config.rollout.group_size, config.rollout.branching = 1, Branching.none
    assert named(config) == ("rollout.group_size", 1)
    config.total_steps = 0
    check_config(config)
    config.total_steps, config.algo.advantage = 1, "reinforce_plus_plus"
    check_config(config)
