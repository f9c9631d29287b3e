"""Conditions across sections of a configuration, checked before anything starts.

Reads only file names and the model's `config.json`: no torch, no tokenizer, no data, so it
answers in milliseconds on a login node. Ranges of single sections are in the schema; what the
data files hold is checked by `data/`, free space and cluster health by the preflight.
Every error is a `ValueError` with the key, what was got, what was expected, a probable cause.
"""

from __future__ import annotations

import json
import shutil
from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mega_agentrl.config.check_algo import check_algo
from mega_agentrl.config.check_colocation import check_colocation
from mega_agentrl.config.check_data import check_data, check_file
from mega_agentrl.config.check_report import check_report
from mega_agentrl.config.check_reward import check_reward
from mega_agentrl.config.check_staleness import check_staleness
from mega_agentrl.config.choices import (
    Advantage,
    Aggregation,
    Branching,
    Budget,
    CallProtocol,
    Isolation,
    SearchSource,
)

if TYPE_CHECKING:
    from mega_agentrl.config.schema import TrainConfig

SUPPORTED_ARCHITECTURES = (
    "LlamaForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
    "Qwen3MoeForCausalLM",
)


ALONE = (Advantage.reinforce_plus_plus, Advantage.remax, Advantage.gae)
"""Estimators that learn from one trajectory of a prompt."""


def check(config: TrainConfig) -> None:
    """Raise `ValueError` for the first condition that `config` breaks.

    Whether the cluster has room for all ranks is checked where it is known how large it is, in
    `runtime.cluster`.
    """
    _check_files(config)
    model = read_model_config(Path(config.model.path))
    _check_reference(config, model)
    _check_cuts(config, model)
    _check_lengths(config, model)
    _check_groups(config)
    _check_released(config)
    _check_restarts(config)
    if config.algo.needs_critic and _has_experts(model):
        raise ValueError(
            "algo.advantage=gae: model.path has experts, expected a dense model, a critic is one "
            "of its kind; probable cause: a preset of another model (grpo, rloo need no critic)"
        )
    check_algo(config)
    check_staleness(config)
    check_colocation(config)
    check_reward(config)
    check_report(config.report)
    # Where the sandboxes are on other nodes, those say at their start whether they have it.
    if config.tool.python.isolation is Isolation.bubblewrap and not config.tool.python.hosts:
        _check_bubblewrap()


