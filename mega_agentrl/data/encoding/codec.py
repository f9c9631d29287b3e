"""Converts text to token ids and back with a Hugging Face tokenizer folder.

Prompts are rendered once through the chat template. After that a context only grows by pieces that
are encoded on their own (tool answers, later user turns), and sampled tokens are never tokenized
again. Special tokens in encoded text or messages become plain text, so that a tool's answer cannot
end a turn. Sampled tags such as `<think>` survive decoding if the tokenizer does not declare them
special.

An image of a message is a part of its content (`types.records.Message`). The template writes one
placeholder for it, which is expanded to one for each feature; text never becomes a placeholder.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from jinja2 import TemplateError

from mega_agentrl.config.errors import ConfigError
from mega_agentrl.config.input_files import read_json, reading
from mega_agentrl.data.encoding.control_tokens import (
    ControlTexts,
    ControlTokenFinder,
    Marks,
    mark_inputs,
    replace_lone_surrogates,
    tag_pattern,
    template_tags,
)
from mega_agentrl.errors import InputError
from mega_agentrl.types.records import Message
from mega_agentrl.vision.placeholders import expand_placeholders, image_parts
from mega_agentrl.vision.processor import ImageTokens, find_image_tokens

_TOKENIZER_CLASSES = {
    "TokenizersBackend": "PreTrainedTokenizerFast",
    "PreTrainedTokenizerFast": "PreTrainedTokenizerFast",
    "Qwen2Tokenizer": "Qwen2Tokenizer",
    "Qwen2TokenizerFast": "Qwen2Tokenizer",
}
"""Class that `AutoTokenizer` loads, by `tokenizer_class` in tokenizer_config.json."""

_SENTINEL = "Noted: 7c4e1f."
_BASE_CONVERSATION: tuple[Message, ...] = (
    {"role": "user", "content": "Note this."},
    {"role": "assistant", "content": _SENTINEL},
)
_PROBE_SCHEMA = {
    "type": "function",
    "function": {
        "name": "probe",
        "description": "Probe.",
        "parameters": {"type": "object", "properties": {}},
    },
}


class ChatTemplate:
    """Encodes messages with a tokenizer's chat template, as a whole or turn by turn.

    A growing conversation is never rendered again. New messages are rendered behind a fixed base
    conversation, and the base, up to the eos of its assistant turn, is removed from the result. So
    a template that rewrites earlier turns (drops old reasoning, adds empty reasoning to the last
    turn) does not change what was sampled. The caller checks whether the pieces add up to what the
    template renders for the whole conversation.

    Only the template produces control tokens. There are two kinds of texts:

    * In the prompt (messages of system, developer and user before the first answer) and in answers
      of the assistant, special tokens and the tokens that the template writes between turns are
      encoded as plain text. Other added tokens keep their meaning: prompts teach the policy tags
      such as `<think>`.
    * Whatever else is rendered is the text of others: schemas of tools, messages of tools, all
      messages after the first answer, calls, names and ids in messages, variables. There no added
      token that starts like a tag keeps its meaning, and of tags that the template writes as
      ordinary text, such as `</tools>`, the first character becomes `&lt;`.

    Pieces meet only at turn boundaries, so that merges inside of the template's text are not
    affected.
    """

    def __init__(self, tokenizer: Any, image_tokens: ImageTokens | None = None) -> None:
        self._tokenizer = tokenizer
        self._image_tokens = image_tokens
        added = tokenizer.added_tokens_decoder.values()
        special = {str(token) for token in added if token.special}
        self._special_tokens = special | {str(token) for token in tokenizer.all_special_tokens}
        self._control_texts: tuple[Any, ControlTexts] | None = None
        self._plain_ids: dict[str, list[int]] = {}

    def encode(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Return the ids of the conversation, by default followed by the generation prompt."""
        self._check_images(messages)
        marked = mark_inputs(self._controls, messages, tools, variables)
        text = self._render(
            marked.messages,
            marked.tools,
            add_generation_prompt=add_generation_prompt,
            variables=marked.variables,
        )
        return self._expand_images(self._encode_rendered(text, marked.marks), messages)

    def encode_next_turn(
        self, messages: Sequence[Message], variables: Mapping[str, Any] | None = None
    ) -> list[int]:
        """Return the ids between an assistant turn's eos and the next assistant turn."""
        self._check_images(messages)
        marked = mark_inputs(self._controls, messages, variables=variables, follows_answer=True)
        conversation = (*_BASE_CONVERSATION, *marked.messages)
        text = self._render(
            conversation, None, add_generation_prompt=True, variables=marked.variables
        )
        eos = str(self._tokenizer.eos_token)
        _, sentinel, tail = text.partition(_SENTINEL)
        if not sentinel or eos not in tail:
            raise InputError(
                f"chat template, a message of role {messages[0]['role'] if messages else '(none)'}",
                text,
                f"the text of the assistant's turn before it, followed by {eos!r}",
                "it drops earlier turns, or the tokenizer's eos_token is not what ends a turn",
            )
        ids = self._encode_rendered(tail[tail.index(eos) + len(eos) :], marked.marks)
        return self._expand_images(ids, messages)

    def encode_assistant_turn(self, text: str) -> list[int]:
        """Return the ids between the generation prompt and, including it, the turn's eos."""
        conversation = [_BASE_CONVERSATION[0], {"role": "assistant", "content": text}]
        marked = mark_inputs(self._controls, conversation)
        prompt = self._render(marked.messages[:1], None, add_generation_prompt=True)
        whole = self._render(marked.messages, None, add_generation_prompt=False)
        while not whole.startswith(prompt):  # it may open a reasoning that the turn does not have
            prompt = prompt[:-1]
        turn = whole.removeprefix(prompt)
        eos = str(self._tokenizer.eos_token)
        turn = turn[: turn.rindex(eos) + len(eos)] if eos in turn else turn + eos
        return self._encode_rendered(turn, marked.marks)

    def encode_plain(self, text: str) -> list[int]:
        """Return the ids of exactly this text, without special tokens and turn markers."""
        return self._without_tokens(text, self._controls.turn_ids, self._controls.in_prompts)

    def turn_end_text(self) -> str:
        """Return what the template writes after the text of the last assistant turn."""
        text = self._render(_BASE_CONVERSATION, None, add_generation_prompt=False)
        return text.partition(_SENTINEL)[2]

    @property
    def control_tokens(self) -> tuple[str, ...]:
        """Texts of the special tokens, and of added tokens that start like a tag."""
        added = [str(token) for token in self._tokenizer.get_added_vocab()]
        bracketed = [token for token in added if token.startswith(("<", "["))]
        return tuple(sorted({*self._special_tokens, *bracketed}))

    @property
    def template_tags(self) -> tuple[str, ...]:
        """Tags that the template writes, whether they are tokens or not."""
        names = template_tags(self._tokenizer.chat_template)
        return tuple(sorted(f"{head}{name}>" for name in names for head in ("<", "</")))

    @property
    def _controls(self) -> ControlTexts:
        """The control texts of the present chat template."""
        template = self._tokenizer.chat_template
        if self._control_texts is None or self._control_texts[0] != template:
            self._control_texts = (template, self._find_control_texts())
            self._plain_ids.clear()
        return self._control_texts[1]

    def _find_control_texts(self) -> ControlTexts:
        added = {
            str(token): token_id for token, token_id in self._tokenizer.get_added_vocab().items()
        }
        between_turns = self._text_between_turns()
        turn_tokens = self._special_tokens | {
            text for text in self.control_tokens if text in between_turns
        }
        all_tokens = turn_tokens | set(self.control_tokens)
        # The texts between which a turn is cut out may not stand in it either.
        return ControlTexts(
            in_prompts=ControlTokenFinder([*turn_tokens, _SENTINEL]),
            in_others=ControlTokenFinder([*all_tokens, _SENTINEL]),
            tokens=ControlTokenFinder(all_tokens),
            turn_ids=frozenset(added[text] for text in turn_tokens if text in added),
            tag=tag_pattern(
                {
                    name
                    for name in template_tags(self._tokenizer.chat_template)
                    if f"<{name}>" not in all_tokens
                }
            ),
        )

    def _text_between_turns(self) -> str:
        """Return what the template writes between an answer and the next user message."""
        text = "Next: 7c4e1f."
        conversation = (*_BASE_CONVERSATION, {"role": "user", "content": text})
        try:
            rendered = self._render(conversation, None, add_generation_prompt=False)
        except (TemplateError, TypeError, ValueError):
            return ""  # encoding the conversations shows the error
        return rendered.partition(_SENTINEL)[2].partition(text)[0]

    def _encode_rendered(self, text: str, marks: Marks) -> list[int]:
        """Encode rendered text; tokens that begin with a mark become plain text."""
        if not marks.mark_by_char:
            return _encode_text(self._tokenizer, text)
        ids: list[int] = []
        for piece, is_marked in marks.split(text, self._controls.tokens):
            if not is_marked:
                ids += _encode_text(self._tokenizer, piece)
                continue
            if piece not in self._plain_ids:
                added_ids = self._tokenizer.get_added_vocab().values()
                self._plain_ids[piece] = self._without_tokens(
                    piece, frozenset(added_ids), self._controls.tokens
                )
            ids += self._plain_ids[piece]
        return ids

    def _without_tokens(
        self, text: str, token_ids: frozenset[int], finder: ControlTokenFinder
    ) -> list[int]:
        """Return the ids of a text without those of the tokens that the finder finds.

        A tokenizer spells out what it declares special. Other tokens are cut behind their first
        character, where there are any.
        """
        ids = _encode_text(self._tokenizer, text, is_plain=True)
        if token_ids.isdisjoint(ids):
            return ids
        cuts = [0, *(position + 1 for position in finder.starts(text)), len(text)]
        pieces = (text[start:stop] for start, stop in pairwise(cuts))
        return [
            token_id
            for piece in pieces
            for token_id in _encode_text(self._tokenizer, piece, is_plain=True)
        ]

    @property
    def renders_images(self) -> bool:
        """Whether the template writes a placeholder for an image of a message."""
        probe = {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "x"}]}
        try:
            text = self._render([probe], None, add_generation_prompt=True)
        except (TemplateError, TypeError, ValueError):
            return False
        ids = _encode_text(self._tokenizer, text)
        return self._image_tokens is not None and ids.count(self._image_tokens.image_id) == 1

    @property
    def renders_tools(self) -> bool:
        """Whether the template writes the schemas of tools."""
        probe = [{"role": "user", "content": "x"}]
        try:
            with_tool, without = (
                self._render(probe, tools, add_generation_prompt=True)
                for tools in ([_PROBE_SCHEMA], None)
            )
        except (TemplateError, TypeError, ValueError):
            return True  # encoding the conversations shows the error
        return with_tool != without

    def _check_images(self, messages: Sequence[Message]) -> None:
        """Raise `InputError` for images in messages to a model of text."""
        if self._image_tokens is None and (images := image_parts(messages)):
            raise InputError(
                "images of chat messages",
                len(images),
                "none",
                "model.path is a model without a vision tower (its config.json has no "
                "image_token_id)",
            )

    def _expand_images(self, token_ids: list[int], messages: Sequence[Message]) -> list[int]:
        if self._image_tokens is None:
            return token_ids
        return expand_placeholders(token_ids, image_parts(messages), self._image_tokens.image_id)

    def _render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None,
        *,
        add_generation_prompt: bool,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        if self._tokenizer.chat_template is None:
            raise InputError(
                "chat template of the tokenizer",
                None,
                "chat_template.jinja, or chat_template in tokenizer_config.json",
                "a base model, which comes without one",
            )
        text = self._tokenizer.apply_chat_template(
            [dict(message) for message in messages],
            tools=[dict(tool) for tool in tools] if tools else None,
            add_generation_prompt=add_generation_prompt,
            tokenize=False,
            **(variables or {}),
        )
        return str(text)


