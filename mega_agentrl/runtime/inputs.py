"""Read and check the inputs of a run before any process starts: data, tokenizer, tools, users.

Every error here is a `ValueError` about the input, and leaves nothing to close. `build` turns the
inputs into components. This module imports neither torch nor Ray, but the user's code may.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mega_agentrl.config.enums import Branching, CallProtocol, CotBlocks
from mega_agentrl.config.errors import ConfigError
from mega_agentrl.config.sections.data import DataFile, parse_data_files
from mega_agentrl.data.encoding.codec import HFCodec
from mega_agentrl.data.encoding.cot_markers import cot_marker_ids
from mega_agentrl.data.prompt_images import PromptImageReader, image_limits
from mega_agentrl.data.rl_dataset import (
    PromptDataset,
    UnencodedPrompt,
    encode_prompts,
    read_prompts,
)
from mega_agentrl.data.sft_dataset import (
    Conversation,
    Demonstration,
    DemonstrationSampler,
    encode_demonstrations,
    read_conversations,
)
from mega_agentrl.report.start_progress import StartProgress
from mega_agentrl.reshard.mapping.model_shape import ModelShape
from mega_agentrl.rollout.agents.base import AGENT_PART, agent_part_names
from mega_agentrl.rollout.agents.load import check_agent_branching, load_agent
from mega_agentrl.rollout.images import RolloutImages
from mega_agentrl.rollout.interaction.session import (
    InteractionRegistry,
    load_interaction_registry,
)
from mega_agentrl.runtime.cluster import check_local_size
from mega_agentrl.tool.toolkit import (
    build_toolkit,
    built_in_tools,
    load_mcp_servers,
    load_tools,
)
from mega_agentrl.vision.processor import ImageProcessor, find_image_tokens

if TYPE_CHECKING:
    from mega_agentrl.config.schema import TrainConfig
    from mega_agentrl.data.row_identity import FileDigest
    from mega_agentrl.rollout.agents.host import LoadedAgent
    from mega_agentrl.tool.base import Tool
    from mega_agentrl.tool.mcp.server import ListedServer
    from mega_agentrl.tool.toolkit import ToolKit
    from mega_agentrl.types.batch import TrainBatch
    from mega_agentrl.types.images import PlacedImage
    from mega_agentrl.types.protocols import InteractionProvider
    from mega_agentrl.types.records import Prompt

_TOKENIZER_PROBE_TEXT = (
    "<think> 12,345.6 \\boxed{x^2}\n</think> Größe 数学 </search> def f():\n    return 1"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunInputs:
    """The checked inputs of a run; no tool has been started yet."""

    codec: HFCodec
    """Tokenizer of the policy."""
    tools: ToolKit
    """Tools of the run."""
    interactions: InteractionProvider
    """User simulators that prompts may name."""
    agents: LoadedAgent | None
    """The user's agent; None without one."""
    images: RolloutImages | None
    """Loads images for a vision-language model; None for a model of text."""
    prompts: tuple[Prompt, ...]
    """Training prompts."""
    prompt_weights: tuple[float, ...]
    """Number of times that each training prompt occurs per epoch."""
    total_steps: int
    """Number of RL steps: `total_steps` of the configuration, or as many as `total_epochs` takes.
    """
    prompt_files: tuple[FileDigest, ...]
    """Digests of the rows of the training files."""
    validation: tuple[Prompt, ...]
    """Held-out prompts."""
    dev: tuple[Prompt, ...]
    """Prompts that the warm start is evaluated on; empty without one."""
    demonstrations: Callable[[], Callable[[int], TrainBatch]] | None
    """Opens a stream of supervised batches by number of rows; None without a warm start."""
    cot_markers: tuple[tuple[int, ...], tuple[int, ...]] | None
    """Token ids of the chain-of-thought markers, start and end; None if EGPO does not need them."""
    trigger_ids: frozenset[int] | None
    """Token ids after which ARES counts windows; None for all tokens."""
    read_time_s: float
    """Seconds it took to read the inputs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UserCode:
    """The user's own code and servers, without datasets and algorithms."""

    tools: Sequence[Tool]
    """Tools of `tool.user_tools_file`."""
    agents: LoadedAgent | None
    """The agent of `rollout.agent`."""
    mcp_servers: Sequence[ListedServer]
    """Servers of `tool.mcp` and their tools."""
    interactions: InteractionRegistry
    """Users of `rollout.interaction_config_file`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _DataTables:
    """Rows of all data files, checked but not tokenized."""

    train: Sequence[UnencodedPrompt]
    validation: Sequence[UnencodedPrompt]
    dev: Sequence[UnencodedPrompt]
    demonstrations: Sequence[Conversation]


def read_inputs(
    config: TrainConfig, on_prompts_read: Callable[[], None] | None = None
) -> RunInputs:
    """Read and check all inputs.

    Cheap checks come first: the layout size (unless a cluster is joined), then the user's code and
    the rows of the data files, then everything that needs the tokenizer, whose import is slow.
    `on_prompts_read` is called when the prompts are valid, before the slowest step, the encoding of
    the demonstrations.
    """
    start_s = time.perf_counter()
    StartProgress().begin("inputs", "data files, tokenizer, tools")
    if not config.cluster.ray_address:
        check_local_size(config)
    user_code = load_user_code(config)
    tables = _read_tables(config)
    # Imported here, because it imports sympy, which takes most of a second.
    from mega_agentrl.reward.rubric import check_prompt_rubrics, check_rubric_parts

    codec = HFCodec(config.model.path)
    tools = _build_toolkit(config, codec, user_code)
    interactions = user_code.interactions
    _check_tag_tokens(codec, tools.call_markers, config.rollout.call_protocol)
    agent_parts = [] if user_code.agents is None else agent_part_names(config.reward)
    if user_code.agents is not None and AGENT_PART in tools.names:
        raise ConfigError(
            "tool",
            AGENT_PART,
            "tools with other names, because this is the reward part of rollout.agent",
            "a tool of the user with this name",
        )
    check_rubric_parts(config.reward, (*tools.names, *interactions.names, *agent_parts))
    # With tags, the prompts describe the tools; function calls need them in the chat template.
    schemas = tools.schemas() if tools.uses_tool_messages else {}
    train = _encode_prompts(tables.train, config, "data.train", codec, schemas)
    validation = _encode_prompts(tables.validation, config, "data.validation", codec, schemas)
    dev = _encode_prompts(tables.dev, config, "sft.dev_data", codec, schemas)
    if on_prompts_read is not None:
        on_prompts_read()
    images = _make_rollout_images(config, codec)
    demonstrations = _encode_demonstrations(tables.demonstrations, config, codec, images)
    prompts = (*train.prompts, *validation.prompts, *dev.prompts)
    for provider in (tools, interactions):
        provider.check_prompt_kwargs(prompts)
    _report_unused_tools(user_code, train.prompts)
    check_prompt_rubrics(config.reward, prompts)
    _check_auxiliary_tokenizers(config, codec)
    return RunInputs(
        codec=codec,
        tools=tools,
        interactions=interactions,
        agents=user_code.agents,
        images=images,
        prompts=train.prompts,
        prompt_weights=train.weights,
        total_steps=_count_steps(config, train),
        prompt_files=train.files,
        validation=validation.prompts,
        dev=dev.prompts,
        demonstrations=demonstrations,
        cot_markers=load_cot_markers(config, codec),
        trigger_ids=_load_trigger_ids(config, codec),
        read_time_s=time.perf_counter() - start_s,
    )


def _count_steps(config: TrainConfig, train: PromptDataset) -> int:
    if not config.total_epochs:
        return config.total_steps
    return ceil(config.total_epochs * sum(train.weights) / config.data.prompts_per_step)


def load_user_code(config: TrainConfig) -> UserCode:
    """Load the user's reward functions (in another process), tools and simulated users.

    Each server of `tool.mcp` is started, asked for its tools and ended.

    Raises:
        ValueError: A function, tool, server or user cannot be used, or two of them have the same
            name.
    """
    from mega_agentrl.runtime.rubric import check_reward_environment, check_reward_functions

    check_reward_environment(config.reward)
    check_reward_functions(config.reward)
    tools = load_tools(config.tool)
    mcp_servers = load_mcp_servers(
        config.tool, os.environ, user_tools=tools, protocol=config.rollout.call_protocol
    )
    names = [*built_in_tools(config.tool), *(tool.name for tool in tools)]
    names += [tool.name for server in mcp_servers for tool in server.tools]
    interactions = load_interaction_registry(config.rollout.interaction_config_file, names)
    agents = load_agent(config.rollout.agent)
    check_agent_branching(config.rollout)
    return UserCode(tools=tools, mcp_servers=mcp_servers, interactions=interactions, agents=agents)


def _read_tables(config: TrainConfig) -> _DataTables:
    cache_folder = data_cache_folder()
    images = open_image_reader(config, cache_folder)
    read = partial(read_prompts, config=config.data, cache_folder=cache_folder, images=images)
    train = read(parse_data_files(config.data.train, "data.train"), key="data.train")
    validation: Sequence[UnencodedPrompt] = ()
    if validation_files := parse_data_files(config.data.validation, "data.validation"):
        validation = read(validation_files, key="data.validation", keep_repeats=True)
    dev: Sequence[UnencodedPrompt] = ()
    demonstrations: Sequence[Conversation] = ()
    if config.sft.max_steps:
        dev = read([DataFile(config.sft.dev_data)], key="sft.dev_data", keep_repeats=True)
        demonstrations = read_conversations(
            config.sft.train_data, images=images, config=config.data
        )
    return _DataTables(train=train, validation=validation, dev=dev, demonstrations=demonstrations)


def open_image_reader(config: TrainConfig, cache_folder: Path | None) -> PromptImageReader | None:
    """Return the reader of the prompts' images; None for a model of text."""
    if find_image_tokens(config.model.path) is None:
        return None
    return PromptImageReader(config.data, _make_processor(config), cache_folder=cache_folder)


