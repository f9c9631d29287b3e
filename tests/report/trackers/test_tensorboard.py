"""TensorBoard's files hold the numbers and the settings."""

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from mega_agentrl.report.trackers.tensorboard import TensorBoardTracker


def test_numbers_and_settings_can_be_read_back(tmp_path):
    tracker = TensorBoardTracker(tmp_path)
    tracker.log_config({"seed": 1}, "seed: 1\n")
    tracker.log("rl", 3, {"actor/loss": 0.5, "odd": float("nan")})
    tracker.close()
    tracker.close()
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    (scalar,) = events.Scalars("rl/actor/loss")
    assert (scalar.step, scalar.value) == (3, 0.5)
    text = events.Tensors("config/text_summary")[0].tensor_proto.string_val[0].decode()
    assert text == "    seed: 1"
