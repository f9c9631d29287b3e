"""Traits, options and arguments of code are read from its source, which is not executed."""

import math

import pytest

from mega_agentrl.config.algorithm_traits import (
    BRANCHING_RULES,
    ESTIMATORS,
    LOSSES,
    EstimatorTraits,
    LossTraits,
)
from mega_agentrl.config.ranges import Range
from tests.config.refusals import refused

HEAD = "raise RuntimeError('executed')\n\n\n"
ARGUMENTS = "logp_BT, old_logp_BT, advantage_BT, mask_BT"
DECORATOR = "@register_loss('own', metrics=('speed',))"


@pytest.fixture
def own(tmp_path):
    def own(text):
        file = tmp_path / "own.py"
        file.write_text(HEAD + text)
        return str(file)

    return own


def loss(head=DECORATOR, arguments=ARGUMENTS):
    return f"{head}\ndef loss({arguments}):\n    pass\n"


def test_options_of_a_function_are_its_keyword_arguments(own):
    found = ESTIMATORS.find(
        own(
            "def advantage(inputs, algo, *, tau: Annotated[float | None, Range(above=0)] = 0.5,\n"
            "              rounds: int = 3, name='x', other: list[int] = [1]):\n"
            '    """Do it.\n\n'
            "    Args:\n"
            "        inputs: The batch.\n"
            "        tau: A temperature,\n"
            "            in nats.\n"
            "        rounds: Rounds.\n\n"
            '    Returns:\n        tau: Not this.\n    """\n'
        )
    )
    assert (found.name, found.summary, found.traits) == ("advantage", "Do it.", {})
    options = found.options
    assert {name: one.default for name, one in options.items()} == {
        "tau": 0.5,
        "rounds": 3,
        "name": "x",
        "other": [1],
    }
    assert options["tau"].doc == "A temperature, in nats."
    assert options["tau"].expected == "float or null, above 0"
    assert [options["tau"].accepts(value) for value in (1, None, 0, True, "1", math.nan)] == [
        *(True, True),
        *(False, False, False, False),
    ]
    assert [options["rounds"].accepts(value) for value in (1, 1.0, None)] == [True, False, False]
    assert options["name"].accepts(None) and options["other"].accepts("anything")


def test_options_of_a_class_are_the_fields_of_a_dataclass(own):
    found = BRANCHING_RULES.find(
        own(
            "@dataclass(frozen=True)\nclass Base(BranchPolicy):\n    height: float = 2.0\n"
            '    """Nats above the root."""\n    kind: ClassVar[str] = "x"\n\n'
            "    def num_forks(self, point):\n        pass\n\n\n"
            "@dataclasses.dataclass(frozen=True)\nclass Branching(Base):\n    wide: bool = False\n"
        )
    )
    assert {name: one.default for name, one in found.options.items()} == {
        "height": 2.0,
        "wide": False,
    }
    assert found.options["height"].doc == "Nats above the root."


def test_without_dataclass_a_class_has_no_options(own):
    body = "    height: float = 2.0\n\n    def num_forks(self, point):\n        pass\n"
    found = BRANCHING_RULES.find(own(f"class Branching(Branching):\n{body}"))
    assert found.options == {}


def test_traits_are_the_arguments_of_the_decorator(own):
    file = own(
        "@advantages.register_advantage('own', needs_critic=True)\n"
        "def advantage(*inputs):\n    pass\n"
    )
    assert ESTIMATORS.find_traits(file, EstimatorTraits) == EstimatorTraits(needs_critic=True)
    assert LOSSES.find_traits("gspo", LossTraits).per_trajectory


