"""Requests can be answered from their catalogue, and only the expected calls earn the reward."""

from __future__ import annotations

import json
from collections import Counter
from functools import cache
from itertools import combinations

import pytest

from mega_agentrl.data.calls.functions import Call, ParameterType
from mega_agentrl.data.calls.requests import (
    CATALOGUE_SIZE,
    Request,
    RequestKind,
    format_value,
    make_requests,
)
from mega_agentrl.data.generated.entity_splits import Split, make_split_inventories
from mega_agentrl.errors import InputError
from mega_agentrl.reward.function_call import score


@cache
def made(num_requests: int = 300, seed: int = 0) -> dict[Split, list[Request]]:
    inventories = make_split_inventories(seed)
    return {
        split: make_requests(
            split,
            inventories[split].entities,
            num_requests=num_requests,
            seed=seed,
        )
        for split in Split
    }


def every_request() -> list[Request]:
    return [request for requests in made().values() for request in requests]


def answer(calls) -> str:
    return f"<think>x</think>{json.dumps([call.as_dict for call in calls])}"


def test_requests_depend_on_the_seed_alone():
    assert made() == made.__wrapped__()
    assert made() != made(seed=1)


def test_kinds_are_equally_many_and_no_request_occurs_twice():
    for requests in made().values():
        assert Counter(request.kind for request in requests) == dict.fromkeys(RequestKind, 100)
    texts = [request.text for request in every_request()]
    assert len(set(texts)) == len(texts)


def test_splits_share_no_function():
    names = [
        {function.name for one in requests for function in (*one.requested, *one.catalogue)}
        for requests in made().values()
    ]
    assert all(names)
    assert not any(one & other for one, other in combinations(names, 2))


def test_the_expected_calls_earn_the_reward_in_any_order():
    for request in every_request():
        assert score(answer(request.calls), request.ground_truth).value == 1.0
        assert score(answer(request.calls[::-1]), request.ground_truth).value == 1.0


def test_other_calls_of_the_catalogue_never_match():
    for request in every_request():
        right = {call.function.name: call for call in request.calls}
        for function in request.catalogue:
            values = {ParameterType.integer: 10, ParameterType.string: "x"}
            call = Call(function, values.get(function.parameter_type, True))
            if function.name not in right:
                assert score(answer([call]), request.ground_truth).value == 0.0
                assert score(answer([*request.calls, call]), request.ground_truth).value == 0.0
        if request.calls:
            assert score(answer(request.calls[1:]), request.ground_truth).value == 0.0


def test_a_catalogue_has_the_requested_functions_and_others_that_share_no_syllable():
    for request in every_request():
        assert len(request.catalogue) == CATALOGUE_SIZE
        offered = set(request.requested) & set(request.catalogue)
        if request.kind is RequestKind.none:
            assert not offered and request.calls == ()
        else:
            assert [call.function for call in request.calls] == list(request.requested)
            assert offered == set(request.requested)
        names = {one.name for one in (*request.requested, *request.catalogue)}
        syllables = {part for name in names for part in (name[:2], name[2:])}
        assert len(syllables) == 2 * len(names)


def test_a_request_names_every_function_with_the_value_of_its_call():
    for request in every_request():
        head, *lines = request.text.split("\n")
        assert head == "Call:"
        parts = [line.split(" with ") for line in lines]
        assert [name for name, _ in parts] == [one.name for one in request.requested]
        for (_, value), call in zip(parts, request.calls, strict=False):
            assert value == format_value(call.value)


def test_too_many_requests_are_refused():
    with pytest.raises(InputError) as caught:
        make_requests(Split.dev, ("Bako", "Dumi", "Gapu", "Hobi"), num_requests=200, seed=0)
    assert (caught.value.name, caught.value.got) == ("dev requests, num_requests", 200)
