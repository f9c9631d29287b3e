"""Text to token ids and back over a Hugging Face tokenizer folder.

Prompts go through the chat template (`chat`) once; after that a context only ever grows by
pieces that are encoded by themselves (tool answers, later user turns), and what the policy
sampled is never tokenized again. Special tokens that occur in encoded text or in messages are
read as plain text, so a tool's answer cannot end a turn. Sampled text keeps tags such as
`<think>` on decoding as long as the tokenizer does not declare them special.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mega_agentrl.data.chat import ChatTemplate
from mega_agentrl.types.records import Message

_CLASSES = {
    "TokenizersBackend": "PreTrainedTokenizerFast",
    "PreTrainedTokenizerFast": "PreTrainedTokenizerFast",
    "Qwen2Tokenizer": "Qwen2Tokenizer",
    "Qwen2TokenizerFast": "Qwen2Tokenizer",
}
"""Class that `AutoTokenizer` loads, by `tokenizer_class` in tokenizer_config.json."""


class HFCodec:
    """`ports.ChatCodec` over a tokenizer folder, by its absolute path in `folder`."""

    def __init__(self, folder: str | Path) -> None:
        path = Path(folder)
        if not (path / "tokenizer_config.json").is_file():
            raise ValueError(
                f"model.path={path}: no tokenizer_config.json there, expected a Hugging Face "
                "checkpoint folder with its tokenizer; was it made or copied completely?"
            )
        self._tokenizer = _load_tokenizer(path)
        if self._tokenizer.eos_token_id is None:
            raise ValueError(
                f"model.path={path}: the tokenizer has no eos_token, expected the one that ends "
                "an assistant turn; set eos_token in tokenizer_config.json"
            )
        self._chat = ChatTemplate(self._tokenizer)
        self.folder = str(path.resolve())

    @property
    def eos_id(self) -> int:
        """The id that ends an assistant turn."""
        return int(self._tokenizer.eos_token_id)

    @property
    def vocab_size(self) -> int:
        """Number of tokens, added ones included."""
        return len(self._tokenizer)

    @property
    def control_tokens(self) -> tuple[str, ...]:
        """Texts of the special tokens, and of added ones that stand in brackets, as tags do."""
        added = [str(token) for token in self._tokenizer.get_added_vocab()]
        bracketed = [token for token in added if token.startswith(("<", "["))]
        return tuple(sorted({*map(str, self._tokenizer.all_special_tokens), *bracketed}))

    def added_id(self, text: str) -> int | None:
        """Id of a token that was added to the vocabulary as this text, special or not."""
        found = self._tokenizer.get_added_vocab().get(text)
        return None if found is None else int(found)

    def encode(self, text: str) -> list[int]:
        """Token ids of exactly this text; special tokens in it are read as plain text.

        Half a surrogate pair, which a tool may print but no tokenizer takes, becomes `?`.
        """
        text = text.encode("utf-8", "replace").decode("utf-8")
        ids = self._tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True)
        return list(ids)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of the ids; special tokens are left out, spaces are kept as they are."""
        text = self._tokenizer.decode(
            list(token_ids), skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return str(text)

    def keeps(self, text: str) -> bool:
        """Whether `text`, sampled, survives decoding: not where it is a special token."""
        ids = self._tokenizer.encode(text, add_special_tokens=False)
        return self.decode(ids) == text

    def raw_text(self, token_ids: Sequence[int]) -> str:
        """Text of the ids, special tokens included."""
        return str(
            self._tokenizer.decode(
                list(token_ids), skip_special_tokens=False, clean_up_tokenization_spaces=False
            )
        )

    def apply_chat(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        generate: bool = True,
    ) -> list[int]:
        """Ids of the conversation; `tools` are rendered, generate: with a generation prompt."""
        return self._chat.ids(messages, tools, generate=generate)

    def apply_next_turn(self, messages: Sequence[Message]) -> list[int]:
        """Ids between an assistant turn's eos and the next assistant turn."""
        return self._chat.next_turn(messages)

    @property
    def end_text(self) -> str:
        """What the template writes behind the text of the last assistant turn."""
        return self._chat.end_text()


def _load_tokenizer(folder: Path) -> Any:
    """Load what `AutoTokenizer` loads, where its class is known without importing it.

    `AutoTokenizer` imports torch and the classes of models, which takes several seconds; the
    tokenizers themselves need neither. Whatever is not in `_CLASSES` goes through it.
    """
    # Its modules are imported on first use, so that this import alone is fast.
    import transformers

    loader = getattr(transformers, _class_name(folder) or "AutoTokenizer")
    return loader.from_pretrained(folder, local_files_only=True)


def _class_name(folder: Path) -> str | None:
    """The tokenizer's class in a folder of a supported model; None where it is another one."""
    if not (folder / "config.json").is_file():
        return None
    model = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    settings = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    name = _CLASSES.get(settings.get("tokenizer_class"))
    if name is None or "auto_map" in settings:
        return None
    match model.get("model_type"):
        case "qwen2":
            # Folders of this type may name a wrong class, which `AutoTokenizer` overrules.
            return "Qwen2Tokenizer"
        case "llama" | "qwen3" | "qwen3_moe":
            return name
    return None
