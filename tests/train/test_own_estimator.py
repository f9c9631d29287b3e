"""A user's estimator: it is called, its result is checked, its traits and options hold."""

from pathlib import Path

import pytest
import torch
from torch.testing import assert_close

from mega_agentrl.config.sections.algo import AlgoConfig
from mega_agentrl.errors import InputError
from mega_agentrl.train.advantages import add_advantages
from mega_agentrl.train.estimators.registry import load_user_advantage
from mega_agentrl.types.batch import TrainBatch
from tests.config.refusals import refused
from tests.train.test_advantages import advantages, batch
from tests.train_batches import select_rows

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "my_algorithm.py"


@pytest.fixture
def own(tmp_path):
    def own(body):
        file = tmp_path / "mine.py"
        file.write_text(
            "import torch\n\n"
            "from mega_agentrl.train.estimators.registry import AdvantageResult\n\n\n"
            f"def advantage(inputs, algo):\n    batch = inputs.batch\n    return {body}\n"
        )
        return AlgoConfig(advantage=f"{file}:advantage")

    return own


@pytest.mark.parametrize(
    "body",
    ["AdvantageResult(batch.reward_B[:, None].expand(4, 2))", "AdvantageResult(inputs.reward_A)"],
    ids=["by token", "by trajectory"],
)
def test_the_result_of_an_own_estimator_is_the_advantage_of_trained_tokens(own, body):
    given = batch()
    got_BT, metrics = advantages(given, own(body))
    assert torch.equal(got_BT, given.reward_B[:, None] * given.mask_BT)
    assert metrics["advantage/abs_mean"] == pytest.approx(9 / 7)


def test_values_outside_the_mask_do_not_matter(own):
    algo = own("AdvantageResult(torch.where(batch.mask_BT, 1.0, torch.nan))")
    got_BT, _ = advantages(batch(), algo)
    assert torch.equal(got_BT, batch().mask_BT.float())


@pytest.mark.parametrize(
    ("body", "got"),
    [
        ("AdvantageResult(batch.reward_B[:3])", "(3,)"),
        ("AdvantageResult(3)", "int"),
        ("batch.reward_B", "Tensor"),
        ("AdvantageResult(batch.mask_BT / 0)", "7 numbers that are not finite"),
    ],
    ids=["shape", "number", "tensor", "infinite"],
)
def test_a_wrong_result_is_named(own, body, got):
    with pytest.raises(InputError) as caught:
        advantages(batch(), own(body))
    assert caught.value.name.startswith("result of algo.advantage=")
    assert caught.value.name.endswith("mine.py:advantage")
    assert str(caught.value.got).startswith(got)


def test_an_estimator_that_is_no_function_is_refused(tmp_path):
    file = tmp_path / "wrong.py"
    file.write_text("advantage = 3\n")
    error = refused(load_user_advantage, str(file))
    assert (error.key, error.got, error.cause) == ("algo.advantage", str(file), "got 3")


@pytest.fixture
def registered(tmp_path):
    def registered(traits, body="AdvantageResult(scale * inputs.reward_A)", **options):
        file = tmp_path / "registered.py"
        file.write_text(
            "from mega_agentrl.train.estimators import registry\n"
            "from mega_agentrl.train.estimators.registry import AdvantageResult\n\n\n"
            f"@registry.register_advantage('own', {traits})\n"
            f"def advantage(inputs, algo, *, scale: float = 3.0):\n    return {body}\n"
        )
        return AlgoConfig(advantage=str(file), advantage_options=options)

    return registered


@pytest.mark.parametrize(("options", "scale"), [({}, 3.0), ({"scale": 0.5}, 0.5)])
def test_options_and_traits_of_an_own_estimator(registered, small_batch, options, scale):
    """Rows 0 and 1 have rewards 1 and 0 and share their first token."""
    algo = registered("per_trajectory=True, averages_shared_tokens=True", **options)
    token_BT = small_batch.tree_token_BT.clone()
    token_BT[1, 0] = token_BT[0, 0]
    batch, _ = add_advantages(
        small_batch.with_fields(tree_token_BT=token_BT), algo, kl_coef=0.0, cot_marker_ids=None
    )
    expected = scale * torch.tensor([[0.5, 1, 1], [0.5, 0, 0], [3, 3, 0], [0, 5, 5]])
    assert_close(batch.advantage_BT, expected)


@pytest.mark.parametrize(
    ("traits", "body", "name", "got"),
    [
        (
            "per_trajectory=True",
            "AdvantageResult(inputs.batch.mask_BT.float())",
            "result of ",
            (4, 3),
        ),
        ("needs_critic=True", "AdvantageResult(inputs.reward_A)", "return_BT of ", "NoneType"),
    ],
    ids=["by token", "no targets"],
)
def test_an_own_estimator_returns_what_its_traits_say(
    registered, small_batch, traits, body, name, got
):
    given_batch = small_batch.with_fields(value_BT=torch.zeros(4, 3))
    with pytest.raises(InputError) as caught:
        add_advantages(given_batch, registered(traits, body), kl_coef=0.0, cot_marker_ids=None)
    assert caught.value.name.startswith(name)
    assert caught.value.got == got


@pytest.mark.parametrize(
    ("traits", "field"),
    [("needs_critic=True", "value_BT"), ("needs_greedy_baseline=True", "baseline_B")],
)
def test_inputs_that_an_own_estimator_needs_are_required(registered, small_batch, traits, field):
    with pytest.raises(InputError) as caught:
        add_advantages(small_batch, registered(traits), kl_coef=0.0, cot_marker_ids=None)
    assert (caught.value.name, caught.value.got) == (field, None)
    assert "registered.py" in caught.value.expected


def test_the_example_compares_rewards_with_their_median():
    """Rewards 1, 0 | 3, 1 are half a point and one from their medians; entropies .25."""
    given = batch(entropy_BT=torch.full((4, 2), 0.25))
    got_BT, _ = advantages(given, AlgoConfig(advantage=str(EXAMPLE)))
    assert_close(got_BT, torch.tensor([0.5, -0.5, 1.0, -1.0])[:, None] * 1.25 * given.mask_BT)


def test_the_example_counts_a_trajectory_of_several_rows_once():
    """Rewards 1 (three rows), 0 and 5 have the median 1."""
    given = select_rows(batch(entropy_BT=torch.zeros(4, 2)), [0, 0, 0, 1, 2]).with_fields(
        reward_B=torch.tensor([1.0, 1, 1, 0, 5]),
        group_B=torch.zeros(5, dtype=torch.int64),
        trajectory_B=torch.tensor([4, 4, 4, 2, 3]),
    )
    got_BT, _ = advantages(given, AlgoConfig(advantage=str(EXAMPLE)))
    assert got_BT[:, 0].tolist() == [0, 0, 0, -1, 4]


@pytest.fixture
def small_batch():
    grid = torch.zeros(4, 3)
    return TrainBatch(
        prompt_ids=((1,),) * 4,
        response_BT=grid.long(),
        length_B=torch.full((4,), 3),
        mask_BT=torch.tensor([[1, 1, 1], [1, 0, 1], [1, 1, 0], [0, 1, 1]], dtype=torch.bool),
        group_B=torch.tensor([0, 0, 1, 1]),
        reward_B=torch.tensor([1.0, 0.0, 3.0, 5.0]),
        tree_token_BT=torch.arange(12).view(4, 3),
        rollout_logp_BT=grid,
        rollout_entropy_BT=grid,
        version_BT=grid.long(),
    )