class HFCodec:
    """A `ChatCodec` over a Hugging Face tokenizer folder.

    Attributes:
        folder: Absolute path of the folder.
        image_tokens: Special tokens of images; None for a model of text.
    """

    def __init__(self, folder: str | Path) -> None:
        path = Path(folder)
        if not (path / "tokenizer_config.json").is_file():
            raise ConfigError(
                "model.path",
                str(path),
                "a Hugging Face checkpoint folder with its tokenizer",
                "no tokenizer_config.json there: it was not copied completely",
            )
        with reading("model.path", path, "a folder with a tokenizer that transformers can load"):
            self._tokenizer = _load_tokenizer(path)
        if self._tokenizer.eos_token_id is None:
            raise ConfigError(
                "model.path",
                str(path),
                "a tokenizer whose eos_token ends an assistant turn",
                "it has none; set eos_token in tokenizer_config.json",
            )
        self.image_tokens = _read_image_tokens(path, self._tokenizer)
        self._chat_template = ChatTemplate(self._tokenizer, self.image_tokens)
        if self.image_tokens is not None and not self._chat_template.renders_images:
            # Older folders have the template with images only where the processor reads it.
            self._tokenizer.chat_template = _processor_chat_template(path)
        self.folder = str(path.resolve())

    @property
    def eos_id(self) -> int:
        """Id of the token that ends an assistant turn."""
        return int(self._tokenizer.eos_token_id)

    @property
    def vocab_size(self) -> int:
        """Number of tokens, including added tokens."""
        return len(self._tokenizer)

    @property
    def control_tokens(self) -> tuple[str, ...]:
        """Texts of the special tokens, of added tokens that start like a tag, and template tags."""
        template = self._chat_template
        return tuple(sorted({*template.control_tokens, *template.template_tags}))

    def added_token_id(self, text: str) -> int | None:
        """Return the id of the added token with this text, or None."""
        token_id = self._tokenizer.get_added_vocab().get(text)
        return None if token_id is None else int(token_id)

    def encode(self, text: str) -> list[int]:
        """Return the token ids of exactly this text; special tokens in it become plain text."""
        return self._chat_template.encode_plain(replace_lone_surrogates(text))

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of the ids without special tokens and with all spaces."""
        return _decode_ids(self._tokenizer, token_ids, skip_special_tokens=True)

    def survives_decoding(self, text: str) -> bool:
        """Return whether `text` is decoded unchanged, which special tokens are not."""
        return self.decode(_encode_text(self._tokenizer, text)) == text

    def decode_with_special_tokens(self, token_ids: Sequence[int]) -> str:
        """Return the text of the ids, including special tokens."""
        return _decode_ids(self._tokenizer, token_ids, skip_special_tokens=False)

    def apply_chat_template(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Return the ids of the conversation with `tools` rendered by the template."""
        return self._chat_template.encode(
            messages, tools, add_generation_prompt=add_generation_prompt, variables=variables
        )

    @property
    def renders_tools(self) -> bool:
        """Whether the chat template writes the schemas of tools; some templates ignore them."""
        return self._chat_template.renders_tools

    def encode_next_turn(
        self, messages: Sequence[Message], variables: Mapping[str, Any] | None = None
    ) -> list[int]:
        """Return the ids between an assistant turn's eos and the next assistant turn."""
        return self._chat_template.encode_next_turn(messages, variables)

    def encode_assistant_turn(self, text: str) -> list[int]:
        """Return the ids, with end of turn, of an assistant turn that the policy did not sample."""
        return self._chat_template.encode_assistant_turn(text)

    @property
    def turn_end_text(self) -> str:
        """Text that the template writes after the last assistant turn."""
        return self._chat_template.turn_end_text()


