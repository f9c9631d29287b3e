"""A batch refuses shapes, types and values that do not belong together."""

import pytest
import torch

from mega_agentrl.errors import InputError
from mega_agentrl.types.batch import TrainBatch

ROWS, POSITIONS = 3, 4
LENGTHS = torch.tensor([4, 2, 3])
OPTIONAL = ("old_logp_BT", "entropy_BT", "ref_logp_BT", "advantage_BT")


def batch(**changes):
    grid = torch.arange(ROWS * POSITIONS).reshape(ROWS, POSITIONS)
    values = {
        "prompt_ids": tuple((row,) * (row + 1) for row in range(ROWS)),
        "response_BT": grid,
        "length_B": LENGTHS,
        "mask_BT": (grid % 2 == 0) & (torch.arange(POSITIONS) < LENGTHS[:, None]),
        "group_B": torch.tensor([0, 0, 1]),
        "reward_B": torch.tensor([0.0, 1.0, 2.0]),
        "tree_token_BT": grid,
        "rollout_logp_BT": -grid.float(),
        "rollout_entropy_BT": grid.float(),
        "version_BT": torch.zeros(ROWS, POSITIONS, dtype=torch.int64),
    }
    return TrainBatch(**(values | changes))


@pytest.mark.parametrize(
    "name", ["mask_BT", "tree_token_BT", "rollout_logp_BT", "version_BT", *OPTIONAL]
)
def test_a_grid_of_another_shape_is_refused(name):
    with pytest.raises(InputError) as caught:
        batch(**{name: torch.zeros(ROWS, POSITIONS + 1)})
    assert (caught.value.name, caught.value.got) == (name, (3, 5))


@pytest.mark.parametrize("name", ["length_B", "group_B", "reward_B"])
@pytest.mark.parametrize("shape", [(2,), (3, 1)], ids=["shorter", "matrix"])
def test_a_column_of_another_shape_is_refused(name, shape):
    with pytest.raises(InputError) as caught:
        batch(**{name: torch.zeros(shape)})
    assert (caught.value.name, caught.value.got) == (name, shape)


def test_a_batch_with_too_few_prompts_is_refused():
    with pytest.raises(InputError) as caught:
        batch(prompt_ids=((1,),))
    assert (caught.value.name, caught.value.got) == ("prompt_ids", (1,))


def test_responses_that_are_no_matrix_are_refused():
    with pytest.raises(InputError) as caught:
        batch(response_BT=torch.zeros(12))
    assert (caught.value.name, caught.value.got) == ("response_BT", (12,))


@pytest.mark.parametrize(
    ("changes", "name", "got"),
    [
        ({"reward_B": torch.zeros(3, dtype=torch.int64)}, "dtype of reward_B", torch.int64),
        ({"group_B": torch.zeros(3)}, "dtype of group_B", torch.float32),
        ({"mask_BT": torch.zeros(3, 4)}, "dtype of mask_BT", torch.float32),
        ({"length_B": torch.tensor([4, 4, 5])}, "length_B", [4, 4, 5]),
        ({"mask_BT": torch.ones(3, 4).bool()}, "mask_BT", "tokens to train on beyond length_B"),
        ({"trajectory_B": torch.tensor([0, 1, 1])}, "trajectory_B, row 2", 1),
    ],
    ids=[
        *("integer-reward", "float-group", "float-mask", "length-beyond-T"),
        *("mask-in-the-padding", "trajectory-in-two-groups"),
    ],
)
def test_validate_names_the_field(changes, name, got):
    with pytest.raises(InputError) as caught:
        batch(**changes).validate()
    assert (caught.value.name, caught.value.got) == (name, got)


def test_a_response_may_be_empty():
    empty = torch.tensor([4, 0, 3])
    mask_BT = torch.arange(POSITIONS) < empty[:, None]
    batch(length_B=empty, mask_BT=mask_BT).validate()
    with pytest.raises(InputError) as caught:
        batch(length_B=torch.tensor([4, -1, 3])).validate()
    assert (caught.value.name, caught.value.got) == ("length_B", [4, -1, 3])


def test_with_fields_copies_and_checks_again():
    whole = batch()
    filled = whole.with_fields(old_logp_BT=torch.zeros(ROWS, POSITIONS))
    assert whole.old_logp_BT is None
    assert filled.old_logp_BT is not None
    with pytest.raises(InputError) as caught:
        whole.with_fields(old_logp_BT=torch.zeros(1, 1))
    assert caught.value.name == "old_logp_BT"
