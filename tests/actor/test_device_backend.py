"""Megatron on a CPU: devices, streams and collectives that it takes for those of a GPU."""

from __future__ import annotations

import importlib
import importlib.util
import os
import subprocess
import sys

import pytest
import torch

from mega_agentrl.actor import device, megatron_compat
from mega_agentrl.config.enums import Dtype
from tests.actor.gloo_ranks import run_ranks

ROWS = (3, 0, 2)

on_cpu = pytest.mark.skipif(torch.cuda.is_available(), reason="redirections are for CPUs")


@on_cpu
def test_cuda_means_cpu_in_megatron_and_nowhere_else():
    megatron_compat.init_device(0)
    from megatron.core.pipeline_parallel import schedules

    view = schedules.torch
    assert view.zeros([], dtype=torch.int, device="cuda").device.type == "cpu"
    assert view.empty(2, device=view.cuda.current_device()).device.type == "cpu"
    assert view.ones(2, device="meta").device.type == "meta"
    view.cuda.synchronize()
    assert view.Tensor is torch.Tensor
    with pytest.raises((AssertionError, RuntimeError)):
        torch.zeros(1, device="cuda")


@on_cpu
def test_the_view_keeps_lazy_attributes_and_is_made_once():
    megatron_compat.init_device(0)
    from megatron.core.optimizer import clip_grads
    from megatron.core.pipeline_parallel import schedules

    assert clip_grads.torch is schedules.torch
    assert clip_grads.torch.distributed is torch.distributed
    with pytest.raises(AttributeError):
        _ = clip_grads.torch.no_such_name


@on_cpu
def test_streams_on_a_cpu_are_one_that_is_always_idle():
    megatron_compat.init_device(0)
    from megatron.core.transformer.moe import token_dispatcher

    cuda = token_dispatcher.torch.cuda
    stream = cuda.Stream()
    assert cuda.current_stream() is stream
    with cuda.stream(stream):
        stream.wait_stream(cuda.current_stream())
    stream.record_event().synchronize()


@on_cpu
def test_split_sizes_become_numpy_where_asked_for():
    megatron_compat.init_device(0)
    from megatron.core.transformer.moe.token_dispatcher import maybe_move_tensor_to_cpu

    sizes = torch.tensor([3, 1])
    assert maybe_move_tensor_to_cpu(sizes, as_numpy=True).tolist() == [3, 1]
    assert not torch.is_tensor(maybe_move_tensor_to_cpu(sizes, as_numpy=True))
    assert maybe_move_tensor_to_cpu(sizes) is sizes
    assert maybe_move_tensor_to_cpu(None, as_numpy=True) is None


def test_no_random_numbers_are_drawn():
    megatron_compat.init_device(0)
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    before = torch.get_rng_state()
    with get_cuda_rng_tracker().fork():
        pass
    assert not get_cuda_rng_tracker().is_initialized()
    assert torch.equal(torch.get_rng_state(), before)


@on_cpu
def test_a_cpu_trains_over_gloo_without_optional_kernels():
    assert device.distributed_backend() == "gloo"
    assert device.current_device() == torch.device("cpu")
    assert not device.has_transformer_engine()
    assert not device.has_apex_grad_accumulation()


def install_transformer_engine(monkeypatch, folder, code):
    """Put a package of this name on the path, whose module for torch consists of `code`."""
    package = folder / "transformer_engine"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "pytorch.py").write_text(code)
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setattr(device, "transformer_engine_error", "")
    for name in ("transformer_engine", "transformer_engine.pytorch"):
        monkeypatch.setitem(sys.modules, name, None)  # restored at the end of the test
        del sys.modules[name]


def test_a_cpu_does_not_see_transformer_engine(tmp_path, monkeypatch, caplog):
    """Megatron would take its optimizer, which needs a GPU."""
    install_transformer_engine(monkeypatch, tmp_path, "")
    monkeypatch.setattr(device, "has_cuda", lambda: False)
    device.hide_unusable_transformer_engine()
    assert importlib.util.find_spec("transformer_engine") is None
    assert not caplog.records and not device.transformer_engine_error


@pytest.mark.parametrize(
    "failure",
    [
        "raise OSError('no libcublas')",
        "raise RuntimeError('no driver')",
        "import torch; torch.gone",
    ],
    ids=["library", "driver", "attribute"],
)
def test_a_broken_transformer_engine_looks_missing(failure, tmp_path, monkeypatch, caplog):
    """A subprocess checks the same from the first import on."""
    install_transformer_engine(monkeypatch, tmp_path, failure)
    monkeypatch.setattr(device, "has_cuda", lambda: True)
    device.hide_unusable_transformer_engine()
    assert caplog.records[-1].levelname == "WARNING"
    assert device.transformer_engine_error and "Error: " in device.transformer_engine_error
    assert importlib.util.find_spec("transformer_engine") is None
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("transformer_engine")
    assert "transformer_engine.pytorch" not in sys.modules


@pytest.mark.slow(8)
def test_a_broken_transformer_engine_does_not_stop_megatron(tmp_path):
    package = tmp_path / "transformer_engine"
    package.mkdir()
    (package / "__init__.py").write_text("raise OSError('libcudart.so.13: no such file')")
    check = (
        "import torch\n"
        "torch.cuda.is_available = lambda: True\n"
        "from mega_agentrl.actor import device, policy\n"
        "from megatron.core.transformer.moe import experts\n"
        "assert not experts.HAVE_TE\n"
        "print(device.transformer_engine_error)\n"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    done = subprocess.run(
        [sys.executable, "-c", check], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.startswith("OSError: libcudart.so.13")


def test_the_dtype_is_the_chosen_one_and_by_default_that_of_the_device():
    assert device.resolve_train_dtype(Dtype.float32) == torch.float32
    assert device.resolve_train_dtype(Dtype.bfloat16) == torch.bfloat16
    default = torch.bfloat16 if torch.cuda.is_available() else torch.float32
    assert device.resolve_train_dtype(Dtype.auto) == default


def gather_and_scatter(rank, group):
    """Gather ROWS[r] rows of r + 1 from each rank r, then reduce-scatter 10 * r + target rank."""
    parts = [torch.zeros(rows, 2) for rows in ROWS]
    megatron_compat.all_gather_uneven(parts, torch.full((ROWS[rank], 2), rank + 1.0), group=group)
    mine = torch.full((ROWS[rank], 2), -1.0)
    shares = [torch.full((rows, 2), 10.0 * rank + to) for to, rows in enumerate(ROWS)]
    megatron_compat.reduce_scatter_uneven(mine, shares, group=group)
    assert all((share == 10.0 * rank + to).all() for to, share in enumerate(shares))
    return torch.cat(parts), mine


def test_uneven_gathers_and_scatters_follow_the_rank_order(rank_pool):
    gathered = torch.tensor([1.0, 1.0, 1.0, 3.0, 3.0])[:, None].expand(5, 2)
    for rank, (parts, mine) in enumerate(run_ranks(rank_pool, gather_and_scatter, 3)):
        assert torch.equal(parts, gathered)
        # 0 + 10 + 20, and its own number three times over.
        assert torch.equal(mine, torch.full((ROWS[rank], 2), 30.0 + 3 * rank))
