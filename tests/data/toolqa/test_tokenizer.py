"""Tags are single tokens that survive decoding, digits single, names two tokens anywhere."""

import pytest

from mega_agentrl.data.generated.entity_splits import (
    Split,
    entity_names,
    make_split_inventories,
    value_names,
)
from mega_agentrl.data.generated.tokenizer import train_tokenizer
from mega_agentrl.data.toolqa.demonstrations import (
    BOXED_PREFIX,
    TAGS,
    VOCABULARY,
    make_demonstrations,
)
from mega_agentrl.data.toolqa.questions import make_facts, make_questions


def dialogues():
    inventories = make_split_inventories(0)
    facts = make_facts(inventories, 0)
    questions = make_questions(
        Split.train, inventories[Split.train], facts, num_questions=300, seed=0
    )
    return make_demonstrations(questions, num_demonstrations=300, seed=0)


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(dialogues(), VOCABULARY, vocab_size=448)


def pieces(tokenizer, text: str) -> list[str]:
    return [tokenizer.decode([i]) for i in tokenizer.encode(text, add_special_tokens=False)]


def test_the_vocabulary_keeps_its_bound(tokenizer):
    assert 300 < len(tokenizer) <= 448


def test_tags_are_single_ordinary_tokens(tokenizer):
    for tag in (*TAGS, BOXED_PREFIX):
        ids = tokenizer.encode(tag, add_special_tokens=False)
        assert len(ids) == 1
        assert tokenizer.decode(ids, skip_special_tokens=True) == tag


def test_digits_are_single(tokenizer):
    assert pieces(tokenizer, "47*83") == ["4", "7", "*", "8", "3"]


def test_names_have_the_same_two_tokens_wherever_the_task_writes_them(tokenizer):
    for name in entity_names():
        assert pieces(tokenizer, f"of {name}?")[-3:] == [f" {name[:2]}", name[2:], "?"]
    for name in value_names():
        head, tail = pieces(tokenizer, BOXED_PREFIX + name)[1:]
        assert (head, tail) == (name[:2], name[2:])
        assert [head, tail, '"'] == pieces(tokenizer, f'is "{name}"')[-3:]


@pytest.mark.parametrize("text", ["  two  spaces ", "é 漢 \t\n", "x = [1, 2]; print(x)", "' , ."])
def test_any_text_round_trips(tokenizer, text):
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.decode(ids, skip_special_tokens=True) == text


def test_the_chat_template_renders_roles_and_tools_only_when_given(tokenizer):
    messages = [{"role": "user", "content": "Hi"}]
    plain = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert plain == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    with_tools = tokenizer.apply_chat_template(
        messages, tools=[{"name": "python"}], tokenize=False, add_generation_prompt=True
    )
    start = '<|im_start|>system\nTools:\n{"name": "python"}<|im_end|>\n'
    assert with_tools == start + plain
