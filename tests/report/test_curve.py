"""The reward curve is a readable PNG, drawn without pyplot."""

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.image import imread

from mega_agentrl.report.curve import CurvePoint, HeldOutPoint, running_mean, write_curve

POINTS = [CurvePoint(step=n, reward=n / 10 - 0.5, success=n / 20) for n in range(1, 11)]
HELD_OUT = [
    HeldOutPoint(step=0, reward=-0.5, success=0.0),
    HeldOutPoint(step=10, reward=0.5, success=0.5),
]


def test_running_mean_by_hand():
    assert running_mean([1.0, 3.0, 5.0, 7.0], 2) == [1.0, 2.0, 4.0, 6.0]
    assert running_mean([1.0, 3.0], 10) == [1.0, 2.0]
    assert running_mean([], 3) == []


@given(st.lists(st.floats(-10, 10), max_size=40), st.integers(1, 12))
def test_running_mean_stays_between_the_values_it_averages(values, window):
    for index, mean in enumerate(running_mean(values, window)):
        seen = values[max(0, index - window + 1) : index + 1]
        assert min(seen) - 1e-9 <= mean <= max(seen) + 1e-9


def test_running_mean_needs_a_window():
    with pytest.raises(ValueError, match="window=0"):
        running_mean([1.0], 0)


def test_the_file_is_a_picture_with_something_on_it(tmp_path):
    path = tmp_path / "new" / "reward.png"
    write_curve(path, POINTS, HELD_OUT, title="smoke")
    pixels = imread(path)
    assert pixels.shape[0] >= 400
    assert pixels.shape[1] >= 700
    assert pixels[..., :3].std() > 0.01


def test_the_held_out_points_are_drawn(tmp_path):
    write_curve(tmp_path / "with.png", POINTS, HELD_OUT)
    write_curve(tmp_path / "without.png", POINTS)
    assert (tmp_path / "with.png").read_bytes() != (tmp_path / "without.png").read_bytes()


@pytest.mark.parametrize(("points", "held_out"), [(POINTS[:1], []), ([], HELD_OUT[:1])])
def test_one_point_is_enough(tmp_path, points, held_out):
    write_curve(tmp_path / "reward.png", points, held_out)
    assert (tmp_path / "reward.png").stat().st_size > 1000


def test_nothing_to_draw_is_an_error(tmp_path):
    with pytest.raises(ValueError, match="nothing to draw"):
        write_curve(tmp_path / "reward.png", [])
    assert not list(tmp_path.iterdir())


def test_pyplot_is_not_loaded():
    program = "import sys, mega_agentrl.report.curve; sys.exit('matplotlib.pyplot' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], timeout=60, check=False).returncode == 0
