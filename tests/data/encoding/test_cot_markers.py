"""Markers are found as the tokens that the policy samples, or refused."""

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from mega_agentrl.data.encoding.codec import HFCodec
from mega_agentrl.data.encoding.cot_markers import (
    KEY,
    LEFT_CONTEXTS,
    RIGHT_CONTEXTS,
    cot_marker_ids,
)
from tests.chat_models import save_tokenizer
from tests.config.refusals import refused, refused_setting

THINK = ("<think>", "</think>")
NEWLINE = "\u010a"  # how byte-level vocabularies write a newline


def codec_of(folder, merges=(), added=(), special=()):
    """A byte-level tokenizer with merges and tokens of its own."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = [*alphabet, *("".join(pair) for pair in merges)]
    tokenizer = Tokenizer(models.BPE({text: i for i, text in enumerate(vocabulary)}, list(merges)))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in ("<eos>", *special)])
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in added])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<eos>", clean_up_tokenization_spaces=False
    )
    fast.save_pretrained(folder)
    return HFCodec(folder)


def test_added_tokens_are_one_id_each(tmp_path):
    codec = HFCodec(save_tokenizer("qwen3", tmp_path))
    (start,), (end,) = cot_marker_ids(codec, THINK)
    assert codec.decode_with_special_tokens([start, end]) == "<think></think>"
    assert codec.encode("a<think>\nb</think>\n\n").count(start) == 1


def test_a_special_token_is_found_though_encoding_reads_it_as_text(tmp_path):
    codec = codec_of(tmp_path, special=THINK)
    (start,), (end,) = cot_marker_ids(codec, THINK)
    assert codec.decode_with_special_tokens([start, end]) == "<think></think>"
    assert start not in codec.encode("<think>")


def test_a_marker_may_be_several_tokens(tmp_path):
    codec = codec_of(tmp_path)
    start, end = cot_marker_ids(codec, THINK)
    assert (len(start), len(end)) == (7, 8)
    assert codec.decode(start) == "<think>" and codec.decode(end) == "</think>"


def test_merges_inside_of_a_marker_are_accepted(tmp_path):
    codec = codec_of(tmp_path, merges=[("t", "h"), ("i", "n"), ("<", "/")])
    start, end = cot_marker_ids(codec, THINK)
    assert (len(start), len(end)) == (5, 5)
    for marker, text in zip((start, end), THINK, strict=True):
        for before in LEFT_CONTEXTS:
            for after in RIGHT_CONTEXTS:
                around = codec.encode(before + text + after)
                assert any(tuple(around[at : at + 5]) == marker for at in range(len(around)))


@pytest.mark.parametrize(
    ("merge", "context"),
    [
        ((">", NEWLINE), "<think>\n"),
        ((NEWLINE, "<"), "\n<think>"),
        ((">", "a"), "<think>a"),
        ((".", "<"), ".<think>"),
    ],
)
def test_a_marker_that_merges_with_its_neighbours_is_refused(merge, context, tmp_path):
    codec = codec_of(tmp_path, merges=[merge])
    error = refused(cot_marker_ids, codec, THINK)
    assert (error.key, error.got) == (KEY, "<think>") and repr(context) in error.expected


def test_a_marker_that_becomes_other_text_is_refused(tmp_path):
    """Without bytes to fall back on, unknown characters become one token."""
    tokenizer = Tokenizer(models.BPE({"a": 0, "?": 1, "<eos>": 2}, [], unk_token="?"))
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", unk_token="?")
    fast.save_pretrained(tmp_path)
    assert refused_setting(cot_marker_ids, HFCodec(tmp_path), THINK) == (KEY, "<think>")
