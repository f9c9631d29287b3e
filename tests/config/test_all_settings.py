"""Every setting refuses senseless values with its key, or declares them as valid.

The values are set and checked in this process as Hydra sets them: OmegaConf converts the type, and
the section checks its ranges.
"""

import copy
import math
import subprocess
import sys
from pathlib import Path

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from mega_agentrl.config.checks.inputs import check_data
from mega_agentrl.config.checks.parallel import read_model_config
from mega_agentrl.config.errors import ConfigError
from mega_agentrl.config.override_keys import check_overrides, known_keys
from mega_agentrl.config.ranges import MAX_ITEMS, MAX_TEXT_CHARS, FieldType, parse_type
from mega_agentrl.config.ranges import setting_types as types_of_section
from mega_agentrl.config.schema import TrainConfig
from mega_agentrl.errors import InputError
from tests.config.refusals import refused
from tools.make_config_reference import field_docs, sections

ROOT = Path(__file__).resolve().parents[2]
SECTIONS = dict(sections("", TrainConfig))
SETTINGS = {
    f"{path}.{name}".lstrip("."): kind
    for path, section in SECTIONS.items()
    for name, kind in types_of_section(section).items()
}
DOCS = {
    f"{path}.{name}".lstrip("."): doc
    for path, section in SECTIONS.items()
    for name, doc in field_docs(section).items()
}
MAY_BE_NEGATIVE = {
    "rollout.branch.alpha",
    "rollout.branch.beta",
    "rollout.branch.tau",
    "rollout.filter_range",
    "reward.rubric",
    "reward.correct_threshold",
}
NUMBERS = [math.nan, math.inf, -math.inf, -1, -1.0, -1e-300, 0, 0.0, 1e30, 10**30, -(10**30)]
TEXTS = ["", "\0", "a\0b", "\ud800", "x" * (MAX_TEXT_CHARS + 1), "x" * 100_000]
OTHERS = [None, True, [], {}, [[]], [[[1]]], {"a": {"b": {"c": 1}}}, ["x", "x"], b"x"]


def section_and_name(key):
    path, _, name = key.rpartition(".")
    return path, name


@pytest.fixture(scope="module")
def defaults():
    return OmegaConf.structured(TrainConfig)


def outcome(defaults, key, value):
    """Return the value that the section has afterwards, or the error."""
    path, name = section_and_name(key)
    node = OmegaConf.select(defaults, path) if path else defaults
    before = copy.deepcopy(node._get_node(name))
    try:
        OmegaConf.update(defaults, key, value)
        return getattr(OmegaConf.to_object(node), name)
    except (ConfigError, OmegaConfBaseException) as error:
        return error
    finally:
        node._content[name] = before  # a public assignment would convert and merge


def names_key(error, key):
    if isinstance(error, ConfigError):
        assert len(str(error)) < 5000
        return error.key == key or error.key.startswith((f"{key}.", f"{key},"))
    return (error.full_key or "").startswith(key) or key in str(error)


def numbers_in(value):
    if isinstance(value, dict):
        return [one for item in value.values() for one in numbers_in(item)]
    if isinstance(value, (list, tuple)):
        return [one for item in value for one in numbers_in(item)]
    return [value] if isinstance(value, (int, float)) and not isinstance(value, bool) else []


def is_declared(key, accepted):
    """Return whether the reference says that the value, as the section has it, is valid."""
    kind = SETTINGS[key]
    if accepted is None:
        return kind.is_optional
    if isinstance(accepted, str) and kind.kind is str:
        is_sensible = len(accepted) <= MAX_TEXT_CHARS and "\0" not in accepted
        if accepted == "":
            return "empty" in DOCS[key].lower() or "required" in DOCS[key].lower()
        return is_sensible
    if kind.has_numbers:
        numbers = numbers_in(accepted)
        is_bounded = all(math.isfinite(one) and abs(one) <= 2**32 for one in numbers)
        return is_bounded and (min(numbers, default=0) >= 0 or key in MAY_BE_NEGATIVE)
    return not isinstance(accepted, (list, dict)) or len(accepted) <= MAX_ITEMS


def shown(given, found):
    return f"{given!r:.100} gave {found!r:.300}"


def wrapped(kind, value):
    """Return the value, and for a list or mapping the list or mapping of it."""
    if kind.kind is list:
        return [value, [value], [0.5, value]]
    if kind.kind is dict:
        return [value, {"a": value}, {"a": {"b": value}}]
    return [value]


def test_all_settings_are_covered():
    assert set(SETTINGS) == set(known_keys()) == set(DOCS) & set(SETTINGS)


