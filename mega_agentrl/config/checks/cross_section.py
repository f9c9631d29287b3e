"""Check conditions across sections of a configuration before a run starts.

Reads only file names and the model's `config.json`, no tokenizer and no data, so that it takes
milliseconds on a login node. Ranges of single sections are in the schema. The contents of data
files are checked by `data/`, free space and cluster health by the preflight.

Every error is a `ValueError` with the key, its value, the expected value and a probable cause.
"""

from __future__ import annotations

import json
import shutil
from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mega_agentrl.config.checks.algo import check_algo
from mega_agentrl.config.checks.colocation import check_colocation
from mega_agentrl.config.checks.data import check_data, check_file_exists
from mega_agentrl.config.checks.report import check_report
from mega_agentrl.config.checks.reward import check_reward
from mega_agentrl.config.checks.staleness import check_staleness
from mega_agentrl.config.enums import (
    AdvantageEstimator,
    Branching,
    CallProtocol,
    ForkBudgetMode,
    LossAggregation,
    SandboxIsolation,
    SearchBackend,
)

if TYPE_CHECKING:
    from mega_agentrl.config.schema import TrainConfig

SUPPORTED_ARCHITECTURES = (
    "LlamaForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
    "Qwen3MoeForCausalLM",
)


SINGLE_TRAJECTORY_ESTIMATORS = (
    AdvantageEstimator.reinforce_plus_plus,
    AdvantageEstimator.remax,
    AdvantageEstimator.gae,
)
"""Estimators that need only one trajectory per prompt."""


def check_config(config: TrainConfig) -> None:
    """Raise a `ValueError` for the first condition that `config` violates.

    `runtime.cluster` checks whether the cluster has room for all ranks.
    """
    _check_files(config)
    model = read_model_config(Path(config.model.path))
    _check_reference(config, model)
    _check_parallel_sizes(config, model)
    _check_lengths(config, model)
    _check_groups(config)
    _check_released_branching(config)
    _check_inference_template(config)
    if config.algo.needs_critic and _has_experts(model):
        raise ValueError(
            "algo.advantage=gae: model.path has experts, expected a dense model, because the "
            "critic has the same architecture; probable cause: a preset of another model (grpo and "
            "rloo need no critic)"
        )
    check_algo(config)
    check_staleness(config)
    check_colocation(config)
    check_reward(config)
    check_report(config.report)
    # Sandboxes on other nodes check this when they start.
    if (
        config.tool.python.isolation is SandboxIsolation.bubblewrap
        and not config.tool.python.num_hosts
    ):
        _check_bubblewrap()


def read_model_config(folder: Path, key: str = "model.path") -> dict[str, Any]:
    """Read `config.json` of a supported Hugging Face checkpoint folder."""
    path = folder / "config.json"
    if not path.is_file():
        raise ValueError(
            f"{key}={str(folder)!r}: there is no config.json in it; expected a local "
            "Hugging Face checkpoint folder; probable cause: it has not been downloaded or created "
            "yet (`make smoke` creates runs/toolqa/model), or the working folder is another"
        )
    try:
        model = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(
            f"{key}={str(folder)!r}: config.json is no JSON ({error}); expected the file "
            "that transformers writes; probable cause: an interrupted copy"
        ) from error
    got = model.get("architectures") if isinstance(model, dict) else None
    if not isinstance(got, list) or not set(got) & set(SUPPORTED_ARCHITECTURES):
        raise ValueError(
            f"{key}={str(folder)!r}: architectures={got}; expected one of "
            f"{', '.join(SUPPORTED_ARCHITECTURES)}; probable cause: another model family"
        )
    return dict(model)