def test_a_module_is_found_without_importing_its_package(tmp_path, monkeypatch):
    package = tmp_path / "package_of_mine"
    package.mkdir()
    (package / "__init__.py").write_text(HEAD)
    (package / "losses.py").write_text(HEAD + loss())
    monkeypatch.syspath_prepend(tmp_path)
    reference = "package_of_mine.losses:loss"
    assert LOSSES.find_traits(reference, LossTraits) == LossTraits(metrics=("speed",))
    for missing in ("package_of_mine.other:loss", "package_of_mine.losses.x:loss", "no_such:loss"):
        error = refused(LOSSES.find, missing)
        assert (error.key, error.got) == ("algo.loss", missing)
        assert "ModuleNotFoundError" in error.cause


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        ("def loss(:\n", "SyntaxError: "),
        ("loss = 3\n\n\ndef other():\n    pass\n", "not define a function loss; it defines other"),
        ("class loss:\n    pass\n", "not define a function loss; it defines loss"),
        (loss(head=""), "loss does not have the decorator register_loss"),
        (loss(arguments="logp_BT, old_logp_BT"), "arguments of loss are (logp_BT, old_logp_BT)"),
        (loss(arguments=f"{ARGUMENTS}, tau"), f"are ({ARGUMENTS}, tau)"),
        (loss(arguments=f"{ARGUMENTS}, *, tau"), "the option tau has no default"),
        (loss(arguments=f"{ARGUMENTS}, *, tau=TAU"), "the default of the option tau is TAU"),
        (
            loss(arguments=f"{ARGUMENTS}, *, tau: Annotated[float, Range(over=1)] = 2"),
            "Range(over=1): ",
        ),
        (loss(head="@register_loss('own', metrics=NAMES)"), "metrics of register_loss is NAMES"),
    ],
    ids=[
        *("syntax", "value", "class", "decorator", "too few arguments", "too many arguments"),
        *("no default", "default", "range", "trait"),
    ],
)
def test_a_loss_that_cannot_be_used_is_named_with_the_cause(own, text, cause):
    file = own(text)
    error = refused(LOSSES.find, file)
    assert (error.key, error.got, error.expected) == ("algo.loss", file, LOSSES.expected)
    assert cause in error.cause


@pytest.mark.parametrize(
    ("trait", "cause"),
    [("rows=True", "'rows'"), ("metrics=('speed', 'entropy')", "metrics has entropy, expected")],
    ids=["unknown", "value"],
)
def test_a_wrong_trait_is_named(own, trait, cause):
    file = own(loss(head=f"@register_loss('own', {trait})"))
    error = refused(LOSSES.find_traits, file, LossTraits)
    assert (error.key, error.got) == ("algo.loss", file)
    assert cause in error.cause


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        ("def Branching(point):\n    pass\n", "not define a class Branching"),
        ("class Branching(policy.BranchPolicy):\n    pass\n", "does not define num_forks"),
        (
            "class Branching(BranchPolicy):\n    def num_forks(self):\n        pass\n",
            "the arguments of num_forks are (self), expected (self, point)",
        ),
    ],
    ids=["function", "method", "arguments"],
)
def test_a_branching_rule_that_cannot_be_used_is_named_with_the_cause(own, text, cause):
    file = own(text)
    error = refused(BRANCHING_RULES.find, file)
    assert (error.key, error.got) == ("rollout.branching", file)
    assert cause in error.cause


def test_a_method_may_be_inherited_from_a_class_of_another_file(own):
    assert BRANCHING_RULES.find(own("class Branching(AepoBranching):\n    pass\n")).options == {}


def test_a_missing_file_is_named(tmp_path):
    file = str(tmp_path / "none.py")
    error = refused(ESTIMATORS.find, file)
    assert error.cause == f"FileNotFoundError: there is no file {file}"


def test_names_and_values_of_options_are_checked():
    LOSSES.check_options("clipped", {"clip_dual": None})
    BRANCHING_RULES.check_options("aepo", {})
    error = refused(BRANCHING_RULES.check_options, "aepo", {"tau": 0.5})
    assert (error.key, error.expected) == (
        "rollout.branching_options.tau",
        "an option of rollout.branching=aepo: it has none",
    )


def test_a_range_is_described_by_its_bounds():
    closed = Range(at_least=0, at_most=1)
    assert [value in closed for value in (0, 1, -0.1, 1.1)] == [True, True, False, False]
    assert str(closed) == "at least 0, at most 1"
    half_open = Range(above=0, below=10, unit="s")
    assert [value in half_open for value in (0, 1, 9.99, 10)] == [False, True, True, False]
    assert str(half_open) == "above 0, below 10 s" and str(Range()) == ""
    assert not any(value in Range() for value in (math.nan, math.inf, -math.inf))
    assert 10**5000 in Range()
