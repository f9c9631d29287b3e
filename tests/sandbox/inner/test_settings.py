"""Settings on their way through the program's argument."""

import pytest

from mega_agentrl.sandbox.inner.settings import Settings


@pytest.mark.parametrize(
    "settings",
    [
        Settings(),
        Settings(
            preload=("math", "json"),
            filter="QUJD+/=",
            stateful=True,
            walled=False,
            memory_mib=1,
            cpu_s=1.5,
            num_processes=2,
            num_files=3,
            file_mib=4,
            tmpfs_mib=5,
            num_inodes=6,
            output_bytes=7,
        ),
    ],
)
def test_round_trip(settings):
    again = Settings.from_json(settings.to_json())
    assert again == settings
    assert isinstance(again.preload, tuple)


def test_one_line_of_text():
    assert "\n" not in Settings(preload=("a\nb",)).to_json()


def test_a_field_of_another_version_is_refused():
    with pytest.raises(TypeError, match="colour"):
        Settings.from_json('{"colour": "red"}')