def _check_reference(config: TrainConfig, model: dict[str, Any]) -> None:
    """Check architecture and vocabulary; `runtime.inputs` compares all other sizes."""
    folder = config.model.reference_path
    if not folder:
        return
    if not config.algo.needs_reference:
        raise ValueError(
            f"model.reference_path={folder!r}: expected none with algo.kl_coef=0, which needs no "
            "reference; probable cause: only the KL term was switched off"
        )
    other = read_model_config(Path(folder), "model.reference_path")
    for name in ("architectures", "vocab_size"):
        if other.get(name) != model.get(name):
            raise ValueError(
                f"model.reference_path={folder!r}: its config.json has {name}={other.get(name)}; "
                f"expected {model.get(name)} as in model.path, because the two are compared "
                "token by token; probable cause: another model family"
            )


def _check_files(config: TrainConfig) -> None:
    check_data(config)
    needed: dict[str, str] = {}
    if config.sft.max_steps:
        needed |= {"sft.train_data": config.sft.train_data, "sft.dev_data": config.sft.dev_data}
    if config.tool.search.backend is SearchBackend.local and config.tool.search.source:
        needed["tool.search.source"] = config.tool.search.source
    if config.tool.user_tools_file:
        needed["tool.user_tools_file"] = config.tool.user_tools_file
    if config.rollout.interaction_config_file:
        needed["rollout.interaction_config_file"] = config.rollout.interaction_config_file
    for key, value in needed.items():
        if not value:
            raise ValueError(f"{key} is empty: expected a file; probable cause: it was never set")
        check_file_exists(key, value)
    if Path(config.run_dir).exists() and not Path(config.run_dir).is_dir():
        raise ValueError(
            f"run_dir={config.run_dir!r}: it is a file; expected a new or existing folder; "
            "probable cause: a mistyped path"
        )


def _check_parallel_sizes(config: TrainConfig, model: dict[str, Any]) -> None:
    heads = _read_model_size(config, model, "num_attention_heads")
    layers = _read_model_size(config, model, "num_hidden_layers")
    parallel, engine = config.parallel, config.engine
    # Older Llama configs omit the key if every head has its own key and value.
    kv_heads = heads
    if model.get("num_key_value_heads") is not None:
        kv_heads = _read_model_size(config, model, "num_key_value_heads")
    for key, size in (
        ("parallel.tensor", parallel.tensor),
        ("engine.tensor_parallel_size", engine.tensor_parallel_size),
    ):
        _check_divides(key, size, "attention heads", heads)
        if kv_heads % size and size % kv_heads:
            raise ValueError(
                f"{key}={size}: the model's {kv_heads} key/value heads are neither a multiple nor "
                "a divisor of it; expected a size that divides them or that they divide; "
                "probable cause: a size chosen for another model"
            )
        if _has_dense_layers(model):
            feed_forward = _read_model_size(config, model, "intermediate_size")
            _check_divides(key, size, "feed-forward channels", feed_forward)
    stages = parallel.pipeline * parallel.virtual_pipeline
    key = (
        "parallel.pipeline"
        if parallel.virtual_pipeline == 1
        else "parallel.pipeline * parallel.virtual_pipeline"
    )
    _check_divides(key, stages, "layers", layers)
    if parallel.virtual_pipeline > 1 and parallel.pipeline == 1:
        raise ValueError(
            f"parallel.virtual_pipeline={parallel.virtual_pipeline}: expected 1 with "
            "parallel.pipeline=1; probable cause: only the pipeline was removed"
        )
    if parallel.sequence_parallel and parallel.tensor == 1:
        raise ValueError(
            "parallel.sequence_parallel=True: expected False with parallel.tensor=1, where no rank "
            "can share a sequence; probable cause: only the tensor ranks were removed"
        )
    _check_expert_parallel(config, model)


