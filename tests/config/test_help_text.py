"""`--help`: every section, group and key is described; unknown names get the nearest."""

import pytest

from mega_agentrl.config.field_docs import first_sentence
from mega_agentrl.config.help_text import help_text
from mega_agentrl.config.override_keys import known_groups, known_keys, known_sections
from mega_agentrl.config.paths import find_config_dir
from mega_agentrl.errors import InputError

CONFIGS = find_config_dir()


def rows(text):
    """Return what is said of each name in the tables of a help text."""
    parts = [line.strip().split("  ", 1) for line in text.splitlines() if line.startswith("  ")]
    return {part[0]: part[1].strip() if len(part) > 1 else "" for part in parts}


def test_the_overview_has_a_line_for_each_section_group_and_experiment():
    text = help_text([], CONFIGS)
    said, groups = rows(text), known_groups(CONFIGS)
    for name in (*known_sections(), *groups.pop("experiment")):
        assert said[name].endswith("."), name
    lines = [line.split() for line in text.replace(",", "").splitlines()]
    for name, options in groups.items():
        assert [name, *options] in lines
    assert "seed=1" in said


@pytest.mark.parametrize("section", sorted(known_sections()))
def test_a_section_has_a_line_for_each_of_its_keys(section):
    said = {name.split("=")[0]: line for name, line in rows(help_text([section], CONFIGS)).items()}
    keys = [key for key in known_keys() if key.rpartition(".")[0] == section]
    for key in keys:
        assert said[key].endswith("."), key


@pytest.mark.parametrize("group", sorted(known_groups(CONFIGS)))
def test_a_group_has_a_line_for_each_option(group):
    said = rows(help_text([group], CONFIGS))
    for option in known_groups(CONFIGS)[group]:
        assert said[option].endswith("."), option


def test_options_in_a_folder_of_the_user_are_listed(tmp_path):
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "mine.yaml").write_text("# Mine. And more.\nseed: 3\n")
    (tmp_path / "experiment" / "yours.yaml").write_text("# Yours:\n# a run.\n#   make a=b \\\n")
    said = rows(help_text(["experiment"], CONFIGS, tmp_path))
    assert said["mine"] == "Mine." and said["yours"] == "Yours: a run." and "smoke" in said


def test_a_key_has_its_whole_meaning_type_range_and_choices():
    text = help_text(["optim.lr_schedule", "optim.lr"], CONFIGS)
    facts = ("optim.lr=1e-06 (the default)", "Type: float", "Range: at least 0, at most 10")
    for fact in (*facts, "Choices:", "constant  "):
        assert fact in text


@pytest.mark.parametrize(
    ("name", "nearest"),
    [("optm", "optim"), ("rollout.branh", "rollout.branch"), ("optim.lrr", "optim.lr")],
    ids=["section", "inner_section", "key"],
)
def test_an_unknown_name_is_refused_with_the_nearest(name, nearest):
    with pytest.raises(InputError) as caught:
        help_text([name], CONFIGS)
    assert (caught.value.name, caught.value.got) == ("--help", name)
    assert caught.value.cause.endswith(f" {nearest}")


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("One. Two.", "One."),
        ("Dr. GRPO (arXiv 1.2): no\nstd. More.", "Dr. GRPO (arXiv 1.2): no std."),
        ("A number; 0 is none.", "A number."),
        ("A number. 0 is none.", "A number."),
        ("Version 1.5 of it", "Version 1.5 of it."),
    ],
    ids=["two_sentences", "abbreviation", "semicolon", "digit", "number"],
)
def test_the_first_sentence_ends_at_a_stop_and_not_in_a_number_or_abbreviation(text, sentence):
    assert first_sentence(text) == sentence
