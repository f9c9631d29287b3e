"""Trains the tokenizer of a tiny model: byte-level BPE on the task's own text.

The texts of `TaskVocabulary.tokens` are single tokens but not special ones, so they survive
decoding. Digits are never merged. Names are shown to the trainer as syllables, so that no merge
spans two of them and held-out names consist of known tokens. All bytes are in the vocabulary, so
any text round-trips.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from mega_agentrl.data.generated.entity_splits import (
    ENTITY_PREFIXES,
    VALUE_PREFIXES,
)

if TYPE_CHECKING:
    from mega_agentrl.types.records import Message

PAD_TOKEN, TURN_START_TOKEN, TURN_END_TOKEN = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
IMAGE_TOKENS = ("<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>")
"""Placeholder of an image, of a video, and the tokens around one, as Qwen's models have them."""
IMAGE_MARKER = "<image>"
"""Text that stands for the next image of a row."""

# TOOL stands for `TaskVocabulary.tool_template`.
CHAT_TEMPLATE = """\
{%- if tools %}
{{- '<|im_start|>system\\nTools:' }}
{%- for tool in tools %}{{- '\\n' }}TOOL{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' }}
{%- if message.content is string %}{{- message.content }}{% else %}
{%- for part in message.content %}
{%- if part.type == 'image' %}{{- '<|vision_start|><|image_pad|><|vision_end|>' }}
{%- else %}{{- part.text }}{% endif %}
{%- endfor %}
{%- endif %}{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskVocabulary:
    """Texts that the tokenizer of a task keeps whole."""

    tokens: tuple[str, ...]
    """Texts that are one token wherever they occur, such as tags."""
    spaced_syllables: tuple[str, ...]
    """Syllables that become a token together with the space before them."""
    syllables: tuple[str, ...]
    """Syllables that become a token without a space."""
    tool_template: str = "{{- tool | tojson }}"
    """Jinja text by which the chat template shows the schema `tool`."""
    has_images: bool = False
    """Whether the tokenizer has `IMAGE_TOKENS`."""

    @property
    def special_tokens(self) -> tuple[str, ...]:
        """Tokens that only the chat template writes."""
        images = IMAGE_TOKENS if self.has_images else ()
        return (PAD_TOKEN, TURN_START_TOKEN, TURN_END_TOKEN, *images)


def train_tokenizer(
    dialogues: Sequence[Sequence[Message]], vocabulary: TaskVocabulary, *, vocab_size: int
) -> PreTrainedTokenizerFast:
    """Train a tokenizer of at most `vocab_size` tokens, with the chat template set."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    added = [AddedToken(text, special=False, normalized=False) for text in vocabulary.tokens]
    special = [AddedToken(text, special=True) for text in vocabulary.special_tokens]
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(added),
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_iter_training_text(dialogues, vocabulary), trainer)
    tokenizer.add_tokens(added)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=TURN_END_TOKEN,
        pad_token=PAD_TOKEN,
        additional_special_tokens=[
            text for text in vocabulary.special_tokens if text not in (PAD_TOKEN, TURN_END_TOKEN)
        ],
        clean_up_tokenization_spaces=False,
        model_max_length=1024,
    )
    fast.chat_template = CHAT_TEMPLATE.replace("TOOL", vocabulary.tool_template)
    return fast


def _iter_training_text(
    dialogues: Sequence[Sequence[Message]], vocabulary: TaskVocabulary
) -> Iterator[str]:
    """Yield syllables first and often, so that their merges outrank those of other words."""
    for _ in range(10 * len(dialogues)):
        yield " ".join(("", *vocabulary.spaced_syllables))
        yield "\n".join(vocabulary.syllables)
    added = re.compile("|".join(map(re.escape, vocabulary.tokens)))
    names = re.compile(f" ?({'|'.join((*ENTITY_PREFIXES, *VALUE_PREFIXES))})[a-z]+")
    for messages in dialogues:
        for message in messages:
            yield message["role"]
            text = message["content"].replace(IMAGE_MARKER, "\n")
            yield names.sub(" ", added.sub("\n", text))