def _check_expert_parallel(config: TrainConfig, model: dict[str, Any]) -> None:
    parallel, expert = config.parallel, config.parallel.expert
    if not _has_experts(model):
        if expert > 1:
            raise ValueError(
                f"parallel.expert={expert}: expected 1, the model has no experts; probable "
                "cause: a size chosen for another model"
            )
        return
    # Newer configs have num_local_experts, older ones num_experts.
    key = "num_local_experts" if "num_local_experts" in model else "num_experts"
    width = _read_model_size(config, model, "moe_intermediate_size")
    _check_divides("parallel.expert", expert, "experts", _read_model_size(config, model, key))
    share = parallel.expert_tensor_size
    _check_divides("parallel.expert_tensor", share, "channels in an expert", width)
    _check_divides(
        "engine.tensor_parallel_size",
        config.engine.tensor_parallel_size,
        "channels in an expert",
        width,
    )
    ranks = parallel.tensor * parallel.context * parallel.data
    if ranks % (expert * share):
        raise ValueError(
            f"parallel.expert={expert}: with parallel.expert_tensor={share} it makes "
            f"{expert * share} ranks that hold the experts; expected a divisor of {ranks} = "
            f"parallel.tensor={parallel.tensor} * parallel.context={parallel.context} * "
            f"parallel.data={parallel.data}; probable cause: it was taken for an additional factor"
        )
    if parallel.tensor > 1 and not parallel.sequence_parallel:
        raise ValueError(
            "parallel.sequence_parallel=False: expected True with "
            f"parallel.tensor={parallel.tensor} and experts, whose tokens must be split; probable "
            "cause: a layout of a dense model"
        )


def _has_experts(model: dict[str, Any]) -> bool:
    return any("Moe" in name for name in model["architectures"])


def _has_dense_layers(model: dict[str, Any]) -> bool:
    dense = model.get("mlp_only_layers") or (model.get("decoder_sparse_step") or 1) > 1
    return bool(dense) or not _has_experts(model)


def _check_divides(key: str, size: int, what: str, total: int) -> None:
    if total % size:
        fits = [n for n in range(1, total + 1) if total % n == 0]
        shown = ", ".join(map(str, fits[:12]))
        raise ValueError(
            f"{key}={size}: the model has {total} {what}, which it does not divide; expected a "
            f"divisor ({shown}); probable cause: a size chosen for another model"
        )


def _read_model_size(config: TrainConfig, model: dict[str, Any], name: str) -> int:
    value = model.get(name)
    if not isinstance(value, int) or value < 1:
        raise ValueError(
            f"model.path={config.model.path!r}: config.json has {name}={value}; expected a "
            "positive number; probable cause: an incomplete config.json"
        )
    return value


def _check_lengths(config: TrainConfig, model: dict[str, Any]) -> None:
    prompt, response = config.data.max_prompt_tokens, config.rollout.max_response_tokens
    limit = config.engine.max_model_len
    if prompt + response > limit:
        raise ValueError(
            f"engine.max_model_len={limit}: expected at least {prompt + response} = "
            f"data.max_prompt_tokens={prompt} + rollout.max_response_tokens={response}; probable "
            "cause: only one of the three was raised"
        )
    budget, context = config.optim.micro_batch_tokens, config.parallel.context
    if prompt + response > budget * context:
        shared = f", shared by parallel.context={context} ranks" if context > 1 else ""
        raise ValueError(
            f"optim.micro_batch_tokens={budget}: expected at least "
            f"{ceil((prompt + response) / context)} = "
            f"data.max_prompt_tokens={prompt} + rollout.max_response_tokens={response}, the "
            f"longest trajectory{shared}; probable cause: a budget chosen for shorter trajectories"
        )
    positions = _read_model_size(config, model, "max_position_embeddings")
    if limit > positions:
        raise ValueError(
            f"engine.max_model_len={limit}: expected at most {positions}, the model's "
            "max_position_embeddings; probable cause: a length chosen for another model"
        )