def read_model_config(folder: Path, key: str = "model.path") -> dict[str, Any]:
    """`config.json` of a supported Hugging Face checkpoint folder."""
    path = folder / "config.json"
    if not path.is_file():
        raise ValueError(
            f"{key}={str(folder)!r}: there is no config.json in it; expected a local "
            "Hugging Face checkpoint folder; probable cause: it has not been downloaded or made "
            "yet (`make smoke` makes runs/toolqa/model), or the run was started elsewhere"
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
    """Kind and vocabulary; all other sizes are compared before anything starts, in `inputs`."""
    folder = config.model.reference
    if not folder:
        return
    if not config.algo.needs_reference:
        raise ValueError(
            f"model.reference={folder!r}: expected none with algo.kl_coef=0, which reads no "
            "reference; probable cause: the KL term was switched off alone"
        )
    other = read_model_config(Path(folder), "model.reference")
    for name in ("architectures", "vocab_size"):
        if other.get(name) != model.get(name):
            raise ValueError(
                f"model.reference={folder!r}: its config.json has {name}={other.get(name)}; "
                f"expected {model.get(name)} as in model.path, token by token the two are "
                "compared; probable cause: another model family"
            )


def _check_files(config: TrainConfig) -> None:
    check_data(config)
    needed: dict[str, str] = {}
    if config.sft.max_steps:
        needed |= {"sft.data": config.sft.data, "sft.dev": config.sft.dev}
    if config.tool.search.backend is SearchSource.local and config.tool.search.source:
        needed["tool.search.source"] = config.tool.search.source
    if config.tool.file:
        needed["tool.file"] = config.tool.file
    if config.rollout.interaction_file:
        needed["rollout.interaction_file"] = config.rollout.interaction_file
    for key, value in needed.items():
        if not value:
            raise ValueError(f"{key} is empty: expected a file; probable cause: it was never set")
        check_file(key, value)
    if Path(config.run_dir).exists() and not Path(config.run_dir).is_dir():
        raise ValueError(
            f"run_dir={config.run_dir!r}: it is a file; expected a folder, new or old; probable "
            "cause: a mistyped path"
        )


def _check_cuts(config: TrainConfig, model: dict[str, Any]) -> None:
    heads = _number(config, model, "num_attention_heads")
    layers = _number(config, model, "num_hidden_layers")
    parallel, engine = config.parallel, config.engine
    # Llama's older configs leave the key out where every head has its own key and value.
    kv_heads = heads
    if model.get("num_key_value_heads") is not None:
        kv_heads = _number(config, model, "num_key_value_heads")
    for key, size in (("parallel.tensor", parallel.tensor), ("engine.tensor", engine.tensor)):
        _check_division(key, size, "attention heads", heads)
        if kv_heads % size and size % kv_heads:
            raise ValueError(
                f"{key}={size}: the model's {kv_heads} key/value heads are neither a multiple nor "
                "a divisor of it; expected a size that divides them or that they divide; "
                "probable cause: a size chosen for another model"
            )
        if _has_dense_layers(model):
            feed_forward = _number(config, model, "intermediate_size")
            _check_division(key, size, "feed-forward channels", feed_forward)
    stages = parallel.pipeline * parallel.virtual
    key = "parallel.pipeline" if parallel.virtual == 1 else "parallel.pipeline * parallel.virtual"
    _check_division(key, stages, "layers", layers)
    if parallel.virtual > 1 and parallel.pipeline == 1:
        raise ValueError(
            f"parallel.virtual={parallel.virtual}: expected 1 with parallel.pipeline=1; probable "
            "cause: the pipeline was taken away alone"
        )
    if parallel.sequence and parallel.tensor == 1:
        raise ValueError(
            "parallel.sequence=True: expected False with parallel.tensor=1, there is nobody to "
            "share a sequence with; probable cause: the tensor ranks were taken away alone"
        )
    _check_expert_cuts(config, model)


def _check_expert_cuts(config: TrainConfig, model: dict[str, Any]) -> None:
    parallel, expert = config.parallel, config.parallel.expert
    if not _has_experts(model):
        if expert > 1:
            raise ValueError(
                f"parallel.expert={expert}: expected 1, the model has no experts; probable "
                "cause: a size chosen for another model"
            )
        return
    # Newer configs say num_local_experts where older ones say num_experts.
    key = "num_local_experts" if "num_local_experts" in model else "num_experts"
    width = _number(config, model, "moe_intermediate_size")
    _check_division("parallel.expert", expert, "experts", _number(config, model, key))
    share = parallel.expert_tensor_size
    _check_division("parallel.expert_tensor", share, "channels in an expert", width)
    _check_division("engine.tensor", config.engine.tensor, "channels in an expert", width)
    ranks = parallel.tensor * parallel.context * parallel.data
    if ranks % (expert * share):
        raise ValueError(
            f"parallel.expert={expert}: with parallel.expert_tensor={share} it makes "
            f"{expert * share} ranks that hold the experts; expected a divisor of {ranks} = "
            f"parallel.tensor={parallel.tensor} * parallel.context={parallel.context} * "
            f"parallel.data={parallel.data}; probable cause: it was taken for a further factor"
        )
    if parallel.tensor > 1 and not parallel.sequence:
        raise ValueError(
            f"parallel.sequence=False: expected True with parallel.tensor={parallel.tensor} and "
            "experts, whose tokens must be shared; probable cause: a layout of a dense model"
        )


def _has_experts(model: dict[str, Any]) -> bool:
    return any("Moe" in name for name in model["architectures"])


def _has_dense_layers(model: dict[str, Any]) -> bool:
    dense = model.get("mlp_only_layers") or (model.get("decoder_sparse_step") or 1) > 1
    return bool(dense) or not _has_experts(model)


def _check_division(key: str, size: int, what: str, total: int) -> None:
    if total % size:
        fits = [n for n in range(1, total + 1) if total % n == 0]
        shown = ", ".join(map(str, fits[:12]))
        raise ValueError(
            f"{key}={size}: the model has {total} {what}, which it does not divide; expected a "
            f"divisor ({shown}); probable cause: a size chosen for another model"
        )


def _number(config: TrainConfig, model: dict[str, Any], name: str) -> int:
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
            "cause: one of the three was raised alone"
        )
    budget, context = config.optim.micro_batch_tokens, config.parallel.context
    if prompt + response > budget * context:
        shared = f", shared by parallel.context={context} ranks" if context > 1 else ""
        raise ValueError(
            f"optim.micro_batch_tokens={budget}: expected at least "
            f"{ceil((prompt + response) / context)} = "
            f"data.max_prompt_tokens={prompt} + rollout.max_response_tokens={response}, the "
            f"longest trajectory{shared}; probable cause: a budget chosen for shorter ones"
        )
    positions = _number(config, model, "max_position_embeddings")
    if limit > positions:
        raise ValueError(
            f"engine.max_model_len={limit}: expected at most {positions}, the model's "
            "max_position_embeddings; probable cause: a length chosen for another model"
        )


