"""Questions: splits share no figure, answers are balanced, and only some need the tool."""

from __future__ import annotations

from collections import Counter

import pytest

from mega_agentrl.data.generated.entity_splits import Split
from mega_agentrl.data.vision_qa.pictures import Place
from mega_agentrl.data.vision_qa.questions import QuestionKind, make_questions, split_figures

FIGURES = split_figures(0)


def questions(split=Split.train, **changes):
    return make_questions(split, FIGURES, num_questions=900, seed=0, **changes)


def test_every_figure_belongs_to_exactly_one_split():
    assert sum(map(len, FIGURES.values())) == len(set().union(*FIGURES.values())) == 3 * 6 * 4
    for split in Split:
        assert {item.picture.figure for item in questions(split)} <= set(FIGURES[split])


@pytest.mark.parametrize("split", Split, ids=str)
def test_held_out_figures_have_every_colour_and_place(split):
    for seed in range(4):
        figures = split_figures(seed)[split]
        assert len({figure.colour for figure in figures}) >= 4
        assert {figure.place for figure in figures} == set(Place)


def test_kinds_are_equally_many_and_no_answer_is_a_good_guess():
    asked = questions()
    assert Counter(item.kind for item in asked) == dict.fromkeys(QuestionKind, 450)
    for kind in QuestionKind:
        counts = Counter(item.answer for item in asked if item.kind is kind)
        assert set(counts) == set(kind.answers)
        assert max(counts.values()) < 1.6 * 450 / len(kind.answers)


def test_answers_are_those_of_the_picture():
    for item in questions():
        figure = item.picture.figure
        match item.kind:
            case QuestionKind.colour:
                assert (item.answer, item.zoom_place) == (figure.colour, None)
            case QuestionKind.sign:
                assert item.text == f"What colour is the sign at the {item.zoom_place}?"
                assert item.answer == item.picture.signs[item.zoom_place]


def test_blank_pictures_have_the_same_questions_and_answers():
    plain, blank = questions(), questions(blank_images=True)
    assert [(item.text, item.answer) for item in plain] == [
        (item.text, item.answer) for item in blank
    ]
    assert len({item.picture.draw() for item in blank[:50]}) == 1
