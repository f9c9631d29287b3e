"""The reward curve is a readable PNG, drawn without pyplot."""

import subprocess
import sys

import pytest
from matplotlib.image import imread

from mega_agentrl.errors import InputError
from mega_agentrl.report.reward_curve import EvalPoint, StepPoint, write_reward_curve

POINTS = [StepPoint(step=n, reward=n / 10 - 0.5, success=n / 20) for n in range(1, 11)]
HELD_OUT = [
    EvalPoint(step=0, reward=-0.5, success=0.0),
    EvalPoint(step=10, reward=0.5, success=0.5),
]


def test_the_file_is_a_picture_that_is_not_blank(tmp_path):
    path = tmp_path / "new" / "reward.png"
    write_reward_curve(path, POINTS, HELD_OUT, title="smoke")
    pixels = imread(path)
    assert pixels.shape[0] >= 400
    assert pixels.shape[1] >= 700
    assert pixels[..., :3].std() > 0.01


def test_the_held_out_points_are_drawn(tmp_path):
    write_reward_curve(tmp_path / "with.png", POINTS, HELD_OUT)
    write_reward_curve(tmp_path / "without.png", POINTS)
    assert (tmp_path / "with.png").read_bytes() != (tmp_path / "without.png").read_bytes()


@pytest.mark.parametrize(("points", "held_out"), [(POINTS[:1], []), ([], HELD_OUT[:1])])
def test_one_point_is_enough(tmp_path, points, held_out):
    write_reward_curve(tmp_path / "reward.png", points, held_out)
    assert (tmp_path / "reward.png").stat().st_size > 1000


def test_nothing_to_draw_is_an_error(tmp_path):
    with pytest.raises(InputError) as caught:
        write_reward_curve(tmp_path / "reward.png", [])
    assert caught.value.got == 0
    assert not list(tmp_path.iterdir())


def test_pyplot_is_not_loaded():
    program = (
        "import sys, mega_agentrl.report.reward_curve; sys.exit('matplotlib.pyplot' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], timeout=300, check=False).returncode == 0
