"""What only the dialect of OpenAI's chat completions has."""

from __future__ import annotations

import openai

from tests.rollout.gateway.gateway_run import open_scripted_session


async def test_models_are_listed_under_a_key_in_the_base_url(codec):
    async with open_scripted_session(codec, []) as (url, key, _, _):
        client = openai.AsyncOpenAI(base_url=f"{url}/sessions/{key}/v1", api_key="unused")
        models = await client.models.list()
    assert [model.id for model in models.data] == ["policy"]