def _check_groups(config: TrainConfig) -> None:
    size = config.rollout.num_trajectories
    roots = config.rollout.branch.initial_rollouts
    branches = config.rollout.branching is not Branching.none
    if branches and roots is not None and not 1 <= roots <= size:
        raise ValueError(
            f"rollout.branch.initial_rollouts={roots}: expected 1 to "
            f"rollout.num_trajectories={size}; probable cause: one of them was changed alone"
        )
    compares = not config.algo.is_own and config.algo.advantage not in ALONE
    if config.total_steps and size < 2 and compares:
        raise ValueError(
            f"rollout.num_trajectories={size}: expected at least 2; probable cause: "
            f"algo.advantage={config.algo.advantage} compares the trajectories "
            "of one prompt and learns nothing from one"
        )
    rows, parts = config.data.prompts_per_step * size, config.optim.num_minibatches
    if rows % parts:
        raise ValueError(
            f"optim.num_minibatches={parts}: expected a divisor of {rows} = "
            f"data.prompts_per_step={config.data.prompts_per_step} * "
            f"rollout.num_trajectories={size}; probable cause: one of the three was changed alone"
        )
    if rows // parts < config.parallel.data:
        raise ValueError(
            f"parallel.data={config.parallel.data}: expected at most {rows // parts}, the "
            "trajectories of one optimizer step; probable cause: too many data-parallel ranks "
            "for data.prompts_per_step * rollout.num_trajectories / optim.num_minibatches"
        )
    fewest = ceil(config.rollout.quorum * config.data.prompts_per_step) * size // parts
    if fewest < config.parallel.data:
        raise ValueError(
            f"rollout.quorum={config.rollout.quorum}: a step may have as few as {fewest} "
            f"trajectories for each of optim.num_minibatches={parts} optimizer steps; expected at "
            f"least parallel.data={config.parallel.data}; probable cause: a share too small for "
            "the number of data-parallel ranks"
        )


def _check_released(config: TrainConfig) -> None:
    """What the released rounds cannot do; they would go on without saying so."""
    rollout = config.rollout
    if rollout.branching is not Branching.released:
        return
    wanted = {
        "call_protocol": CallProtocol.tags,
        "max_wall_s": 0,
        "use_inference_chat_template": False,
        "interaction_file": "",
        "straggler_s": 0,
        "carry_over": False,
        "staleness": 0,
    }
    for key, expected in wanted.items():
        got = getattr(rollout, key)
        if got != expected:
            raise ValueError(
                f"rollout.{key}={got}: expected {expected!r} with rollout.branching=released; "
                "probable cause: a setting of the asynchronous rollout, which the released "
                "rounds do not have"
            )
    if rollout.branch.budget is not Budget.partitioned:
        raise ValueError(
            f"rollout.branch.budget={rollout.branch.budget}: expected partitioned with "
            "rollout.branching=released; probable cause: the released rounds share slots out in "
            "their own way and read no budget"
        )


def _check_restarts(config: TrainConfig) -> None:
    """Turns that are rows of their own: a row is as long as the engine's context, and a mean
    over rows would weigh trajectories by their turns."""
    if not config.rollout.use_inference_chat_template:
        return
    if config.algo.aggregation is not Aggregation.token_mean:
        raise ValueError(
            f"algo.aggregation={config.algo.aggregation}: expected token_mean with "
            "rollout.use_inference_chat_template=True, where a trajectory is several sequences; "
            "probable cause: one of them was changed alone"
        )
    budget, limit = config.optim.micro_batch_tokens, config.engine.max_model_len
    if budget * config.parallel.context < limit:
        raise ValueError(
            f"optim.micro_batch_tokens={budget}: expected at least engine.max_model_len={limit} "
            "with rollout.use_inference_chat_template=True, whose sequences may be that long; "
            "probable cause: a budget chosen for shorter ones"
        )


def _check_bubblewrap() -> None:
    if shutil.which("bwrap") is None:
        raise ValueError(
            "tool.python: the program bwrap is not on PATH; expected bubblewrap, which isolates "
            "the Python tool; probable cause: it is not installed (Debian, Ubuntu: "
            "`apt-get install bubblewrap`, or `make env`)"
        )
