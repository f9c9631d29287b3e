"""Tokens that a list of words names, whatever mark of a space they carry."""

from mega_agentrl.algo.ares.entropy_windows import normalize_trigger_token
from mega_agentrl.data.encoding.trigger_words import load_trigger_words, trigger_token_ids
from tests.config.refusals import refused_input, refused_setting

PIECES = ["", "wait", "\u0120Wait", "\u2581but", " But ", "waiting", "\u0120", "x", "buts"]


class PieceCodec:
    """One token per piece; decodes as a byte-level tokenizer without its detokenizer would."""

    eos_id = 0
    vocab_size = len(PIECES)

    def encode(self, text):
        return [PIECES.index(text)]

    def decode(self, token_ids):
        return "".join(PIECES[token] for token in token_ids)


def words_file(tmp_path, text):
    path = tmp_path / "words.txt"
    path.write_text(text, encoding="utf-8")
    return str(path)


def test_words_are_read_by_line_and_normalised_as_tokens_are(tmp_path):
    path = words_file(tmp_path, "Wait\n\n  but \n\u0120however\nwait\n")
    assert load_trigger_words(path) == {"wait", "but", "however"}


def test_tokens_are_found_with_any_mark_of_a_space():
    assert trigger_token_ids(PieceCodec(), {"wait", "but", "however"}, key="words") == {1, 2, 3, 4}


def test_a_list_without_a_trigger_is_refused(tmp_path):
    key = "algo.ares.trigger_words_file"
    for path in (words_file(tmp_path, "\n \n"), str(tmp_path / "none.txt")):
        assert refused_setting(load_trigger_words, path) == (key, path)
    error = refused_input(trigger_token_ids, PieceCodec(), {"wait a minute"}, key=key)
    assert (error.name, error.got) == (key, ["wait a minute"])


def test_the_words_of_the_package_are_normalised_single_words():
    words = load_trigger_words("default")
    assert len(words) > 80 and "wait" in words
    assert all(normalize_trigger_token(word) == word and word.isalpha() for word in words)
