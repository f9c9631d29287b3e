"""A run of the task with pictures: engine and policy see the same, and the page shows it."""

import json

import pytest
import torch
import transformers

from tests.e2e.conftest import finish_training, start
from tests.e2e.overrides import make_task, task_overrides

SIZES = ("--num-train=60", "--num-dev=20", "--num-validation=20", "--num-demonstrations=400")


def write_qwen3_vl(folder):
    """Replace the weights of the task's model by a random Qwen3-VL with its sizes."""
    old = transformers.AutoConfig.from_pretrained(folder)
    text = old.text_config.to_dict()
    kept = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers",
            "num_attention_heads", "num_key_value_heads", "max_position_embeddings")  # fmt: skip
    width = text["hidden_size"] // text["num_attention_heads"]
    rope = text["rope_parameters"] | {"mrope_interleaved": True}
    config = transformers.Qwen3VLConfig(
        text_config={key: text[key] for key in kept} | {"head_dim": width, "rope_parameters": rope},
        vision_config={
            "depth": 2, "hidden_size": 64, "num_heads": 2, "intermediate_size": 128,
            "patch_size": 14, "temporal_patch_size": 2, "spatial_merge_size": 2,
            "out_hidden_size": text["hidden_size"], "num_position_embeddings": 16,
            "deepstack_visual_indexes": [0],
        },
        tie_word_embeddings=True,
        **{key: getattr(old, key) for key in ("image_token_id", "video_token_id")},
        **{key: getattr(old, key) for key in ("vision_start_token_id", "vision_end_token_id")},
    )  # fmt: skip
    torch.manual_seed(0)
    transformers.Qwen3VLForConditionalGeneration(config).float().save_pretrained(folder)


@pytest.mark.slow(120)
@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
def test_an_agent_that_zooms_is_trained_on_what_the_engine_saw(family, tmp_path):
    data, run_dir = tmp_path / "vision", tmp_path / "run"
    make_task("vision", data, *SIZES)
    if family == "qwen3_vl":
        write_qwen3_vl(data / "model")
    child = start(
        "experiment=smoke_vision",
        "total_steps=2",
        "sft.max_steps=100",
        "data.prompts_per_step=8",
        "evaluate.num_questions=20",
        "report.save_trees_every_steps=1",
        *task_overrides(data, run_dir),
    )
    lines = finish_training(child, run_dir, 2)
    for line in lines:
        assert line["mismatch/logp_mean_abs"] < 1e-5
    assert sum(line["rollout/tool/zoom/num_ok"] for line in lines) > 0
    images = {path.stem for path in (run_dir / "rollouts" / "images").iterdir()}
    trees = [
        json.loads(line)
        for path in (run_dir / "rollouts").glob("step_*.jsonl")
        for line in path.read_text().splitlines()
    ]
    shown = {
        placed["image"]["image_id"]
        for tree in trees
        for place in (tree["prompt"], *tree["leaves"])
        for placed in place["images"]
    }
    assert len(shown) > len(trees), "pictures, and quarters of some of them"
    assert shown <= images
    assert '"src":"data:image/png;base64,' in (run_dir / "report.html").read_text()
    assert "[image 56 x 56]Region [" in (run_dir / "rollouts.txt").read_text()
