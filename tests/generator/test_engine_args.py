"""Arguments that decide on the numbers."""

from dataclasses import fields

import pytest
import torch
from vllm.config import CUDAGraphMode
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.v1.executor.uniproc_executor import UniProcExecutor

from mega_agentrl.config.checks.library_options import VLLM
from mega_agentrl.config.enums import Dtype
from mega_agentrl.config.sections.runtime import EngineConfig
from mega_agentrl.generator import engine_args as engine_args_module
from mega_agentrl.generator.engine_args import engine_args
from tests.generator.vision_model import write_vision_model
from tests.vision_models import VISION_FAMILIES

pytestmark = pytest.mark.usefixtures("inspect_models_in_process")


@pytest.mark.parametrize("dtype", [Dtype.bfloat16, Dtype.float32])
def test_logits_are_float32_whatever_the_weights_are(dtype, model_folder):
    args = engine_args(EngineConfig(max_model_len=512), str(model_folder), seed=1, dtype=dtype)
    model_config = args.create_model_config()
    assert model_config.dtype == getattr(torch, dtype)
    assert model_config.head_dtype == torch.float32


def test_a_deterministic_engine_computes_each_request_alone():
    config = EngineConfig(max_num_seqs=64)
    plain = engine_args(config, "model", seed=1)
    alone = engine_args(config, "model", seed=1, deterministic=True)
    assert (plain.max_num_seqs, plain.enable_prefix_caching) == (64, True)
    assert (alone.max_num_seqs, alone.enable_prefix_caching) == (1, False)


def test_an_engine_can_sleep_where_it_shares_a_gpu(monkeypatch):
    config = EngineConfig()
    assert not engine_args(config, "model", seed=1, colocated=True).enable_sleep_mode
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert engine_args(config, "model", seed=1, colocated=True).enable_sleep_mode
    assert not engine_args(config, "model", seed=1).enable_sleep_mode


def test_a_single_worker_runs_in_the_engine_core_and_several_in_its_own_processes(monkeypatch):
    for is_gpu, tensor, backend in (
        (False, 1, UniProcExecutor),
        (False, 2, "mp"),
        (True, 1, None),  # vLLM's own choice is the same
        (True, 2, "mp"),
    ):
        monkeypatch.setattr(torch.cuda, "is_available", lambda is_gpu=is_gpu: is_gpu)
        args = engine_args(EngineConfig(tensor_parallel_size=tensor), "model", seed=1)
        assert args.distributed_executor_backend == backend


def test_an_engine_reserves_memory_for_images_that_fit_into_a_prompt(monkeypatch):
    config = EngineConfig(max_model_len=100)
    assert engine_args(config, "model", seed=1).limit_mm_per_prompt == {}
    for is_gpu in (False, True):
        monkeypatch.setattr(torch.cuda, "is_available", lambda is_gpu=is_gpu: is_gpu)
        args = engine_args(config, "model", seed=1, pixels_per_token=28 * 28)
        assert args.limit_mm_per_prompt == {"video": 0}
        assert args.mm_processor_kwargs == {"max_pixels": 100 * 28 * 28}
        assert args.mm_device_do_normalize is False
        assert args.skip_mm_profiling is not is_gpu


def test_a_users_fields_reach_vllm(model_folder):
    options = {"kv_cache_dtype": "fp8", "compilation_config": {"cudagraph_mode": "PIECEWISE"}}
    config = EngineConfig(max_model_len=512, vllm=options | {"block_size": 64})
    args = engine_args(config, str(model_folder), seed=1)
    assert (args.kv_cache_dtype, args.block_size) == ("fp8", 64)
    assert args.compilation_config.cudagraph_mode is CUDAGraphMode.PIECEWISE
    assert args.disable_log_stats


def test_a_field_that_is_set_here_is_none_of_the_users(monkeypatch):
    given = {}
    monkeypatch.setattr(
        engine_args_module, "AsyncEngineArgs", lambda **values: given.update(values)
    )
    for is_gpu in (False, True):
        monkeypatch.setattr(torch.cuda, "is_available", lambda is_gpu=is_gpu: is_gpu)
        engine_args(EngineConfig(), "model", seed=1, pixels_per_token=28 * 28)
    known = {field.name for field in fields(AsyncEngineArgs)}
    assert given.keys() - {"block_size", "disable_log_stats"} <= VLLM.owners.keys() <= known


def test_graphs_are_the_default_on_gpus(monkeypatch):
    for is_gpu in (False, True):
        monkeypatch.setattr(torch.cuda, "is_available", lambda is_gpu=is_gpu: is_gpu)
        assert engine_args(EngineConfig(), "model", seed=1).enforce_eager is not is_gpu


@pytest.mark.extended
@pytest.mark.parametrize("family", VISION_FAMILIES)
def test_logits_of_a_vision_model_are_float32(family, tmp_path):
    folder = write_vision_model(family, tmp_path)
    config = EngineConfig(max_model_len=256)
    args = engine_args(config, str(folder), seed=1, dtype=Dtype.bfloat16, pixels_per_token=28 * 28)
    model_config = args.create_model_config()
    assert (model_config.dtype, model_config.head_dtype) == (torch.bfloat16, torch.float32)
    assert model_config.multimodal_config.mm_device_do_normalize is False
