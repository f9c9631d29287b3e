"""The Triton attention of trees on a GPU, also at a real size."""

from __future__ import annotations

import pytest
import torch

from mega_agentrl.actor.model.attention_plan import Branch
from mega_agentrl.actor.model.packed_attention import _padded_attention, resolve_tree_attention
from mega_agentrl.config.enums import TreeAttention
from tests.tree_batches import tree_params

pytest.importorskip("triton")
# Imports the kernels.
from tests.actor.model.tree_attention_cases import CHECKS, TOLERANCE, assert_close, given, run

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"),
]
PROMPT, ANSWER, NUM_ANSWERS = 2048, 512, 16


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_the_kernels_equal_the_gather_form(check):
    check("cuda", torch.bfloat16)


@pytest.mark.parametrize("head_dim", [64, 128])
def test_a_group_of_answers_to_one_prompt_attends_as_separate_rows_do(head_dim):
    from mega_agentrl.actor.model.tree_attention import tree_attention

    place = torch.device("cuda"), torch.bfloat16, head_dim
    assert resolve_tree_attention(TreeAttention.auto, *place) is TreeAttention.triton
    num_tokens = PROMPT + NUM_ANSWERS * ANSWER
    branches = [Branch(start=0, stop=PROMPT, path=())]
    branches += [
        Branch(start=start, stop=start + ANSWER, path=((0, PROMPT),))
        for start in range(PROMPT, num_tokens, ANSWER)
    ]
    trees = tree_params((0, num_tokens), branches, device="cuda")
    parts = given(num_tokens, 8, 2, head_dim, torch.bfloat16)
    got = run(tree_attention, parts, trees, "cuda", torch.bfloat16)
    expected = run(_padded_attention, parts, trees, "cuda", torch.float32)
    for left, right in zip(got, expected, strict=True):
        assert_close(left, right, TOLERANCE[torch.bfloat16])
