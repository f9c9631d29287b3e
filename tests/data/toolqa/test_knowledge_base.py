"""The knowledge base answers every query of the task with the one right document."""

import json

from mega_agentrl.data.toolqa.entity_splits import (
    Split,
    SplitInventory,
    make_split_inventories,
    value_names,
)
from mega_agentrl.data.toolqa.knowledge_base import Fact, make_facts, write_corpus
from mega_agentrl.tool.search.local_index import SearchIndex, read_corpus

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
    index = SearchIndex(read_corpus(path))
    wrong = [
        (fact.query, hits[0].text if hits else None)
        for fact in facts.values()
        if not (hits := index.search(fact.query, 1)) or hits[0].text != fact.text
    ]
    assert not wrong, wrong[:5]


def test_the_corpus_has_one_document_a_line(tmp_path):
    path = tmp_path / "corpus.jsonl"
    write_corpus(make_facts(SMALL, seed=0), path)
    documents = [json.loads(line) for line in path.read_text().splitlines()]
    assert len({document["id"] for document in documents}) == 16
    assert all(set(document) == {"id", "title", "text"} for document in documents)
