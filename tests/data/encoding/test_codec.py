"""The codec adds nothing, hides nothing, and appends turns without touching earlier ones."""

import json
import shutil

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from mega_agentrl.config.errors import ConfigError
from mega_agentrl.data.encoding.codec import HFCodec, _encode_text
from mega_agentrl.data.generated.tokenizer import train_tokenizer
from mega_agentrl.data.toolqa.demonstrations import TAGS, VOCABULARY
from tests.config.refusals import refused_input

DIALOGUES = [[{"role": "user", "content": "What is 1*2 of the home ?"}]] * 3
USER = {"role": "user", "content": "Hi <|im_end|>"}
KEEP_ALL = "{%- for m in messages %}{{ m.content + eos_token + '\\n' }}{%- endfor %}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("tokenizer")
    train_tokenizer(DIALOGUES, VOCABULARY, vocab_size=400).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def codec(folder):
    return HFCodec(folder)


def with_template(folder, template: str) -> HFCodec:
    codec = HFCodec(folder)
    codec._tokenizer.chat_template = template
    return codec


@pytest.mark.parametrize(
    "model_type", ["llama", "qwen2", "qwen3", "qwen3_moe", "qwen2_5_vl", "qwen3_vl"]
)
@pytest.mark.parametrize(
    "name", ["TokenizersBackend", "PreTrainedTokenizerFast", "Qwen2TokenizerFast"]
)
def test_the_tokenizer_is_the_one_that_transformers_chooses(folder, tmp_path, name, model_type):
    copy = tmp_path / "model"
    shutil.copytree(folder, copy)
    settings = json.loads((copy / "tokenizer_config.json").read_text())
    (copy / "tokenizer_config.json").write_text(json.dumps(settings | {"tokenizer_class": name}))
    (copy / "config.json").write_text(json.dumps({"model_type": model_type}))
    loaded, chosen = HFCodec(copy)._tokenizer, AutoTokenizer.from_pretrained(copy)
    assert type(loaded) is type(chosen)
    assert loaded.backend_tokenizer.to_str() == chosen.backend_tokenizer.to_str()
    assert loaded.special_tokens_map == chosen.special_tokens_map
    assert loaded.chat_template == chosen.chat_template


@given(st.text())
def test_any_text_round_trips_without_a_special_token(codec, text):
    ids = codec.encode(text + "<|im_end|>")
    assert codec.decode(ids) == text + "<|im_end|>"
    assert codec.eos_id not in ids


@given(st.lists(st.text(max_size=8) | st.sampled_from(["<|im_end|>", "<think>", " "])))
def test_ids_are_those_of_the_tokenizers_own_encode(codec, pieces):
    text, tokenizer = "".join(pieces), codec._tokenizer
    for is_plain in (False, True):
        expected = tokenizer.encode(text, add_special_tokens=False, split_special_tokens=is_plain)
        assert _encode_text(tokenizer, text, is_plain=is_plain) == expected


def test_a_folder_that_truncates_and_pads_encodes_whole_texts(folder, tmp_path):
    shutil.copytree(folder, tmp_path / "model")
    file = tmp_path / "model/tokenizer.json"
    settings = json.loads(file.read_text())
    settings["truncation"] = {
        "direction": "Right",
        "max_length": 2,
        "strategy": "LongestFirst",
        "stride": 0,
    }
    file.write_text(json.dumps(settings))
    codec = HFCodec(tmp_path / "model")
    assert codec._tokenizer.backend_tokenizer.truncation is not None
    assert codec.encode("What is 1*2 of the home ?") == HFCodec(folder).encode(
        "What is 1*2 of the home ?"
    )


def test_control_tokens_are_the_special_ones_and_the_tags(codec):
    special = ("<|endoftext|>", "<|im_end|>", "<|im_start|>")
    assert set(codec.control_tokens) == {*special, *TAGS}


def test_added_tokens_have_an_id_of_their_own_and_other_text_has_none(codec):
    assert codec.added_token_id("<think>") == codec.encode("<think>")[0]
    assert codec.added_token_id("<|im_end|>") == codec.eos_id
    assert codec.added_token_id("think") is None


def test_half_a_surrogate_pair_becomes_a_question_mark(codec):
    assert codec.decode(codec.encode("a\ud800b")) == "a?b"


def test_decode_leaves_special_tokens_out_and_keeps_tags(codec):
    text = " ".join(TAGS) + " a , b 's"
    assert codec.decode([*codec.encode(text), codec.eos_id]) == text


def test_special_tokens_do_not_survive_decoding_and_tags_do(codec):
    assert codec.survives_decoding("<python>") and codec.survives_decoding("<unknown>")
    assert not codec.survives_decoding("<|im_end|>")


def test_ids_fit_the_vocabulary(codec):
    assert max(codec.encode("".join(TAGS))) < codec.vocab_size


def test_a_template_that_drops_earlier_turns_cannot_append(folder):
    codec = with_template(folder, "{{ messages[-1].content + eos_token }}")
    error = refused_input(codec.encode_next_turn, [USER])
    assert "role user" in error.name and error.got.endswith("<|im_end|>")
    plain = with_template(folder, KEEP_ALL).encode_next_turn([USER])
    # What a template puts in front of the whole conversation is no part of a turn.
    counting = with_template(folder, "{{ messages|length }}" + KEEP_ALL)
    assert counting.encode_next_turn([USER]) == plain


def test_a_tokenizer_without_a_template_is_refused(folder):
    error = refused_input(with_template(folder, None).apply_chat_template, [USER])
    assert error.got is None and "chat template" in error.name


def test_a_folder_without_a_tokenizer_is_refused(tmp_path):
    with pytest.raises(ConfigError) as caught:
        HFCodec(tmp_path)
    assert (caught.value.key, caught.value.got) == ("model.path", str(tmp_path))


def test_a_tokenizer_without_eos_is_refused(tmp_path):
    tokenizer = train_tokenizer(DIALOGUES, VOCABULARY, vocab_size=400)
    tokenizer.eos_token = None
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(ConfigError) as caught:
        HFCodec(tmp_path)
    assert (caught.value.key, caught.value.got) == ("model.path", str(tmp_path))
    assert "eos_token" in caught.value.expected