@pytest.mark.parametrize("key", SETTINGS)
def test_senseless_values_are_refused_with_their_key(defaults, key):
    kind = SETTINGS[key]
    for value in [*NUMBERS, *TEXTS, *OTHERS]:
        for given in wrapped(kind, value):
            found = outcome(defaults, key, given)
            if isinstance(found, Exception):
                assert names_key(found, key), shown(given, found)
            else:
                assert is_declared(key, found), shown(given, found)


@pytest.mark.parametrize("kind", [list, dict])
def test_long_lists_and_mappings_are_refused(kind):
    items = {str(number): "x" for number in range(MAX_ITEMS + 1)}
    value = items if kind is dict else list(items)
    keys = [key for key, declared in SETTINGS.items() if declared.kind is kind]
    assert keys
    for key in keys:
        assert refused(SETTINGS[key].check, value, key).key == key


def test_a_refused_value_leaves_the_defaults(defaults):
    assert defaults == OmegaConf.structured(TrainConfig)


@pytest.mark.parametrize("key", [key for key, kind in SETTINGS.items() if kind.has_numbers])
def test_every_number_has_two_finite_bounds(key):
    bounds = SETTINGS[key].bounds
    lower, upper = max(bounds.above, bounds.at_least), min(bounds.below, bounds.at_most)
    assert math.isfinite(lower) and math.isfinite(upper) and lower < upper
    assert (lower < 0) == (key in MAY_BE_NEGATIVE)
    assert str(bounds) in SETTINGS[key].expected


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("sft.lr", math.nan),
        ("sft.lr", -1.0),
        ("optim.weight_decay", math.nan),
        ("evaluate.temperature", -0.5),
        ("reward.correct_threshold", math.nan),
        ("data.max_prompt_tokens", 10**30),
        ("tool.python.timeout_s", 1e10),
        ("tool.python.timeout_s", math.inf),
        ("reward.rubric", {"default": {"arpo": math.nan}}),
        ("algo.loss_options", {"clip_high": math.inf}),
        ("rollout.branching_options", {"depth": [[[[[[[[[[1]]]]]]]]]]}),
        ("data.train", ["a\0.parquet"]),
        ("data.train", [f"{number}.parquet" for number in range(MAX_ITEMS + 1)]),
        ("run_dir", ""),
    ],
    ids=lambda value: value if isinstance(value, str) and value else "value",
)
def test_the_setting_is_named(defaults, key, value):
    found = outcome(defaults, key, value)
    assert isinstance(found, ConfigError) and names_key(found, key)


def test_required_settings_may_not_be_empty():
    assert refused(read_model_config, Path()).key == "model.path"
    config = TrainConfig()
    assert refused(check_data, config).key == "data.train"


@pytest.mark.parametrize(
    ("override", "key"),
    [
        (f"optim.lr={10**400}", "optim.lr"),
        (f"seed={10**30}", "seed"),
        (f"optim.betas=[0.9,{10**400}]", "optim.betas"),
        (f"+reward.rubric.default={{arpo:{10**400}}}", "reward.rubric.default"),
        ("optim.lr=" + "1" * 5000, "optim.lr"),
        ("data.train=" + "[" * 5000 + "]" * 5000, "data.train"),
    ],
    ids=["float", "integer", "list", "mapping", "digits", "nested"],
)
def test_numbers_and_lists_beyond_python_are_refused_on_the_command_line(override, key):
    with pytest.raises(InputError) as caught:
        check_overrides([override])
    error = caught.value
    if isinstance(error, ConfigError):
        assert error.key.startswith(key)
    else:
        assert (error.name, error.got) == ("override", override)
    assert len(str(error)) < 2000


def test_hydra_reads_the_values_that_are_tested():
    parser = OverridesParser.create()
    assert math.isnan(parser.parse_override("optim.lr=nan").value())
    assert parser.parse_override("optim.lr=-inf").value() == -math.inf
    assert parser.parse_override("optim.lr=1e10").value() == 1e10


def test_a_range_is_checked_without_torch():
    program = (
        "import sys; from mega_agentrl.config.schema import TrainConfig; "
        "from mega_agentrl.config.sections.policy import SftConfig\n"
        "try: SftConfig(lr=float('nan'))\n"
        "except ValueError as error: print(error.key, 'torch' in sys.modules)"
    )
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.stdout.split() == ["sft.lr", "False"], done.stderr


def test_the_type_of_a_list_declares_the_range_of_its_numbers():
    kind = SETTINGS["optim.betas"]
    assert isinstance(kind, FieldType) and kind.item is not None
    assert kind.item.bounds == kind.bounds
    assert not parse_type(list[str]).has_numbers
