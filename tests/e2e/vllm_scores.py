"""Log-probs of given token rows with vLLM alone, as anybody would load the folder.

``python vllm_scores.py FOLDER ROWS RESULT``: ROWS a JSON list of token lists, RESULT gets the
log-prob of every token after a row's first.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path


def main() -> None:
    from vllm import LLM, SamplingParams

    folder, rows, result = sys.argv[1:]
    rows = json.loads(Path(rows).read_text())
    llm = LLM(
        model=folder,
        dtype="float32",
        enforce_eager=True,
        skip_tokenizer_init=True,
        max_model_len=128,
        block_size=32,
        disable_log_stats=True,
    )
    settings = SamplingParams(max_tokens=1, prompt_logprobs=1, detokenize=False)
    answers = llm.generate([{"prompt_token_ids": row} for row in rows], settings)
    scores = [
        [
            found[token].logprob
            for token, found in zip(row[1:], answer.prompt_logprobs[1:], strict=True)
        ]
        for row, answer in zip(rows, answers, strict=True)
    ]
    Path(result).write_text(json.dumps(scores))
    # At the interpreter's own exit vLLM aborts where its engine is slow to end.
    llm.llm_engine.engine_core.shutdown()
    os._exit(0)


if __name__ == "__main__":
    main()
