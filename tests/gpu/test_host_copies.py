"""Micro-batches, their attention plans and their targets reach a GPU without a wait for it."""

from __future__ import annotations

import pytest
import torch

from mega_agentrl.actor.model.attention_plan import (
    make_block_sparse_plan,
    make_padded_plan,
    make_varlen_plan,
)
from mega_agentrl.config.sections.algo import AlgoConfig
from tests.rank_shards import pack_rows, policy_objective
from tests.tree_batches import make_tree_batch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"),
]


@pytest.fixture
def refused_waits():
    before = torch.cuda.get_sync_debug_mode()
    yield lambda: torch.cuda.set_sync_debug_mode("error")
    torch.cuda.set_sync_debug_mode(before)


def test_nothing_waits_for_the_device(refused_waits):
    batch = make_tree_batch()
    objective = policy_objective(AlgoConfig(entropy_coef=0.01), batch)
    rows, gpu = [0, 1, 2], torch.device("cuda", torch.cuda.current_device())
    logp_RT = batch.old_logp_BT[rows].to(gpu).requires_grad_()
    refused_waits()
    micro = pack_rows(batch, rows, batch.mask_BT, gpu)
    for make in (make_padded_plan, make_varlen_plan, make_block_sparse_plan):
        make(micro.start_G, micro.branches, 0, 1, gpu)
    loss, _ = objective(micro, logp_RT, logp_RT.detach().abs())
    loss.backward()
    torch.cuda.set_sync_debug_mode("default")
    assert micro.token_S.is_cuda and logp_RT.grad.abs().sum() > 0