def _make_processor(config: TrainConfig) -> ImageProcessor:
    data = config.data
    return ImageProcessor(config.model.path, min_pixels=data.min_pixels, max_pixels=data.max_pixels)


def _make_rollout_images(config: TrainConfig, codec: HFCodec) -> RolloutImages | None:
    if codec.image_tokens is None:
        return None
    return RolloutImages(
        _make_processor(config),
        codec.image_tokens,
        image_limits(config.data),
        max_per_answer=config.rollout.max_images_per_answer,
        max_cache_bytes=config.rollout.image_cache_mib << 20,
    )


def _check_auxiliary_tokenizers(config: TrainConfig, codec: HFCodec) -> None:
    """Check the tokenizers of reward model and reference, and the reference's shape."""
    if config.reward.hosts_reward_model:
        source = config.reward.model.path_or_url
        check_tokenizers(codec, HFCodec(source), "reward.model.path_or_url", source)
    if config.model.reference_path:
        _check_reference(config, codec)


def check_tokenizers(policy: HFCodec, other: HFCodec, key: str, folder: str) -> None:
    """Raise `ConfigError` if the two tokenizers do not give the same ids.

    Args:
        policy: Tokenizer of the policy.
        other: Tokenizer of the other model.
        key: Setting with the other model, for the error message.
        folder: The other model.
    """
    if policy.vocab_size != other.vocab_size or policy.encode(
        _TOKENIZER_PROBE_TEXT
    ) != other.encode(_TOKENIZER_PROBE_TEXT):
        raise ConfigError(
            key,
            folder,
            f"a tokenizer with the policy's {policy.vocab_size} ids (this one has "
            f"{other.vocab_size}), because the model reads the policy's token ids",
            "another model family (a reward model can also be served by an OpenAI-compatible "
            "server: give its address)",
        )


