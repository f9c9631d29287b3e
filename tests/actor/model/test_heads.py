"""Output heads on hand-made hidden states, without a model."""

from __future__ import annotations

import torch

from mega_agentrl.actor.model.heads import LogProbHead, ScalarHead
from mega_agentrl.actor.training.packing import pack_rows
from mega_agentrl.actor.vocab.vocab_parallel import VocabShard

CPU = torch.device("cpu")
VOCAB, HIDDEN = 61, 8


class OutputLayer:
    """The part of a model that a head uses."""

    def __init__(self, weight):
        self.weight = weight.requires_grad_()

    def output_weight(self):
        return self.weight


def packed(batch):
    """Return rows 1 (prompt 1, response 12) and 2 (prompt 8, response 1), and hidden states.

    The first element of a hidden state is its index in the packed tokens.
    """
    select_BT = torch.arange(12)[None, :] < batch.length_B[:, None]
    micro = pack_rows(batch, [1, 2], select_BT, CPU)
    hidden_S1D = torch.randn(20, 1, HIDDEN, generator=torch.Generator().manual_seed(2))
    hidden_S1D[:, 0, 0] = torch.arange(20.0)
    return micro, hidden_S1D.requires_grad_()


def test_a_value_is_read_where_its_token_is_predicted(batch):
    micro, hidden_S1D = packed(batch)
    first_1D = torch.eye(HIDDEN)[:1].clone()
    (value_RT,) = ScalarHead(num_positions=12)(OutputLayer(first_1D), micro, hidden_S1D)
    # Row 1: its one prompt token at place 0 predicts response token 0. Row 2 starts at place
    # 12 and the last of its 8 prompt tokens predicts its one response token.
    assert value_RT.tolist() == [list(range(12)), [19.0] + 11 * [0.0]]


def test_the_value_has_the_gradients_of_a_dot_product(batch):
    micro, hidden_S1D = packed(batch)
    model = OutputLayer(torch.randn(1, HIDDEN, generator=torch.Generator().manual_seed(4)))
    weight_RT = torch.randn(2, 12, generator=torch.Generator().manual_seed(5))
    (value_RT,) = ScalarHead(num_positions=12)(model, micro, hidden_S1D)
    (value_RT * weight_RT).sum().backward()
    weight_N = weight_RT[micro.row_N, micro.column_N]
    expected_SD = torch.zeros(20, HIDDEN)
    expected_SD[micro.predict_N] = weight_N[:, None] * model.weight.detach()
    torch.testing.assert_close(hidden_S1D.grad[:, 0], expected_SD)
    read_ND = hidden_S1D.detach()[micro.predict_N, 0]
    torch.testing.assert_close(model.weight.grad[0], weight_N @ read_ND)


def test_half_precision_states_give_float32_values_of_the_same_numbers(batch):
    micro, hidden_S1D = packed(batch)
    weight_1D = torch.randn(1, HIDDEN, generator=torch.Generator().manual_seed(4)).bfloat16()
    half_S1D = hidden_S1D.detach().bfloat16()
    (value_RT,) = ScalarHead(num_positions=12)(OutputLayer(weight_1D), micro, half_S1D)
    assert value_RT.dtype == torch.float32
    exact_S = half_S1D[:, 0].double() @ weight_1D[0].double()
    torch.testing.assert_close(value_RT[0].double(), exact_S[:12], atol=1e-5, rtol=1e-6)


def test_no_rows_give_no_values_but_a_graph(batch):
    micro = pack_rows(batch, [], batch.mask_BT, CPU)
    model = OutputLayer(torch.ones(1, HIDDEN))
    (value_RT,) = ScalarHead(num_positions=12)(model, micro, torch.ones(1, 1, HIDDEN))
    assert value_RT.shape == (0, 12)
    value_RT.sum().backward()
    assert model.weight.grad.abs().sum() == 0


def test_log_probs_and_entropies_return_to_their_rows(batch):
    micro, hidden_S1D = packed(batch)
    weight_VD = 0.1 * torch.randn(64, HIDDEN, generator=torch.Generator().manual_seed(4))
    shard = VocabShard(first_token_id=0, num_valid_rows=VOCAB, group=None)
    head = LogProbHead(temperature=0.7, vocab_shard=shard, num_positions=12)
    logp_RT, entropy_RT = head(OutputLayer(weight_VD), micro, hidden_S1D)
    logits_SV = hidden_S1D.detach()[:, 0] @ weight_VD[:VOCAB].detach().T / 0.7
    every_SV = logits_SV.log_softmax(-1)
    target_T = batch.response_BT[1]
    torch.testing.assert_close(logp_RT[0].detach(), every_SV[torch.arange(12), target_T])
    expected_T = -(every_SV.exp() * every_SV).sum(-1)[:12]
    torch.testing.assert_close(entropy_RT[0].detach(), expected_T, atol=1e-5, rtol=1e-5)
    assert logp_RT[1, 1:].abs().sum() == 0
