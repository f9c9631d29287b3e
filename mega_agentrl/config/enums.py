"""Enumerations of the configuration; every name equals its value, as Hydra requires.

To add a choice:

1. Add the member here, with its docstring.
2. Write the code behind it; branching rules register themselves.
3. Refuse settings that exclude it in `config.checks`, with a test in `tests/config/checks`.
4. Run `python tools/make_config_reference.py`.
"""

from __future__ import annotations

from enum import StrEnum


class Choice(StrEnum):
    """A choice of a setting; a list of them reads like a list of their names in messages."""

    def __repr__(self) -> str:
        return repr(self.value)


class Branching(Choice):
    """Rule that decides where a trajectory forks."""

    none = "none"
    """No branching."""
    after_result = "after_result"
    """ARPO's rule (arXiv 2507.19849)."""
    aepo = "aepo"
    """AEPO's rule, which penalizes consecutive forks."""
    at2po = "at2po"
    """AT2PO's rule, which samples the turns of highest entropy anew when the roots have ended."""
    appo = "appo"
    """APPO's rule, which samples the tokens of highest entropy anew when the roots have ended."""
    released = "released"
    """ARPO's published code."""


class ForkBudgetMode(Choice):
    """Distribution of a prompt's forks over its paths."""

    partitioned = "partitioned"
    """Each path has its own share."""
    first_come = "first_come"
    """The first path to ask gets a fork. The tree then depends on timing; for comparison only."""


class CallProtocol(Choice):
    """Syntax in which the policy writes tool calls."""

    tags = "tags"
    """ARPO's tags."""
    hermes = "hermes"
    """JSON in `<tool_call>`, as Hermes models do."""


class InvalidCallAction(Choice):
    """Response to a tool call that cannot be run."""

    answer = "answer"
    """The policy gets an error message."""
    stop = "stop"
    """The trajectory ends."""


class TemplateCheck(Choice):
    """Differences from the full chat template that are reported."""

    strict = "strict"
    """All differences."""
    ignore_strippable = "ignore_strippable"
    """All differences except white space."""
    off = "off"
    """None."""


class FilterMetric(Choice):
    """Metric of a trajectory whose group mean decides whether a group is trained on."""

    none = "none"
    """No filter."""
    accuracy = "accuracy"
    """Whether the answer is correct."""
    reward = "reward"
    """The reward."""


class RolloutCorrection(Choice):
    """Importance weights for the mismatch between the engine's and the policy's log-probs."""

    none = "none"
    """No correction."""
    token_truncate = "token_truncate"
    """Weights per token, truncated at C."""
    token_mask = "token_mask"
    """Weights per token; tokens above C are masked."""
    sequence_truncate = "sequence_truncate"
    """Weights per sequence, truncated at C."""
    sequence_mask = "sequence_mask"
    """Weights per sequence; sequences above C are masked."""


class OldLogProbs(Choice):
    """Log-probs that the ratios of a loss are taken to."""

    policy = "policy"
    """Log-probs of the policy at the start of the update."""
    engine = "engine"
    """Log-probs that the tokens were sampled with; the ratios then also correct for the difference
    between engine and policy, and for older weights."""


class KlPlacement(Choice):
    """Quantity to which the KL penalty is applied."""

    loss = "loss"
    """Added to the loss."""
    reward = "reward"
    """Subtracted from the reward."""


class CotBlocks(Choice):
    """Parts of a response that count as its chain of thought."""

    first = "first"
    """Between the first markers."""
    all = "all"
    """Between the first markers of every assistant turn."""
    response = "response"
    """All tokens of the policy; needs no markers."""


class AresMode(Choice):
    """Variant of ARES."""

    off = "off"
    """No ARES."""
    paper = "paper"
    """The published rules, with active controllers."""
    released = "released"
    """The published code."""


class FunctionCallMatch(Choice):
    """Comparison of function calls with the expected ones."""

    ast = "ast"
    """Calls are parsed and compared as sets."""
    ast_ordered = "ast_ordered"
    """Calls are parsed and compared in order."""
    bfcl = "bfcl"
    """Like `ast`, but as BFCL: texts without case and some punctuation, numbers not as texts."""
    string = "string"
    """Calls are compared as text."""


class LossAggregation(Choice):
    """Reduction of per-token losses to a scalar."""

    token_mean = "token_mean"
    """Mean over all tokens."""
    seq_mean_token_sum = "seq_mean_token_sum"
    """Sum over the tokens of a trajectory, mean over trajectories."""
    seq_mean_token_mean = "seq_mean_token_mean"
    """Mean over the tokens of a trajectory, mean over trajectories."""
    seq_sum_norm = "seq_sum_norm"
    """Sum over all tokens, divided by the number of trajectories and by
    `rollout.max_response_tokens` (Dr. GRPO)."""


class KlEstimator(Choice):
    """Estimator of the KL divergence from the reference policy, see http://joschu.net/blog/kl-approx.html."""

    k1 = "k1"
    """The log-ratio."""
    abs = "abs"
    """Absolute value of the log-ratio."""
    k2 = "k2"
    """Half of the squared log-ratio."""
    k3 = "k3"
    """r - 1 - log r: unbiased and never negative."""


