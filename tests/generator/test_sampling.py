"""Requests to vLLM's parameters and its outputs back."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

pytest.importorskip("vllm")

from vllm.logprobs import FlatLogprobs

from mega_agentrl.generator.sampling import (
    StopTokenTable,
    check_request,
    prompt_logp_params,
    sampling_params,
    to_generation,
)
from mega_agentrl.types.records import FinishReason, GenerateRequest


class WordTokenizer:
    """Every word is a token: its length is the id."""

    def encode(self, text, add_special_tokens):
        assert not add_special_tokens
        return [len(word) for word in text.split()]


def request(**settings):
    return GenerateRequest(**({"request_id": "r", "token_ids": (1, 2), "max_tokens": 5} | settings))


def output(**settings):
    plain = {
        "token_ids": [4, 5],
        "logprobs": SimpleNamespace(logprobs=[-1.0, -2.0]),
        "finish_reason": "length",
        "stop_reason": None,
    }
    return SimpleNamespace(**(plain | settings))


RECORD = ([0.1, 0.2, 9.0], [0.25, 0.5, 9.0], [4, 7, 9])


def test_single_tokens_stop_by_id_and_the_rest_by_text():
    table = StopTokenTable(WordTokenizer())
    assert table.split_by_token(("</python>", "two words", "abc")) == (
        {9: "</python>", 3: "abc"},
        ["two words"],
    )
    assert table.split_by_token(()) == ({}, [])


def test_parameters_decode_text_only_where_a_stop_needs_it():
    cheap = sampling_params(request(temperature=0.7, seed=3), "k", {9: "x"}, [])
    assert (cheap.detokenize, cheap.stop_token_ids, cheap.temperature, cheap.seed) == (
        False,
        [9],
        0.7,
        3,
    )
    dear = sampling_params(request(), "k", {}, ["two words"])
    assert dear.detokenize
    assert dear.include_stop_str_in_output


def test_a_probe_is_computed_anew_at_temperature_1():
    params = prompt_logp_params()
    assert (params.temperature, params.max_tokens, params.prompt_logprobs) == (1.0, 1, 0)
    assert params.skip_reading_prefix_cache
    assert not params.detokenize


def test_log_probs_are_moved_to_the_temperature_and_extra_steps_cut():
    got = to_generation(request(temperature=0.5), output(), RECORD, {}, version=3)
    assert got.logps == (-1.0 / 0.5 + 0.25, -2.0 / 0.5 + 0.5)
    assert got.entropies == (0.1, 0.2)
    assert got.argmax_ids == (4, 7)
    assert (got.finish_reason, got.version) == (FinishReason.length, 3)


def test_the_most_probable_tokens_and_the_sampled_one_where_asked_for():
    # vLLM lists the sampled token first; at the first place it is among the two best as well.
    flat = FlatLogprobs()
    flat.append_fast([4, 4, 6], [-1.0, -1.0, -2.0], iter([1, 1, 2]), [None] * 3)
    flat.append_fast([5, 6, 7], [-3.0, -0.5, -1.5], iter([9, 1, 2]), [None] * 3)
    asked = request(num_top_logps=2)
    assert sampling_params(asked, "k", {}, []).logprobs == 2
    assert sampling_params(request(), "k", {}, []).logprobs == 0
    got = to_generation(asked, output(logprobs=flat), RECORD, {}, version=0)
    assert got.logps == (-1.0 + 0.25, -3.0 + 0.5)
    assert got.top_logps == ((-1.0, -2.0), (-3.0, -0.5, -1.5))
    assert to_generation(request(), output(), RECORD, {}, version=0).top_logps == ()


def test_greedy_keeps_the_raw_log_probs():
    record = ([0.1, 0.2], [0.0, 0.0], [4, 5])
    got = to_generation(request(temperature=0.0), output(), record, {}, version=0)
    assert got.logps == (-1.0, -2.0)


def test_a_log_prob_rounded_above_zero_is_zero():
    record = ([0.0, 0.0], [1.0000001, 2.0], [4, 5])
    got = to_generation(request(), output(), record, {}, version=0)
    assert got.logps == (0.0, 0.0)


@pytest.mark.parametrize(
    ("finish_reason", "stop_reason", "expected"),
    [
        ("length", None, (FinishReason.length, None)),
        ("stop", None, (FinishReason.eos, None)),
        ("stop", 9, (FinishReason.stop, "</python>")),
        ("stop", 8, (FinishReason.eos, None)),
        ("stop", "two words", (FinishReason.stop, "two words")),
        ("abort", None, (FinishReason.aborted, None)),
    ],
)
def test_ends_are_told_apart(finish_reason, stop_reason, expected):
    ended = output(finish_reason=finish_reason, stop_reason=stop_reason)
    got = to_generation(request(), ended, RECORD, {9: "</python>"}, version=0)
    assert (got.finish_reason, got.stop_string) == expected


def test_missing_measurements_are_an_error_not_a_short_answer():
    with pytest.raises(ValueError, match="one length"):
        to_generation(request(), output(), ([0.1], [0.2], [4]), {}, version=0)


def test_an_aborted_request_may_be_empty():
    empty = output(token_ids=[], logprobs=None, finish_reason="abort")
    assert to_generation(request(), empty, ([], [], []), {}, version=0).token_ids == ()


@pytest.mark.parametrize(
    "settings", [{"token_ids": ()}, {"token_ids": (1,) * 8}, {"max_tokens": 0}]
)
def test_bad_requests_are_named(settings):
    with pytest.raises(ValueError, match="request r: "):
        check_request(request(**settings), max_model_len=8)
