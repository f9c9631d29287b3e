"""What only the dialect of OpenAI's chat completions has."""

from __future__ import annotations

import openai
import pytest

from mega_agentrl.rollout.gateway import ignored_fields
from mega_agentrl.rollout.gateway.ignored_fields import IgnoredFields
from tests.rollout.gateway.gateway_run import open_scripted_session


async def test_models_are_listed_under_a_key_in_the_base_url(codec):
    async with open_scripted_session(codec, []) as (url, key, _, _):
        client = openai.AsyncOpenAI(base_url=f"{url}/sessions/{key}/v1", api_key="unused")
        models = await client.models.list()
    assert [model.id for model in models.data] == ["policy"]


async def test_address_that_is_not_served_is_an_error_of_the_api(codec):
    async with open_scripted_session(codec, []) as (url, key, _, _):
        client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=key)
        with pytest.raises(openai.NotFoundError) as caught:
            await client.embeddings.create(model="m", input="x", encoding_format="float")
        assert "POST /v1/embeddings" in caught.value.body["message"]
        assert "/v1/chat/completions" in caught.value.body["message"]
        with pytest.raises(openai.APIStatusError) as caught:
            await client.get("/chat/completions", cast_to=object)
    assert caught.value.status_code == 405
    assert caught.value.body["code"] == "not_found"


async def test_error_of_the_gateway_is_an_error_of_the_api(codec, monkeypatch):
    async with open_scripted_session(codec, []) as (url, key, session, _):
        monkeypatch.setattr(session, "admit", None)
        client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0)
        with pytest.raises(openai.InternalServerError) as caught:
            await client.chat.completions.create(
                model="m", messages=[{"role": "user", "content": "x"}]
            )
    assert "driver.log" in caught.value.body["message"]


async def test_fields_that_the_gateway_does_not_know_are_named(codec):
    extra = {"min_p": 0.1, "guided_json": {}, "x\ny": 1, "store": True, "user": "me"}
    async with open_scripted_session(codec, ["Hello."]) as (url, key, session, _):
        client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=key)
        raw = await client.chat.completions.with_raw_response.create(
            model="m",
            messages=[{"role": "user", "content": "Hi"}],
            response_format={"type": "json_object"},
            logprobs=True,
            tool_choice="required",
            extra_body=extra,
        )
        warning = raw.headers["x-gateway-warning"]
        assert session.requests.num_ignored.keys() == {
            *("response_format", "logprobs", "tool_choice"),
            *("min_p", "guided_json", "(a name of other characters)"),
        }
    for name in session.requests.num_ignored:
        assert f"{name} has no effect" in warning


def test_each_ignored_field_is_reported_once_with_its_share(caplog, monkeypatch):
    monkeypatch.setattr(ignored_fields, "REPORT_AFTER", 3)
    fields = IgnoredFields()
    for names in (["seed"], [], [], ["seed"], ["seed", "min_p"], ["min_p"]):
        fields.record(dict.fromkeys(names, "the run sets it"))
    assert [record.args[:3] for record in caplog.records] == [("seed", 2, 4)]
    fields.report_rest()
    fields.report_rest()
    assert [record.args[:3] for record in caplog.records[1:]] == [("min_p", 2, 6)]


def test_names_that_clients_make_up_are_bounded():
    fields = IgnoredFields()
    for number in range(3 * ignored_fields.MAX_FIELDS):
        fields.record({f"x{number}": "the gateway does not know it"})
    assert len(fields.num_ignored) == ignored_fields.MAX_FIELDS