def _encode_text(tokenizer: Any, text: str, *, is_plain: bool = False) -> list[int]:
    """Return the ids of a text alone; with `is_plain` special tokens in it are plain text.

    The same as the tokenizer's own `encode`, but for the places of the tokens in the text, which
    take a third of its time.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:  # a tokenizer in Python
        ids = tokenizer.encode(text, add_special_tokens=False, split_special_tokens=is_plain)
        return list(ids)
    backend.encode_special_tokens = is_plain
    backend.no_truncation()
    backend.no_padding()
    (encoding,) = backend.encode_batch_fast([text], add_special_tokens=False)
    return list(encoding.ids)


def _decode_ids(tokenizer: Any, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
    """Return the text of ids with all spaces.

    The same as the tokenizer's own `decode`, but for a check of each id's type, which takes as
    long.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:  # a tokenizer in Python
        text = tokenizer.decode(
            list(token_ids),
            skip_special_tokens=skip_special_tokens,
            clean_up_tokenization_spaces=False,
        )
        return str(text)
    return str(backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens))


def _load_tokenizer(folder: Path) -> Any:
    """Load the tokenizer, without `AutoTokenizer` for known classes.

    `AutoTokenizer` imports torch and model classes, which the tokenizers do not need and which
    takes several seconds.
    """
    # The modules of transformers are imported on first use, so this import alone is fast.
    import transformers

    loader = getattr(transformers, _tokenizer_class_name(folder) or "AutoTokenizer")
    return loader.from_pretrained(folder, local_files_only=True)


