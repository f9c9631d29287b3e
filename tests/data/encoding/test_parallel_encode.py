"""Token ids from several processes are those of one, in order."""

import pytest

from mega_agentrl.data.encoding import parallel_encode as module
from mega_agentrl.data.encoding.codec import HFCodec
from mega_agentrl.data.encoding.parallel_encode import encode_conversations
from tests.chat_models import save_tokenizer
from tests.config.refusals import refused_input

SCHEMAS = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}}
    for name in ("python", "search")
]


@pytest.fixture
def folder(tmp_path):
    """The folder of a tokenizer, which is loaded without torch: the model type is known."""
    (tmp_path / "config.json").write_text('{"model_type": "qwen3"}')
    return save_tokenizer("qwen25", tmp_path)


def conversations(number):
    """Different conversations with no tool, one or both."""
    return [
        (
            ({"role": "user", "content": f"Is {index} a prime? <|im_end|> é"},),
            SCHEMAS[: index % 3],
        )
        for index in range(number)
    ]


def test_several_processes_return_the_ids_of_one(folder, monkeypatch):
    monkeypatch.setattr(module, "_CHUNK_ROWS", 5)
    monkeypatch.setattr(module.os, "sched_getaffinity", lambda _: {0, 1})
    codec = HFCodec(folder)
    expected = encode_conversations(codec, conversations(23), key="data.train")
    assert len({tuple(ids) for ids in expected}) == 23
    assert len(expected[1]) > len(expected[0])
    found = encode_conversations(codec, conversations(23), key="data.train", min_rows=23)
    assert found == expected


def test_a_failed_process_is_an_error_with_the_key(folder, monkeypatch):
    monkeypatch.setattr(module.os, "sched_getaffinity", lambda _: {0, 1})
    codec = HFCodec(folder)
    codec.folder = str(folder / "nowhere")
    error = refused_input(
        encode_conversations, codec, conversations(2), key="data.train", min_rows=2
    )
    assert error.name.startswith("data.train, ") and codec.folder in error.got.reason


@pytest.mark.parametrize(("cpus", "min_rows", "folder"), [(1, 1, "x"), (2, 3, "x"), (2, 1, None)])
def test_few_rows_one_core_or_a_codec_without_files_start_nothing(
    monkeypatch, cpus, min_rows, folder
):
    class Codec:
        def apply_chat_template(self, messages, tools=None, *, add_generation_prompt=True):
            return [len(messages[0]["content"]), len(tools or [])]

    monkeypatch.setattr(module, "WorkerPool", lambda *_: pytest.fail("started"))
    monkeypatch.setattr(module.os, "sched_getaffinity", lambda _: set(range(cpus)))
    codec = Codec()
    codec.folder = folder
    found = encode_conversations(codec, conversations(2), key="k", min_rows=min_rows)
    assert found == [[26, 0], [26, 1]]


def test_chunks_are_limited_in_rows_and_characters(monkeypatch):
    monkeypatch.setattr(module, "_CHUNK_ROWS", 3)
    monkeypatch.setattr(module, "_CHUNK_CHARS", 10)
    given = [(({"role": "user", "content": "x" * size},), ()) for size in (4, 4, 4, 30, 1, 1, 1, 1)]
    chunks = [[len(one[0][0]["content"]) for one in chunk] for chunk in module._iter_chunks(given)]
    assert chunks == [[4, 4], [4], [30], [1, 1, 1], [1]]
    assert list(module._iter_chunks([])) == []
    with_tools = [(({"role": "user", "content": "x"},), [{"name": "search"}])] * 2
    assert len(list(module._iter_chunks(with_tools))) == 2