def _check_reference(config: TrainConfig, codec: HFCodec) -> None:
    """Check that the reference has the policy's shape and token ids."""
    folder, key = config.model.reference_path, "model.reference_path"
    policy = asdict(ModelShape.from_folder(config.model.path))
    other = asdict(ModelShape.from_folder(folder))
    if names := [name for name in policy if policy[name] != other[name]]:
        raise ConfigError(
            key,
            folder,
            f"a model with {', '.join(f'{n}={policy[n]}' for n in names)} as in model.path (this "
            f"one has {', '.join(f'{n}={other[n]}' for n in names)})",
            "a model of another size",
        )
    check_tokenizers(codec, HFCodec(folder), key, folder)


def _encode_demonstrations(
    conversations: Sequence[Conversation],
    config: TrainConfig,
    codec: HFCodec,
    images: RolloutImages | None,
) -> Callable[[], Callable[[int], TrainBatch]] | None:
    if not conversations:
        return None
    encoded = encode_demonstrations(
        conversations,
        codec,
        max_tokens=config.engine.max_model_len,
        tool_messages=config.rollout.call_protocol is CallProtocol.hermes,
    )
    load_images = None if images is None else images.load_now
    return partial(_open_demonstration_stream, encoded, config.seed, load_images)


def _open_demonstration_stream(
    demonstrations: Sequence[Demonstration],
    seed: int,
    load_images: Callable[[Sequence[PlacedImage]], tuple[PlacedImage, ...]] | None,
) -> Callable[[int], TrainBatch]:
    return DemonstrationSampler(demonstrations, seed, load_images).next_batch


