from __future__ import annotations

import pytest
import torch
from transformers import Qwen3ForCausalLM

from mega_agentrl.actor.model import check_layout, vocab_shard
from mega_agentrl.actor.packing import pack_rows
from mega_agentrl.reshard.names import megatron_layout


def test_hidden_states_give_the_logits_of_transformers(one_model, checkpoints, batch):
    shape, _, model = one_model
    micro = pack_rows(batch, [0, 2, 5], batch.mask_BT, torch.device("cpu"))
    logits = model.run(micro).squeeze(1) @ model.output_weight()[: shape.vocab].t()
    reference = Qwen3ForCausalLM.from_pretrained(checkpoints[True], dtype=torch.float32)
    for start, stop in zip(micro.start_R, micro.start_R[1:], strict=False):
        expected = reference(micro.token_S[start:stop][None]).logits[0]
        torch.testing.assert_close(logits[start:stop], expected, rtol=1e-4, atol=1e-4)


def test_a_mapping_with_another_parameter_is_noticed(one_model):
    shape, _, model = one_model
    layout = megatron_layout(shape, tensor_rank=0, tensor_size=1, pipeline_rank=0, pipeline_size=1)
    check_layout(model, layout)
    with pytest.raises(AssertionError, match="final_layernorm"):
        check_layout(model, [s for s in layout if s.name != "decoder.final_layernorm.weight"])


def test_the_last_rows_of_a_shard_are_padding(one_model):
    shape, groups, _ = one_model
    shard = vocab_shard(shape, groups)
    assert (shard.start, shard.num_valid, shard.group) == (0, shape.vocab, None)
