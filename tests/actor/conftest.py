"""A tiny checkpoint, a batch over it, a configuration, and process groups of one rank."""

from __future__ import annotations

import pytest
import torch

from mega_agentrl.config.schema import TrainConfig
from mega_agentrl.config.sections.policy import ModelConfig, ParallelConfig
from mega_agentrl.runtime.free_port import free_port
from tests.parallel.reference import make_batch
from tests.tiny_models import make_tiny_model


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory):
    """Return folders of a two-layer Qwen3, by whether the embedding is tied."""
    root = tmp_path_factory.mktemp("qwen3")
    folders = {}
    for tied in (False, True):
        folders[tied] = make_tiny_model("qwen3", root / str(tied), tied=tied, num_hidden_layers=2)
        (folders[tied] / "tokenizer.json").write_text("{}")
    return folders


@pytest.fixture(scope="session")
def batch():
    """Return six rows of different lengths, one without a trained token."""
    return make_batch()


@pytest.fixture(scope="session")
def train_config():
    """Return `train_config(folder, tensor=2)`, which makes a config for a tiny checkpoint."""

    def make(folder, **layout):
        config = TrainConfig(model=ModelConfig(path=str(folder)))
        config.parallel = ParallelConfig(**layout)
        config.optim.micro_batch_tokens = 24
        return config

    return make


@pytest.fixture
def lone_rank():
    """Return the `RankInfo` of the only rank of a job, in this process."""
    from mega_agentrl.actor.megatron_model import RankInfo

    threads = torch.get_num_threads()
    yield RankInfo(
        rank=0, world_size=1, master_address="127.0.0.1", master_port=free_port(), timeout_s=30.0
    )
    torch.set_num_threads(threads)


@pytest.fixture
def one_rank():
    """Create process groups of a single rank, in this process."""
    from mega_agentrl.actor import megatron_compat
    from mega_agentrl.actor.parallel import process_groups

    threads = torch.get_num_threads()
    megatron_compat.init_device(0)
    groups = process_groups.init_process_groups(
        ParallelConfig(),
        rank=0,
        world_size=1,
        master_address="127.0.0.1",
        master_port=free_port(),
        timeout_s=300.0,
    )
    yield groups
    process_groups.destroy_process_groups()
    torch.set_num_threads(threads)


@pytest.fixture
def one_model(one_rank, checkpoints):
    """Return (shape, groups, DDP-wrapped chunk) of the tied checkpoint, on one rank."""
    from mega_agentrl.actor.model.gpt_model import build_model_chunks, wrap_with_ddp
    from mega_agentrl.reshard.hf_checkpoint import read_shards
    from mega_agentrl.reshard.mapping.model_mapping import hf_shapes, megatron_layout
    from mega_agentrl.reshard.mapping.model_shape import ModelShape

    shape, layout = ModelShape.from_folder(checkpoints[True]), ParallelConfig()
    chunks = build_model_chunks(shape, one_rank, layout, torch.float32)
    shards = megatron_layout(shape, one_rank.coordinates.model_parallel_rank)
    read_shards(checkpoints[True], shards, hf_shapes(shape), dict(chunks[0].named_parameters()))
    (wrapped,) = wrap_with_ddp(chunks, one_rank, layout)
    return shape, one_rank, wrapped
