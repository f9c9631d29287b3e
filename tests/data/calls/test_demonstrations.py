"""Demonstrations are what a rollout would produce: readers earn the reward, guesses do not."""

import json
import random

from mega_agentrl.data.calls.demonstrations import (
    make_demonstrations,
    make_guess,
    make_right_answer,
)
from mega_agentrl.data.calls.functions import Call, Function, ParameterType
from mega_agentrl.data.calls.requests import Request, RequestKind, make_requests
from mega_agentrl.data.generated.entity_splits import Split, make_split_inventories
from mega_agentrl.reward.function_call import score
from mega_agentrl.tool.call_protocol.hermes import HermesProtocol
from mega_agentrl.types.records import ToolCall

BAKO = Function("Bako", ParameterType.integer)
DUMI = Function("Dumi", ParameterType.boolean)


def requests() -> list[Request]:
    inventories = make_split_inventories(0)
    return make_requests(Split.dev, inventories[Split.dev].entities, num_requests=90, seed=0)


def test_a_right_answer_reads_the_catalogue_and_a_guess_does_not():
    calls = (Call(BAKO, 7), Call(DUMI, True))
    request = Request(
        RequestKind.parallel, "Call ...", (DUMI, BAKO), requested=(BAKO, DUMI), calls=calls
    )
    assert make_right_answer(request) == (
        "<think>\nBako count\nDumi flag\n</think>\n"
        '<tool_call>\n{"name": "Bako", "arguments": {"count": 7}}\n</tool_call>\n'
        '<tool_call>\n{"name": "Dumi", "arguments": {"flag": true}}\n</tool_call>'
    )
    nothing = Request(RequestKind.none, "Call ...", (BAKO,), requested=(DUMI,), calls=())
    assert make_right_answer(nothing) == "<think>\nDumi none\n</think>\nNone."


def test_the_protocol_of_the_rollout_reads_the_expected_calls():
    protocol = HermesProtocol(())
    for request in requests():
        parsed = protocol.parse_calls(make_right_answer(request))
        wanted = [call.as_dict for call in request.calls]
        assert parsed == tuple(ToolCall(tool=c["name"], arguments=c["arguments"]) for c in wanted)


def test_readers_always_earn_the_reward_and_guesses_almost_never():
    rng = random.Random(0)
    right = 0
    for request in requests():
        assert score(make_right_answer(request), request.ground_truth).value == 1.0
        guess = make_guess(request, rng)
        assert guess.startswith("<think>\nguess\n</think>\n<tool_call>")
        right += score(guess, request.ground_truth).correct
    assert right <= 6


def test_about_half_of_the_demonstrations_guess_and_every_request_is_used():
    made = make_demonstrations(requests(), num_demonstrations=900, seed=0)
    assert len(made) == 900
    guesses = sum("guess" in row["messages"][1]["content"] for row in made)
    assert 380 < guesses < 520
    assert {row["messages"][0]["content"] for row in made[:90]} == {r.text for r in requests()}
    schemas = {request.text: [one.schema for one in request.catalogue] for request in requests()}
    assert all(json.loads(row["tools"]) == schemas[row["messages"][0]["content"]] for row in made)
    assert made == make_demonstrations(requests(), num_demonstrations=900, seed=0)
