"""Settings on their way through the program's argument."""

import pytest

from mega_agentrl.sandbox.guest.settings import GuestSettings


@pytest.mark.parametrize(
    "settings",
    [
        GuestSettings(),
        GuestSettings(
            preload_modules=("math", "json"),
            seccomp_filter="QUJD+/=",
            stateful=True,
            isolated=False,
            memory_mib=1,
            cpu_limit_s=1.5,
            num_processes=2,
            num_open_files=3,
            max_file_mib=4,
            tmpfs_mib=5,
            num_inodes=6,
            max_output_bytes=7,
        ),
    ],
)
def test_round_trip(settings):
    again = GuestSettings.from_json(settings.to_json())
    assert again == settings
    assert isinstance(again.preload_modules, tuple)


def test_one_line_of_text():
    assert "\n" not in GuestSettings(preload_modules=("a\nb",)).to_json()


def test_a_field_of_another_version_is_refused():
    with pytest.raises(TypeError, match="colour"):
        GuestSettings.from_json('{"colour": "red"}')
