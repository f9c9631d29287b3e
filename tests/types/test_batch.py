"""A batch refuses shapes, types and values that do not belong together."""

import pytest
import torch

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
    with pytest.raises(ValueError, match=rf"{name} has shape \(3, 5\), expected \(3, 4\)"):
        batch(**{name: torch.zeros(ROWS, POSITIONS + 1)})


@pytest.mark.parametrize("name", ["length_B", "group_B", "reward_B"])
@pytest.mark.parametrize("shape", [(2,), (3, 1)], ids=["shorter", "matrix"])
def test_a_column_of_another_shape_is_refused(name, shape):
    with pytest.raises(ValueError, match=f"{name} has shape"):
        batch(**{name: torch.zeros(shape)})


def test_prompts_are_counted():
    with pytest.raises(ValueError, match=r"prompt_ids has shape \(1,\), expected \(3,\)"):
        batch(prompt_ids=((1,),))


def test_responses_are_a_matrix():
    with pytest.raises(ValueError, match=r"response_BT .* shape \(12,\)"):
        batch(response_BT=torch.zeros(12))


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"reward_B": torch.zeros(3, dtype=torch.int64)}, "reward_B is torch.int64"),
        ({"group_B": torch.zeros(3)}, "group_B is torch.float32"),
        ({"mask_BT": torch.zeros(3, 4)}, "mask_BT is torch.float32"),
        ({"length_B": torch.tensor([4, 4, 5])}, r"length_B has \[4, 4, 5\]"),
        ({"mask_BT": torch.ones(3, 4).bool()}, "mask_BT is set beyond length_B"),
        ({"trajectory_B": torch.tensor([0, 1, 1])}, "trajectory_B has 1 in row 2 of group_B 1"),
    ],
    ids=[
        *("integer-reward", "float-group", "float-mask", "length-beyond-T"),
        *("mask-in-the-padding", "trajectory-in-two-groups"),
    ],
)
def test_validate_names_the_field(changes, expected):
    with pytest.raises(ValueError, match=expected):
        batch(**changes).validate()


def test_a_response_may_be_empty():
    empty = torch.tensor([4, 0, 3])
    mask_BT = torch.arange(POSITIONS) < empty[:, None]
    batch(length_B=empty, mask_BT=mask_BT).validate()
    with pytest.raises(ValueError, match=r"length_B has \[4, -1, 3\]"):
        batch(length_B=torch.tensor([4, -1, 3])).validate()


def test_with_fields_copies_and_checks_again():
    whole = batch()
    filled = whole.with_fields(old_logp_BT=torch.zeros(ROWS, POSITIONS))
    assert whole.old_logp_BT is None
    assert filled.old_logp_BT is not None
    with pytest.raises(ValueError, match="old_logp_BT"):
        whole.with_fields(old_logp_BT=torch.zeros(1, 1))