def _build_toolkit(config: TrainConfig, codec: HFCodec, user_code: UserCode) -> ToolKit:
    sandboxes = None
    if config.tool.python.num_hosts:
        from mega_agentrl.runtime.sandboxes.remote_pool import RemoteSandboxPool

        sandboxes = RemoteSandboxPool(config.tool.python, Path(config.run_dir) / "logs")
    return build_toolkit(
        config.tool,
        codec,
        user_tools=user_code.tools,
        mcp_servers=user_code.mcp_servers,
        shows_images=codec.image_tokens is not None,
        control_tokens=codec.control_tokens,
        api_key=os.environ.get(config.tool.search.api_key_env, ""),
        sandboxes=sandboxes,
        escapes=config.rollout.branching is not Branching.released,
        protocol=config.rollout.call_protocol,
        max_failed_first_calls=config.rollout.max_failed_first_calls,
    )


def _report_unused_tools(user_code: UserCode, prompts: Iterable[Prompt]) -> None:
    """Print a line about tools of the user that no training prompt gets, which causes no error."""
    names_by_key = {
        "tool.user_tools_file": {tool.name for tool in user_code.tools},
        "tool.mcp": {tool.name for server in user_code.mcp_servers for tool in server.tools},
    }
    used_names: set[str] = set()
    for prompt in prompts:
        prompt_names = {name for name, kwargs in prompt.tools_kwargs.items() if kwargs is not None}
        if not prompt_names:  # the prompt gets all tools
            return
        used_names |= prompt_names
    for key, names in names_by_key.items():
        if unused := sorted(names - used_names):
            print(
                f"{key}: no prompt of data.train gets {', '.join(unused)}, because each names "
                "other tools in extra_info.tools_kwargs: add the name there, or use other data"
            )


def _check_tag_tokens(codec: HFCodec, markers: Iterable[str], protocol: CallProtocol) -> None:
    if special := [marker for marker in markers if not codec.survives_decoding(marker)]:
        raise ConfigError(
            "rollout.call_protocol",
            protocol,
            f"a tokenizer that does not declare {', '.join(special)} special, because tool calls "
            "would be missing in the decoded text. Set `special` to false in tokenizer_config.json "
            "and tokenizer.json",
        )


def load_cot_markers(
    config: TrainConfig, codec: HFCodec
) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Return the chain-of-thought markers if EGPO uses them."""
    egpo = config.algo.egpo
    if not egpo.lam or egpo.cot_blocks is CotBlocks.response:
        return None
    return cot_marker_ids(codec, egpo.cot_markers)


def _load_trigger_ids(config: TrainConfig, codec: HFCodec) -> frozenset[int] | None:
    """Return the tokens after which ARES counts windows; None for all tokens."""
    path = config.algo.ares.trigger_words_file
    if not path:
        return None
    from mega_agentrl.data.encoding.trigger_words import load_trigger_words, trigger_token_ids

    return trigger_token_ids(
        codec, load_trigger_words(path), key=f"algo.ares.trigger_words_file={path}"
    )


def _encode_prompts(
    unencoded: Sequence[UnencodedPrompt],
    config: TrainConfig,
    key: str,
    codec: HFCodec,
    schemas: Mapping[str, Mapping[str, Any]],
) -> PromptDataset:
    dataset = encode_prompts(unencoded, codec, config.data, key=key, tool_schemas=schemas)
    num_prompts = len(dataset.prompts)
    if dataset.num_dropped:
        print(f"{key}: {dataset.num_dropped} overlong prompts dropped, {num_prompts} kept")
    if dataset.num_truncated:
        print(f"{key}: {dataset.num_truncated} of {num_prompts} overlong prompts truncated")
    return dataset


def data_cache_folder() -> Path:
    """Return the folder for copies of remote data files, below `$XDG_CACHE_HOME` or `~/.cache`."""
    folder = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(folder) if folder else Path.home() / ".cache") / "mega_agentrl" / "data"
