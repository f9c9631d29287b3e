"""More tensor ranks than key/value heads; `test_gpt_model` checks the gradients."""

from __future__ import annotations

import pytest
import torch

from mega_agentrl.config.schema import ParallelConfig
from tests.actor.model.model_jobs import query_key_value
from tests.tiny_models import make_tiny_model


@pytest.mark.parametrize(("num_ranks", "num_groups"), [(2, 1), (4, 1), (4, 2), (2, 2)])
def test_a_rank_has_its_queries_and_the_key_and_value_of_their_group(
    rank_pool, tmp_path, num_ranks, num_groups
):
    folder = make_tiny_model("qwen3", tmp_path / "model", num_key_value_heads=num_groups)
    ((query, key, value),) = rank_pool.run(query_key_value, 1, str(folder), ParallelConfig())
    assert query.shape == (10, 1, 4, 16)
    layout = ParallelConfig(tensor=num_ranks)
    for rank, parts in enumerate(rank_pool.run(query_key_value, num_ranks, str(folder), layout)):
        heads = range(rank * 4 // num_ranks, (rank + 1) * 4 // num_ranks)
        groups = sorted({head * num_groups // 4 for head in heads})
        for part, whole, picked in zip(
            parts, (query, key, value), (list(heads), groups, groups), strict=True
        ):
            torch.testing.assert_close(part, whole[:, :, picked], rtol=1e-5, atol=1e-5)
