"""The named choices of the configuration; every name equals its value, as Hydra needs it."""

from __future__ import annotations

from enum import StrEnum


class Branching(StrEnum):
    """Rule that decides where a trajectory forks.

    after_result and aepo are the papers' laws, released repeats ARPO's published code.
    """

    none = "none"
    after_result = "after_result"
    aepo = "aepo"
    released = "released"


class Budget(StrEnum):
    """Whose the fork slots of a prompt are: each path's own share, or who asks first.

    With first_come the tree depends on timing; it is there for comparison.
    """

    partitioned = "partitioned"
    first_come = "first_come"


class CallProtocol(StrEnum):
    """How the policy calls tools: ARPO's tags, or JSON in `<tool_call>` as hermes models do."""

    tags = "tags"
    hermes = "hermes"


class OnBadCall(StrEnum):
    """What a call that cannot be run leads to: an answer that says so, or the end."""

    answer = "answer"
    stop = "stop"


class TemplateCheck(StrEnum):
    """Which differences from the full chat template are reported: all, all but white space."""

    strict = "strict"
    ignore_strippable = "ignore_strippable"
    off = "off"


class FilterKey(StrEnum):
    """Number of a trajectory whose mean decides whether its group is trained on; none: all are."""

    none = "none"
    accuracy = "accuracy"
    reward = "reward"


class Advantage(StrEnum):
    """Estimator of the advantage; remax has a greedy answer to each prompt as the baseline, gae a
    critic."""

    grpo = "grpo"
    rloo = "rloo"
    reinforce_plus_plus = "reinforce_plus_plus"
    reinforce_plus_plus_baseline = "reinforce_plus_plus_baseline"
    arpo_hard = "arpo_hard"
    remax = "remax"
    gae = "gae"


class PolicyLoss(StrEnum):
    """Per-token policy loss; balanced is AEPO's clip, gspo has one ratio a trajectory."""

    clipped = "clipped"
    balanced = "balanced"
    gspo = "gspo"
    cispo = "cispo"


class Correction(StrEnum):
    """Importance weights between the engine's and the policy's log-probs of what was sampled.

    By token or by whole sequence; truncate caps a weight at C, mask drops what is above it.
    """

    none = "none"
    token_truncate = "token_truncate"
    token_mask = "token_mask"
    sequence_truncate = "sequence_truncate"
    sequence_mask = "sequence_mask"


class KlPlace(StrEnum):
    """Where the KL from the reference policy counts."""

    loss = "loss"
    reward = "reward"


class CotBlocks(StrEnum):
    """The chain of thought of a response: between its first markers, between the first markers
    of every assistant turn, or all that the policy wrote (which needs no markers)."""

    first = "first"
    all = "all"
    response = "response"


class AresMode(StrEnum):
    """paper: the published rules, with controllers that act; released: the published code."""

    off = "off"
    paper = "paper"
    released = "released"


class CallMatch(StrEnum):
    """How function calls are compared: parsed, as sets or in order, or as text."""

    ast = "ast"
    ast_ordered = "ast_ordered"
    string = "string"


class Aggregation(StrEnum):
    """How per-token losses become one number."""

    token_mean = "token_mean"
    seq_mean_token_sum = "seq_mean_token_sum"
    seq_mean_token_mean = "seq_mean_token_mean"
    seq_sum_norm = "seq_sum_norm"


class KlKind(StrEnum):
    """Estimator of the KL divergence from the reference policy."""

    k1 = "k1"
    abs = "abs"
    k2 = "k2"
    k3 = "k3"


class Truncation(StrEnum):
    """What happens to a prompt longer than `data.max_prompt_tokens`: an error, left out, or cut at
    its left, its right or in its middle, with the generation prompt kept."""

    error = "error"
    drop = "drop"
    left = "left"
    right = "right"
    middle = "middle"


class PromptOrder(StrEnum):
    """In what order training prompts come: shuffled anew each epoch, as in the files, or shuffled
    with those that the policy answers about half of the time more often (`data.difficulty`)."""

    shuffled = "shuffled"
    file = "file"
    difficulty = "difficulty"


class Dtype(StrEnum):
    """Dtype of the policy's weights in the forward pass; auto is bfloat16 on GPUs only."""

    auto = "auto"
    float32 = "float32"
    bfloat16 = "bfloat16"


class LrSchedule(StrEnum):
    """Course of the learning rate after the warm-up."""

    constant = "constant"
    cosine = "cosine"
    linear = "linear"


class SearchSource(StrEnum):
    """What the search tool asks: an index of a corpus, a retrieval server, a web-search API."""

    local = "local"
    retrieve = "retrieve"
    web = "web"


class PythonMode(StrEnum):
    """Whether the Python tool's variables and files end with a call or with the trajectory."""

    stateless = "stateless"
    stateful = "stateful"


class Isolation(StrEnum):
    """What keeps the Python tool's code from this machine; none is for trusted code only."""

    bubblewrap = "bubblewrap"
    none = "none"


class TrackerName(StrEnum):
    """A place for metrics beside `metrics.jsonl`.

    tensorboard: event files in the run folder. wandb, mlflow: optional packages, set by their
    own environment variables (WANDB_MODE=offline, MLFLOW_TRACKING_URI=sqlite:///...).
    """

    tensorboard = "tensorboard"
    wandb = "wandb"
    mlflow = "mlflow"
