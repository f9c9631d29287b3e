"""Questions about the pictures of the vision task.

* `colour`: `What colour is the figure?`, seen in the picture as the model reads it
* `sign`: `What colour is the sign at the top left?`, which only `zoom` shows

Every question has a picture of its own. The figures of a split, kinds of shape, colour and place,
occur in no other split. There is no question for the place of the figure: in the warm start and 25
RL steps the tiny model does not learn to answer it.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import product

from mega_agentrl.data.generated.entity_splits import Split, split_items
from mega_agentrl.data.vision_qa.pictures import (
    FIGURE_COLOURS,
    SIGN_COLOURS,
    Figure,
    Picture,
    Place,
    Shape,
    make_picture,
)


class QuestionKind(StrEnum):
    """Subject of a question: the colour of the figure, or the colour of a sign."""

    colour = "colour"
    sign = "sign"

    @property
    def answers(self) -> tuple[str, ...]:
        """All possible answers, each of them equally probable."""
        match self:
            case QuestionKind.colour:
                return tuple(FIGURE_COLOURS)
            case QuestionKind.sign:
                return tuple(SIGN_COLOURS)


@dataclass(frozen=True, slots=True)
class Question:
    """A question about a picture, with its answer."""

    kind: QuestionKind
    picture: Picture
    text: str
    answer: str
    zoom_place: Place | None = None
    """Quarter of the picture that shows the answer, if the reduced picture does not."""

    @property
    def data_source(self) -> str:
        """The data source, by which results are grouped."""
        return f"vision_{self.kind}"


def split_figures(seed: int) -> dict[Split, tuple[Figure, ...]]:
    """Assign every kind of figure to exactly one split; each split has all places equally often."""
    rng = random.Random(f"vision figures {seed}")
    kinds = tuple(product(Shape, FIGURE_COLOURS))
    figures: dict[Split, tuple[Figure, ...]] = dict.fromkeys(Split, ())
    for place in Place:
        for split, chosen in split_items(kinds, rng).items():
            figures[split] += tuple(Figure(shape, colour, place) for shape, colour in chosen)
    return figures


def make_questions(
    split: Split,
    figures: Mapping[Split, Sequence[Figure]],
    *,
    num_questions: int,
    seed: int,
    blank_images: bool = False,
) -> list[Question]:
    """Return questions, about equally many of each kind, about blank pictures if asked for."""
    rng = random.Random(f"vision questions {split} {seed}")
    kinds = [list(QuestionKind)[index % len(QuestionKind)] for index in range(num_questions)]
    questions = [
        _make_question(kind, rng.choice(figures[split]), rng, is_blank=blank_images)
        for kind in kinds
    ]
    rng.shuffle(questions)
    return questions


def _make_question(
    kind: QuestionKind, figure: Figure, rng: random.Random, *, is_blank: bool
) -> Question:
    picture = make_picture(figure, rng, is_blank=is_blank)
    match kind:
        case QuestionKind.colour:
            return Question(kind, picture, "What colour is the figure?", figure.colour)
        case QuestionKind.sign:
            place, colour = rng.choice(list(picture.signs.items()))
            text = f"What colour is the sign at the {place}?"
            return Question(kind, picture, text, colour, zoom_place=place)
