"""Requests to vLLM's parameters and its outputs back."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest

pytest.importorskip("vllm")

import numpy as np
from vllm.logprobs import FlatLogprobs
from vllm.outputs import WeightVersionSpan

from mega_agentrl.errors import InputError
from mega_agentrl.generator.sampling import (
    StopTokenTable,
    check_request,
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


def log_probs(*positions):
    """vLLM's log-probs with the tap's measurements.

    A position is (entropy, log-prob of the sampled token at the sampling temperature, ids,
    log-probs at temperature 1); the first id is the most probable token.
    """
    flat = FlatLogprobs()
    for entropy, logp, ids, logps in positions:
        (bits,) = np.array([logp, -entropy], dtype=np.float32).view(np.int64).tolist()
        flat.append_fast(ids, logps, iter((bits, *range(1, len(ids)))), [None] * len(ids))
    return flat


def output(**settings):
    plain = {
        "token_ids": [4, 5],
        "logprobs": log_probs((0.25, -1.0, [4], [-1.0]), (0.5, -2.0, [7], [-2.0])),
        "finish_reason": "length",
        "stop_reason": None,
        "weight_versions": [WeightVersionSpan("3", 0, 2)],
    }
    return SimpleNamespace(**(plain | settings))


def test_banned_tokens_have_no_chance():
    assert sampling_params(request(), {}, []).logit_bias is None
    assert sampling_params(request(), {}, [], (56, 57)).logit_bias == dict.fromkeys(
        (56, 57), -math.inf
    )


def test_single_tokens_stop_by_id_and_the_rest_by_text():
    table = StopTokenTable(WordTokenizer())
    found = table.split_stop_strings(("</python>", "two words", "abc"))
    assert found == ({9: "</python>", 3: "abc"}, ["two words"])
    assert table.split_stop_strings(()) == ({}, [])


def test_parameters_decode_text_only_where_a_stop_string_needs_it():
    by_id = sampling_params(request(temperature=0.7, seed=3), {9: "x"}, [])
    assert (by_id.detokenize, by_id.stop_token_ids) == (False, [9])
    assert (by_id.temperature, by_id.seed, by_id.logprobs) == (0.7, 3, 0)
    by_text = sampling_params(request(num_top_logps=2), {}, ["two words"])
    assert (by_text.detokenize, by_text.include_stop_str_in_output) == (True, True)
    assert by_text.logprobs == 2


def test_log_probs_and_entropies_are_those_of_the_tap():
    logprobs = log_probs((0.25, -1.5, [4], [-1.0]), (0.5, -4.0, [7], [-2.0]))
    found = to_generation(request(temperature=0.5), output(logprobs=logprobs), {}, version=9)
    assert found.logps == (-1.5, -4.0)
    assert found.entropies == (0.25, 0.5)
    assert found.argmax_ids == (4, 7)
    assert (found.version, found.versions) == (3, ())


def test_each_token_has_the_version_that_sampled_it():
    spans = [WeightVersionSpan("3", 0, 1), WeightVersionSpan("4", 1, 2)]
    found = to_generation(request(), output(weight_versions=spans), {}, version=9)
    assert (found.version, found.versions) == (4, (3, 4))
    none = output(token_ids=[], logprobs=None, finish_reason="abort", weight_versions=[])
    assert to_generation(request(), none, {}, version=9).version == 9


def test_the_most_probable_tokens_and_the_sampled_one_if_asked_for():
    # vLLM lists the sampled token first; at the first place it is among the two best as well.
    flat = log_probs(
        (0.25, -1.0, [4, 4, 6], [-1.0, -1.0, -2.0]), (0.5, -3.0, [6, 6, 7], [-3.0, -0.5, -1.5])
    )
    found = to_generation(request(num_top_logps=2), output(logprobs=flat), {}, version=0)
    assert found.logps == (-1.0, -3.0)
    assert found.top_logps == ((-1.0, -2.0), (-3.0, -0.5, -1.5))
    assert to_generation(request(), output(), {}, version=0).top_logps == ()


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
    ids=["length", "end-token", "stop-id", "other-id", "stop-string", "abort"],
)
def test_finish_reasons_are_told_apart(finish_reason, stop_reason, expected):
    ended = output(finish_reason=finish_reason, stop_reason=stop_reason)
    found = to_generation(request(), ended, {9: "</python>"}, version=0)
    assert (found.finish_reason, found.stop_string) == expected


def test_missing_measurements_are_an_error_not_a_short_answer():
    logprobs = log_probs((0.25, -1.0, [4], [-1.0]))
    with pytest.raises(InputError) as caught:
        to_generation(request(), output(logprobs=logprobs), {}, version=0)
    assert caught.value.got["token_ids"] == 2 and caught.value.got["logps"] == 1


def test_an_aborted_request_may_be_empty():
    empty = output(token_ids=[], logprobs=None, finish_reason="abort", weight_versions=[])
    assert to_generation(request(), empty, {}, version=0).token_ids == ()


@pytest.mark.parametrize(
    ("settings", "field", "got"),
    [
        ({"token_ids": ()}, "prompt tokens", 0),
        ({"token_ids": (1,) * 8}, "prompt tokens", 8),
        ({"max_tokens": 0}, "max_tokens", 0),
    ],
    ids=["no-prompt", "long-prompt", "no-tokens"],
)
def test_bad_requests_are_named(settings, field, got):
    with pytest.raises(InputError) as caught:
        check_request(request(**settings), max_model_len=8)
    assert (caught.value.name, caught.value.got) == (f"request r: {field}", got)
