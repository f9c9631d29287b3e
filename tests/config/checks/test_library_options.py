"""Values for Megatron-core's and vLLM's own fields, which are read from the libraries' source."""

import subprocess
import sys
from pathlib import Path

import pytest

from mega_agentrl.config.checks.library_options import (
    MEGATRON,
    OPTIMIZER,
    VLLM,
    check_library_options,
)
from mega_agentrl.config.library_fields import check_fields
from mega_agentrl.config.schema import TrainConfig
from tests.config.refusals import refused

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.parametrize(
    ("options", "values"),
    [
        (MEGATRON, {"moe_permute_fusion": True, "moe_token_dispatcher_type": "flex"}),
        (MEGATRON, {"qk_clip_threshold": 50, "softmax_scale": None, "window_size": [128, 0]}),
        (MEGATRON, {"tp_comm_overlap": True, "no_rope_freq": [1, 0], "fp8": "hybrid"}),
        (MEGATRON, {"attention_backend": "flash", "cuda_graph_modules": ["attn", "mlp"]}),
        (OPTIMIZER, {"adam_eps": 1, "decoupled_weight_decay": False}),
        (VLLM, {"kv_cache_dtype": "fp8", "block_size": 32, "optimization_level": 3}),
        (VLLM, {"attention_backend": "FLASH_ATTN", "log_level": None, "runner": "generate"}),
        (VLLM, {"compilation_config": {"cudagraph_mode": "FULL", "compile_sizes": [1, "auto"]}}),
        (VLLM, {"compilation_config": {"pass_config": {"fuse_norm_quant": True}}}),
        (VLLM, {"speculative_config": {"method": "ngram"}, "enable_log_requests": True}),
        (VLLM, {"quantization_config": {"anything": 1}}),
    ],
)
def test_values_of_the_types_of_the_fields_pass(options, values):
    options.check(values)


@pytest.mark.parametrize(
    ("options", "name", "value", "expected"),
    [
        (MEGATRON, "moe_permute_fusion", 1, "bool"),
        (MEGATRON, "cuda_graph_warmup_steps", True, "int"),
        (MEGATRON, "cuda_graph_warmup_steps", 2.0, "int"),
        (MEGATRON, "mup_width_mult", "x", "float"),
        (MEGATRON, "softmax_scale", [1.0], "float or null"),
        (MEGATRON, "fp8", "e5m2", "one of e4m3, hybrid or null"),
        (MEGATRON, "no_rope_freq", ["x"], "int or List[int] or null"),
        (MEGATRON, "attention_backend", "fast", "one of flash, fused, unfused, local, auto"),
        (MEGATRON, "init_method", "xavier", "null"),
        (OPTIMIZER, "exp_avg_dtype", "bfloat16", "no value, because yaml has none of its type"),
        (VLLM, "kv_cache_memory_bytes", "10G", "int or null"),
        (VLLM, "mamba_cache_mode", "all", "one of align, none"),
        (VLLM, "compilation_config", 3, "a mapping of fields of CompilationConfig"),
        (VLLM, "media_io_kwargs", {"image": 3}, "dict[str, dict[str, Any]]"),
    ],
)
def test_a_value_of_another_type_is_refused(options, name, value, expected):
    error = refused(options.check, {name: value})
    assert (error.key, error.got) == (f"{options.key}.{name}", value)
    assert error.expected == expected


@pytest.mark.parametrize(
    ("options", "values", "key", "nearest"),
    [
        (MEGATRON, {"moe_permute_fuson": True}, "moe_permute_fuson", "moe_permute_fusion"),
        (MEGATRON, {"tp_comm_overlp": True}, "tp_comm_overlp", "tp_comm_overlap"),
        (OPTIMIZER, {"adam_epsilon": 1e-6}, "adam_epsilon", "adam_eps"),
        (VLLM, {"kv_cache_type": "fp8"}, "kv_cache_type", "kv_cache_dtype"),
        (
            VLLM,
            {"compilation_config": {"cudagraph_mod": "FULL"}},
            "compilation_config.cudagraph_mod",
            "cudagraph_mode",
        ),
    ],
)
def test_a_mistyped_name_is_refused_with_the_nearest(options, values, key, nearest):
    error = refused(options.check, values)
    assert error.key == f"{options.key}.{key}"
    assert error.cause.endswith(f"the nearest is {nearest}")


@pytest.mark.parametrize(
    ("options", "name", "ours"),
    [
        (MEGATRON, "tensor_model_parallel_size", "parallel.tensor"),
        (MEGATRON, "recompute_modules", "parallel.recompute"),
        (MEGATRON, "num_layers", "model.path"),
        (OPTIMIZER, "adam_beta2", "optim.betas"),
        (VLLM, "enforce_eager", "engine.enforce_eager"),
        (VLLM, "enable_sleep_mode", "cluster.colocated"),
    ],
)
def test_a_field_that_a_setting_sets_is_refused_with_the_setting(options, name, ours):
    error = refused(options.check, {name: 1})
    assert (error.key, error.got) == (f"{options.key}.{name}", 1)
    assert error.expected.startswith(f"{ours} in its place")


def test_the_checks_of_a_run_read_all_three():
    for key, value in (
        ("model.megatron", {"hidden_dropout": 0.1}),
        ("optim.megatron", {"optimizer": "muon"}),
        ("engine.vllm", {"load_format": "auto"}),
    ):
        config = TrainConfig()
        check_library_options(config)
        section, name = key.split(".")
        setattr(getattr(config, section), name, value)
        assert refused(check_library_options, config).key == f"{key}.{next(iter(value))}"


def test_a_library_that_is_not_installed_checks_its_fields_itself():
    check_fields({"anything": 1}, "engine.vllm", "no_such_library.arguments:Arguments")


def test_no_library_is_imported():
    program = (
        "import sys; from mega_agentrl.config.checks.library_options import MEGATRON, VLLM\n"
        "MEGATRON.check({'fp8': 'hybrid'}); VLLM.check({'compilation_config': {'backend': 'x'}})\n"
        "print({'torch', 'vllm', 'megatron', 'pydantic'} & sys.modules.keys())"
    )
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.stdout.strip() == "set()", done.stderr
