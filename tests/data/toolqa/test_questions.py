"""Questions are right, unique, and use nothing of another split."""

from __future__ import annotations

import re
from collections import Counter
from functools import cache
from itertools import combinations

import pytest

from mega_agentrl.data.generated.entity_splits import (
    Split,
    SplitInventory,
    make_split_inventories,
    value_names,
)
from mega_agentrl.data.toolqa.questions import (
    Fact,
    QuestionKind,
    make_facts,
    make_questions,
    write_corpus,
)
from mega_agentrl.errors import InputError
from mega_agentrl.tool.search.local_index import SearchIndex, iter_corpus


@cache
def made(num_questions: int = 300) -> dict[Split, list]:
    inventories = make_split_inventories(0)
    facts = make_facts(inventories, 0)
    return {
        split: make_questions(split, inventories[split], facts, num_questions=num_questions, seed=0)
        for split in Split
    }


def test_kinds_are_equally_many_and_no_question_occurs_twice():
    splits = made()
    for questions in splits.values():
        assert Counter(question.kind for question in questions) == dict.fromkeys(QuestionKind, 100)
    texts = [question.text for questions in splits.values() for question in questions]
    assert len(set(texts)) == len(texts)


def test_splits_share_no_number_and_no_entity():
    names = [
        {name for one in questions for name in re.findall(r"\d+|of [A-Z][a-z]+", one.text)}
        for questions in made().values()
    ]
    assert not any(one & other for one, other in combinations(names, 2))


def test_answers_follow_from_the_calls():
    for question in made()[Split.train]:
        *_, last = question.calls
        if question.kind is QuestionKind.search:
            assert last.result.endswith(f' is "{question.answer}".')
        else:
            left, right = map(int, last.text.split("*"))
            assert question.answer == last.result == str(left * right)
        if question.kind is QuestionKind.both:
            assert question.calls[0].result.endswith(f" is {left}.")
            assert question.text.endswith(f" times {right}?")


def test_each_kind_of_question_reads_as_its_worked_example():
    inventory = SplitInventory(("Bako",), (50,))
    facts = make_facts(dict.fromkeys(Split, inventory), 0)
    questions = make_questions(Split.dev, inventory, facts, num_questions=3, seed=0)
    by_kind = {question.kind: question for question in questions}
    assert by_kind[QuestionKind.python].text == "What is 50*50?"
    assert by_kind[QuestionKind.python].answer == "2500"
    assert by_kind[QuestionKind.search].data_source == "toolqa_search"
    assert by_kind[QuestionKind.search].text in (
        "What is the home of Bako?",
        "What is the owner of Bako?",
    )
    assert by_kind[QuestionKind.both].text.endswith("of Bako times 50?")
    assert [call.tool for call in by_kind[QuestionKind.both].calls] == ["search", "python"]
    assert by_kind[QuestionKind.both].answer == "2500"


def test_too_many_questions_are_refused():
    inventory = SplitInventory(("Bako",), (50,))
    facts = make_facts(dict.fromkeys(Split, inventory), 0)
    with pytest.raises(InputError) as caught:
        make_questions(Split.dev, inventory, facts, num_questions=9, seed=0)
    assert (caught.value.name, caught.value.got) == ("dev questions, num_questions", 9)


SMALL = {
    Split.train: SplitInventory(("Bako", "Dumi"), (32, 33)),
    Split.dev: SplitInventory(("Gora",), (40,)),
    Split.validation: SplitInventory(("Zipa",), (50,)),
}


def test_a_fact_reads_as_a_sentence_and_quotes_names_only():
    assert Fact("Bako", "price", "52").text == "The price of Bako is 52."
    assert Fact("Bako", "home", "Tirok").text == 'The home of Bako is "Tirok".'
    assert Fact("Bako", "home", "Tirok").query == "home of Bako"


def test_facts_use_the_numbers_of_the_entitys_split():
    facts = make_facts(SMALL, seed=0)
    assert len(facts) == 4 * 4
    assert facts["Gora", "price"].value == "40"
    assert facts["Zipa", "weight"].value == "50"
    assert facts["Bako", "weight"].value in ("32", "33")
    assert facts["Bako", "owner"].value in value_names()
    assert facts == make_facts(SMALL, seed=0)


def test_search_finds_the_one_document_of_every_query(tmp_path):
    facts = make_facts(make_split_inventories(0), seed=0)
    path = tmp_path / "corpus.jsonl"
    write_corpus(facts, path)
    index = SearchIndex(iter_corpus(path))
    for fact in facts.values():
        (hit,) = index.search(fact.query, 1)
        assert hit.text == fact.text