def _check_groups(config: TrainConfig) -> None:
    size = config.rollout.group_size
    roots = config.rollout.branch.initial_rollouts
    branches = config.rollout.branching is not Branching.none
    if branches and roots is not None and not 1 <= roots <= size:
        raise ValueError(
            f"rollout.branch.initial_rollouts={roots}: expected 1 to "
            f"rollout.group_size={size}; probable cause: only one of them was changed"
        )
    compares = (
        not config.algo.has_user_advantage
        and config.algo.advantage not in SINGLE_TRAJECTORY_ESTIMATORS
    )
    if config.total_steps and size < 2 and compares:
        raise ValueError(
            f"rollout.group_size={size}: expected at least 2; probable cause: "
            f"algo.advantage={config.algo.advantage} compares the trajectories "
            "of one prompt and learns nothing from one"
        )
    rows, parts = config.data.prompts_per_step * size, config.optim.num_minibatches
    if rows % parts:
        raise ValueError(
            f"optim.num_minibatches={parts}: expected a divisor of {rows} = "
            f"data.prompts_per_step={config.data.prompts_per_step} * "
            f"rollout.group_size={size}; probable cause: only one of the three was changed"
        )
    if rows // parts < config.parallel.data:
        raise ValueError(
            f"parallel.data={config.parallel.data}: expected at most {rows // parts}, the "
            "trajectories of one optimizer step; probable cause: too many data-parallel ranks "
            "for data.prompts_per_step * rollout.group_size / optim.num_minibatches"
        )
    fewest = (
        ceil(config.rollout.min_finished_fraction * config.data.prompts_per_step) * size // parts
    )
    if fewest < config.parallel.data:
        raise ValueError(
            f"rollout.min_finished_fraction={config.rollout.min_finished_fraction}: a step may "
            f"have as few as {fewest} trajectories for each of optim.num_minibatches={parts} "
            f"optimizer steps; expected at least parallel.data={config.parallel.data}; probable "
            "cause: a fraction too small for the number of data-parallel ranks"
        )


def _check_released_branching(config: TrainConfig) -> None:
    """Check settings that the released rounds would silently ignore."""
    rollout = config.rollout
    if rollout.branching is not Branching.released:
        return
    required = {
        "call_protocol": CallProtocol.tags,
        "trajectory_timeout_s": 0,
        "use_inference_chat_template": False,
        "interaction_config_file": "",
        "straggler_timeout_s": 0,
        "partial_rollout": False,
        "max_staleness": 0,
    }
    for key, expected in required.items():
        got = getattr(rollout, key)
        if got != expected:
            raise ValueError(
                f"rollout.{key}={got}: expected {expected!r} with rollout.branching=released; "
                "probable cause: a setting of the asynchronous rollout, which the released "
                "rounds do not support"
            )
    if rollout.branch.fork_budget is not ForkBudgetMode.partitioned:
        raise ValueError(
            f"rollout.branch.fork_budget={rollout.branch.fork_budget}: expected partitioned with "
            "rollout.branching=released; probable cause: the released rounds distribute forks by "
            "their own rule and ignore the setting"
        )


def _check_inference_template(config: TrainConfig) -> None:
    """Check settings for trajectories whose turns are separate rows.

    A row may be as long as the engine's context, and a mean over rows would weight a trajectory by
    its number of turns.
    """
    if not config.rollout.use_inference_chat_template:
        return
    if config.algo.loss_aggregation is not LossAggregation.token_mean:
        raise ValueError(
            f"algo.loss_aggregation={config.algo.loss_aggregation}: expected token_mean with "
            "rollout.use_inference_chat_template=True, where a trajectory is several sequences; "
            "probable cause: only one of the two was changed"
        )
    budget, limit = config.optim.micro_batch_tokens, config.engine.max_model_len
    if budget * config.parallel.context < limit:
        raise ValueError(
            f"optim.micro_batch_tokens={budget}: expected at least engine.max_model_len={limit} "
            "with rollout.use_inference_chat_template=True, whose sequences may be that long; "
            "probable cause: a budget chosen for shorter sequences"
        )


def _check_bubblewrap() -> None:
    if shutil.which("bwrap") is None:
        raise ValueError(
            "tool.python: the program bwrap is not on PATH; expected bubblewrap, which isolates "
            "the Python tool; probable cause: it is not installed (Debian, Ubuntu: "
            "`apt-get install bubblewrap`, or `make env`)"
        )