class Truncation(Choice):
    """Treatment of prompts over `data.max_prompt_tokens`; cuts keep the generation prompt."""

    error = "error"
    """The run ends with an error."""
    drop = "drop"
    """The prompt is dropped."""
    left = "left"
    """The prompt is cut on the left."""
    right = "right"
    """The prompt is cut on the right."""
    middle = "middle"
    """The prompt is cut in the middle."""


class PromptOrder(Choice):
    """Order of the training prompts."""

    shuffled = "shuffled"
    """Shuffled in each epoch."""
    file = "file"
    """Prompts keep the order of the files."""
    difficulty = "difficulty"
    """Shuffled; prompts that the policy answers about half of the time come more often."""


class Dtype(Choice):
    """Dtype of the weights in the forward pass, of the policy and of the engines."""

    auto = "auto"
    """bfloat16 on GPUs, float32 on CPUs."""
    float32 = "float32"
    """float32."""
    bfloat16 = "bfloat16"
    """bfloat16."""

    def resolve(self, *, on_gpu: bool) -> Dtype:
        """Return the dtype itself, or the one that `auto` stands for."""
        if self is not Dtype.auto:
            return self
        return Dtype.bfloat16 if on_gpu else Dtype.float32


class Recompute(Choice):
    """Activations that a training pass drops and computes again in the backward pass."""

    none = "none"
    """Keep all activations: the fastest."""
    selective = "selective"
    """Recompute the activations inside MLPs and experts, the widest of a layer; the tokens of a
    mixture of experts are sent to their experts a second time."""
    full = "full"
    """Keep only the input of each layer; every layer runs its forward pass twice."""


class TreeAttention(Choice):
    """Kernel of the attention over packed trees."""

    auto = "auto"
    """`triton` where it can be used, otherwise `gather`."""
    gather = "gather"
    """Torch's attention over keys that are gathered along each path."""
    triton = "triton"
    """Triton kernels that gather no keys, for GPUs of compute capability 8.0 or higher, 16-bit
    weights and heads of 64 or 128."""


class RouterReplay(Choice):
    """Recorded experts that a mixture-of-experts policy uses in place of its own choice."""

    off = "off"
    """The routers of the policy choose in each pass."""
    sampled = "sampled"
    """Log-prob pass and update use the experts of the engine that sampled the tokens (R3)."""
    old = "old"
    """The update uses the experts of the log-prob pass (R2)."""


class LoraTarget(Choice):
    """Linear layers that get low-rank adapters, by their Hugging Face names."""

    q_proj = "q_proj"
    """Queries."""
    k_proj = "k_proj"
    """Keys."""
    v_proj = "v_proj"
    """Values."""
    o_proj = "o_proj"
    """Output of the attention."""
    gate_proj = "gate_proj"
    """Of the MLP, or of each expert."""
    up_proj = "up_proj"
    """Of the MLP, or of each expert."""
    down_proj = "down_proj"
    """Of the MLP, or of each expert."""


class LrSchedule(Choice):
    """Learning-rate schedule after the warm-up."""

    constant = "constant"
    """No decay."""
    cosine = "cosine"
    """Cosine decay."""
    linear = "linear"
    """Linear decay."""


class SearchBackend(Choice):
    """Backend that the search tool queries."""

    local = "local"
    """An index of a local corpus."""
    retrieve = "retrieve"
    """A retrieval server."""
    web = "web"
    """A web-search API."""


class PythonMode(Choice):
    """Lifetime of the variables and files of the Python tool."""

    stateless = "stateless"
    """One call."""
    stateful = "stateful"
    """The trajectory."""


class SandboxIsolation(Choice):
    """Protection of this machine from the Python tool's code."""

    bubblewrap = "bubblewrap"
    """bubblewrap namespaces and resource limits."""
    none = "none"
    """No protection; for trusted code only."""


class NetworkAccess(Choice):
    """Network of a program in a sandbox."""

    none = "none"
    """Only a loopback interface of its own."""
    host = "host"
    """The host's network."""


class TransportKind(Choice):
    """Technology that carries the weights from rank to rank."""

    auto = "auto"
    """NCCL between two GPUs, memory within one GPU or one machine without GPUs, otherwise gloo."""
    shared_memory = "shared_memory"
    """Memory that both ranks map, on one machine; two GPUs of it need peer access."""
    nccl = "nccl"
    """NCCL, between two GPUs."""
    gloo = "gloo"
    """TCP between any two ranks; device memory is staged through the host."""


class TrackerName(Choice):
    """A metrics backend beside `metrics.jsonl`.

    wandb and mlflow are optional packages, configured by their own environment variables
    (WANDB_MODE=offline, MLFLOW_TRACKING_URI=sqlite:///...).
    """

    tensorboard = "tensorboard"
    """Event files in the run folder."""
    wandb = "wandb"
    """Weights & Biases."""
    mlflow = "mlflow"
    """MLflow."""