def _tokenizer_class_name(folder: Path) -> str | None:
    """Return the tokenizer class of a supported model's folder, or None for any other."""
    if not (folder / "config.json").is_file():
        return None
    model, settings = (
        read_json(folder / name, "model.path", "a file of a Hugging Face checkpoint")
        for name in ("config.json", "tokenizer_config.json")
    )
    name = _TOKENIZER_CLASSES.get(str(settings.get("tokenizer_class")))
    if name is None or "auto_map" in settings:
        return None
    match model.get("model_type"):
        case "qwen2":
            # Folders of this type may name a wrong class, which `AutoTokenizer` overrides.
            return "Qwen2Tokenizer"
        case "llama" | "qwen3" | "qwen3_moe" | "qwen2_5_vl" | "qwen3_vl":
            return name
    return None


def _processor_chat_template(folder: Path) -> str:
    """Return the template in chat_template.json, which older processors read."""
    expected = "a chat template that renders images, in the tokenizer's files or chat_template.json"
    settings = read_json(folder / "chat_template.json", "model.path", expected)
    return str(settings.get("chat_template"))


def _read_image_tokens(folder: Path, tokenizer: Any) -> ImageTokens | None:
    """Return the image tokens of a vision-language model's folder, None for any other.

    Raises:
        ConfigError: one of them is an ordinary token, which text could contain.
    """
    tokens = find_image_tokens(folder)
    if tokens is None:
        return None
    added = tokenizer.added_tokens_decoder
    for token_id in tokens.all_ids:
        if token_id not in added or not added[token_id].special:
            raise ConfigError(
                "model.path",
                str(folder),
                f"a tokenizer that declares token {token_id} special, which config.json names as a "
                "token of images",
                "tokenizer and config.json of different models",
            )
    return tokens
