"""Tokenizer folders that imitate three model families, and an engine with scripted turns.

The vocabulary is bytes plus the special tokens and tags of the family. The templates are short
versions with the families' characteristics: Qwen 2.5 groups tool answers, Qwen 3 drops old
reasoning and adds empty reasoning to the last turn, Llama 3 has a bos token, trims messages and
quotes tool answers. `save_vision_folder` adds to Qwen 2.5 what a vision-language model's
folder has, without weights.
"""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from mega_agentrl.data.encoding.codec import HFCodec
from mega_agentrl.types.records import FinishReason, Generation

FAMILIES = ("qwen25", "qwen3", "llama3")
TEMPLATES = Path(__file__).parent / "data" / "templates"
QWEN = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
LLAMA = (
    "<|begin_of_text|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eom_id|>",
    "<|eot_id|>",
)
VISION = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
TAGS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")


def save_tokenizer(family: str, folder: Path, change=lambda template: template) -> Path:
    """Save a folder that `HFCodec` loads; `change` edits the family's chat template."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({char: i for i, char in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = LLAMA if family == "llama3" else QWEN
    if family == "qwen25vl":
        special = (*VISION, *QWEN)
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in special])
    if family != "llama3":
        tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in TAGS])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=special[-1],
        bos_token=special[0] if family == "llama3" else None,
        pad_token=special[0],
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = change((TEMPLATES / f"{family}.jinja").read_text(encoding="utf-8"))
    fast.save_pretrained(folder)
    return folder


def save_vision_folder(folder: Path, model_type: str = "qwen2_5_vl") -> Path:
    """Save tokenizer, config.json and preprocessor_config.json of a vision-language model."""
    from tests.vision_models import write_preprocessor_config  # imports torch

    save_tokenizer("qwen25vl", folder)
    ids = {text: 256 + index for index, text in enumerate(VISION)}
    config = {
        "model_type": model_type,
        "vision_config": {},
        "vision_start_token_id": ids["<|vision_start|>"],
        "vision_end_token_id": ids["<|vision_end|>"],
        "image_token_id": ids["<|image_pad|>"],
        "video_token_id": ids["<|video_pad|>"],
    }
    (folder / "config.json").write_text(json.dumps(config))
    write_preprocessor_config(folder)
    return folder


class Script:
    """An engine with one scripted turn per request, ended by eos unless it ends in `CUT`."""

    CUT = "\0"
    version = 1

    def __init__(self, codec: HFCodec, turns: list[str]) -> None:
        self.requests = []
        self._turns = []
        for text in turns:
            ids = codec.encode(text.removesuffix(self.CUT))
            is_cut = text.endswith(self.CUT)
            self._turns.append((ids if is_cut else [*ids, codec.eos_id], is_cut))

    async def generate(self, request):
        token_ids, is_cut = self._turns[len(self.requests)]
        self.requests.append(request)
        finish = FinishReason.stop if is_cut else FinishReason.eos
        if len(token_ids) > request.max_tokens:
            token_ids, finish = token_ids[: request.max_tokens], FinishReason.length
        return Generation(
            request_id=request.request_id,
            token_ids=tuple(token_ids),
            logps=(-1.0,) * len(token_ids),
            entropies=(1.0,) * len(token_ids),
            argmax_ids=tuple(token_ids),
            finish_reason=finish,
            stop_string=None,
            version=1,
        )

    async def abort(self, request_id):
        pass
