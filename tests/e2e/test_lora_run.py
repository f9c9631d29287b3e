"""A run that trains adapters: what engines serve, what is saved, and how a resumed run goes on."""

import json

import pytest
from safetensors.torch import load_file
from torch import Size

from mega_agentrl.config.enums import LoraTarget
from mega_agentrl.reshard.mapping.lora_layout import lora_shapes
from mega_agentrl.reshard.mapping.model_mapping import hf_shapes
from mega_agentrl.reshard.mapping.model_shape import ModelShape
from tests.e2e.conftest import finish, start
from tests.e2e.overrides import asset_overrides
from tests.train.metric_lines import metric_lines
from tools import export_hf


def train(assets, run_dir, num_steps):
    child = start(
        "experiment=smoke_ci",
        "model.lora.rank=4",
        "algo.kl_coef=0.01",
        "optim.lr=1e-2",
        f"total_steps={num_steps}",
        "evaluate.num_questions=4",
        *asset_overrides(assets, run_dir),
    )
    code, output = finish(child, 420)
    assert code == 0, output[-3000:]
    return metric_lines(run_dir, "rl")


@pytest.mark.slow(150)
def test_engines_serve_the_merged_weights_and_a_resumed_run_goes_on(assets, tmp_path):
    run_dir = tmp_path / "run"
    lines = train(assets, run_dir, 2)
    assert len(lines) == 2
    lines = train(assets, run_dir, 3)
    assert [line["step"] for line in lines] == [1, 2, 3]
    for line in lines:
        assert line["mismatch/logp_max_abs"] < 1e-4
        assert line["weight_sync/probe_gap"] < 1e-5
    # Since its start the engine, of one worker, gets the adapters alone.
    model = assets / "model"
    shapes = lora_shapes(hf_shapes(ModelShape.from_folder(model)), 4, list(LoraTarget))
    num_elements = sum(Size(shape).numel() for shape in shapes.values())
    assert {line["weight_sync/bytes_per_worker"] for line in lines} == {4 * num_elements}
    # The adapters alone are saved; merged, they are the weights that the run has written.
    checkpoint = max((run_dir / "checkpoints").iterdir())
    assert checkpoint.name == "step-000003"
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    assert manifest["lora"]["rank"] == 4
    size = sum(file.stat().st_size for file in checkpoint.glob("*.distcp"))
    assert size < (model / "model.safetensors").stat().st_size
    arguments = [str(checkpoint), "--model", str(model)]
    assert export_hf.main([*arguments, "--out", str(tmp_path / "merged")]) == 0
    merged, written, base = (
        load_file(folder / "model.safetensors")
        for folder in (tmp_path / "merged", run_dir / "model", model)
    )
    for name, value in written.items():
        assert float((merged[name] - value).abs().max()) < 1e-5
    changed = {name for name, value in base.items() if not value.equal(written[name])}
    assert changed
    assert all("_proj." in name for name in changed)
