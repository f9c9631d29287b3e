"""Ports: the Protocols through which the layers meet.

`rollout/` talks to engines and tools only through `Generator` and `ToolSession`, `train/`
to the actors only through `Policy`, `Critic` and `RewardModel`; weights move from a
`WeightSource` to a `WeightSink` along a plan that both sides hold. Everything that must
survive a restart is `Stateful`. Concrete classes live in `generator/`, `tool/`, `actor/` and
`runtime/`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, TypeVar, runtime_checkable

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence
    from concurrent.futures import Future
    from pathlib import Path

    from mega_agentrl.types.batch import TrainBatch, UpdateStats
    from mega_agentrl.types.records import (
        BadCall,
        GenerateRequest,
        Generation,
        Message,
        Prompt,
        Score,
        ToolCall,
        ToolOutcome,
        Trajectory,
    )

LayoutT_co = TypeVar("LayoutT_co", covariant=True)
LinkT_contra = TypeVar("LinkT_contra", contravariant=True)
ProofT_co = TypeVar("ProofT_co", covariant=True)
ProofT_contra = TypeVar("ProofT_contra", contravariant=True)


class Generator(Protocol):
    """Samples from the current policy. One or many engines behind one name."""

    @property
    def version(self) -> int:
        """Weight version that is served now."""

    @property
    def can_serve(self) -> bool:
        """Whether some engine takes requests; where none does, they wait for the next weights."""

    async def generate(self, request: GenerateRequest) -> Generation:
        """Run one request to its end.

        Waits for: the engine. Unblocked by: completion, `abort`, engine death.
        Raises `RuntimeError` naming the engine when it is dead or past its deadline.
        """

    async def abort(self, request_id: str) -> None:
        """End a running request; its `generate` returns what it has with finish `aborted`."""

    async def entropies(self, request_id: str) -> tuple[float, ...]:
        """Exact entropies in nats of the tokens a running request has sampled so far."""

    async def pause(self) -> None:
        """Finish or freeze running requests, admit none, drop the prefix cache."""

    async def resume(self) -> None:
        """Serve again."""


class ToolSession(Protocol):
    """All tools of one trajectory, alive as long as it is.

    `create` once, `execute` per call, `calc_reward` then `release` once at the end.
    """

    async def create(self, tools_kwargs: Mapping[str, Mapping[str, Any]]) -> None:
        """Make the tools' state; raises `ValueError` for a tool the registry lacks.

        Here as in `fork` and `calc_reward` a tool that fails raises `faults.ToolFault`.
        """

    async def execute(self, tool: str, arguments: Mapping[str, Any]) -> ToolOutcome:
        """Run one call to a typed outcome; never raises for what the policy wrote."""

    async def fork(self) -> ToolSession:
        """A session with the same state that diverges from here on."""

    async def calc_reward(self) -> dict[str, float]:
        """Final reward by tool name; empty where no tool gives one."""

    async def release(self) -> None:
        """Free everything; safe to call twice."""


class ToolProvider(Protocol):
    """Opens tool sessions and knows how the policy calls tools and how it is answered."""

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """Closing tags after which the engine must stop."""

    @property
    def answers_in_chat(self) -> bool:
        """Whether answers are chat messages of role tool behind a turn that ended, and not
        text inside of the assistant's turn."""

    def open(self) -> ToolSession:
        """A new session, not yet created."""

    def read(self, turn_text: str) -> Sequence[ToolCall | BadCall]:
        """The calls of an assistant turn in order, those that cannot be read among them."""

    def parse(self, turn_text: str) -> ToolCall | None:
        """The call that an assistant turn ends in; None where there is none or it is empty."""

    def render(self, outcome: ToolOutcome) -> str:
        """An outcome as text of the turn, or as content of a message, control tags escaped."""


class TextCodec(Protocol):
    """Text to token ids and back, without special tokens sneaking in."""

    @property
    def eos_id(self) -> int:
        """The id that ends an assistant turn."""

    @property
    def vocab_size(self) -> int:
        """Number of tokens, added ones included."""

    def encode(self, text: str) -> list[int]:
        """Token ids of exactly this text, nothing added."""

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of the ids; special tokens are left out."""


class UserSession(Protocol):
    """The simulated user or environment of one trajectory; not yet created when opened.

    Every step raises `faults.ToolFault` where it fails or is too late.
    """

    @property
    def may_speak(self) -> bool:
        """Whether it has messages left."""

    @property
    def can_fork(self) -> bool:
        """Whether the trajectory may branch."""

    async def create(self) -> None:
        """Make its state."""

    async def respond(self, messages: Sequence[Message]) -> tuple[ToolOutcome, bool]:
        """Its answer to the assistant's last message, and whether nothing more follows."""

    def count_said(self) -> None:
        """Note that an answer was passed on."""

    async def fork(self) -> UserSession:
        """A session with the same state that diverges from here on."""

    async def calc_reward(self) -> dict[str, float]:
        """Final reward by its name; empty where there is none."""

    async def release(self) -> None:
        """Free everything; safe to call twice."""


class Interactions(Protocol):
    """Chooses the user of a prompt."""

    def open(self, prompt: Prompt) -> UserSession | None:
        """A session for a trajectory of the prompt, not yet created; None without a user."""


@runtime_checkable
class ChatCodec(TextCodec, Protocol):
    """A codec with a chat template; message texts never become special tokens."""

    @property
    def end_text(self) -> str:
        """What the template writes behind the text of the last assistant turn."""

    def apply_chat(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        generate: bool = True,
    ) -> list[int]:
        """Ids of the conversation; `tools` are rendered, generate: with a generation prompt."""

    def apply_next_turn(self, messages: Sequence[Message]) -> list[int]:
        """Ids between an assistant turn's eos and the next assistant turn."""

    def raw_text(self, token_ids: Sequence[int]) -> str:
        """Text of the ids, special tokens included."""


class Rubric(Protocol):
    """Scores a finished trajectory."""

    def score(self, trajectory: Trajectory) -> Score | Future[Score]:
        """The reward, or its future where others work on it; does not wait.

        Raises nothing for what the policy wrote. The future raises `faults.RewardFault` where the
        reward cannot be had; it needs no event loop, and cancelling it is enough to forget it.
        """

    def needs_model(self, prompt: Prompt) -> bool:
        """Whether the scores of the prompt's trajectories lack what a `RewardModel` says."""

    def with_model(self, trajectory: Trajectory, value: float) -> Score:
        """The trajectory's score with what the model said of it."""


class Policy(Protocol):
    """The trained model, however many ranks it is cut over. Calls are synchronous."""

    def add_logprobs(self, batch: TrainBatch) -> TrainBatch:
        """Fill `old_logp_BT`, `entropy_BT` and, with a reference, `ref_logp_BT`."""

    def update(self, batch: TrainBatch, kl_weight_BT: Any | None = None) -> UpdateStats:
        """One policy-gradient update; needs `advantage_BT` and `old_logp_BT`."""

    def supervise(self, batch: TrainBatch) -> UpdateStats:
        """One step of maximum likelihood on the masked tokens."""

    def reset_optimizer(self) -> None:
        """Forget the optimizer's moments; the next step starts a new stage."""

    def send_weights(self, generator: Generator, version: int) -> Mapping[str, float]:
        """Put the current weights into every engine; returns bytes and seconds."""

    def set_objective(self, algo: Any, temperature: float) -> None:
        """Train on another objective from here on.

        algo: a `config.algo_schema.AlgoConfig`. temperature: of sampling. Where it needs a
        reference, that is the weights as they are now.
        """

    def save(
        self, folder: Path, extra: Mapping[str, Any] | None = None, keep: int | None = None
    ) -> None:
        """Write a checkpoint; returns when it stands. The reference is not in it.

        extra: plain values that `resume` gives back. keep: how many checkpoints beside and with
        it stay (None: all). Raises `RuntimeError` naming the rank that failed or is too late;
        the checkpoints before are as they were.
        """

    def resume(self, folder: Path) -> dict[str, Any]:
        """Take up a checkpoint, of any layout; returns its `extra`.

        Raises `RuntimeError`, with nothing changed, where it is unfinished, damaged or of
        another model.
        """

    def begin_profile(self) -> None:
        """Begin a trace of what rank 0 does; drops one that was never ended."""

    def end_profile(self, file: Path) -> None:
        """End the trace and write it as a chrome trace."""

    def export(self, folder: Path) -> None:
        """Write a Hugging Face checkpoint folder that transformers and vLLM load."""

    def restart(self) -> None:
        """Make all ranks anew, with the starting weights, after `faults.RankLostError`.

        Any call may raise that: a rank died or hangs, and nothing else is of use from then on.
        """

    def close(self) -> None:
        """End every rank; safe to call twice."""


class Critic(Protocol):
    """Estimates what a trajectory will still earn, token by token. Calls are synchronous."""

    def add_values(self, batch: TrainBatch) -> TrainBatch:
        """Fill `value_BT`, the value before each response token."""

    def update(self, batch: TrainBatch) -> UpdateStats:
        """One update towards `return_BT`; needs `value_BT` from before it."""

    def save(
        self, folder: Path, extra: Mapping[str, Any] | None = None, keep: int | None = None
    ) -> None:
        """Write a checkpoint; as `Policy.save`."""

    def resume(self, folder: Path) -> dict[str, Any]:
        """Take up a checkpoint; as `Policy.resume`."""

    def reset(self) -> None:
        """Forget all that was learned or taken up: as at the start. Free where that is nothing."""

    def close(self) -> None:
        """End every rank; safe to call twice."""


class RewardModel(Protocol):
    """A learned judge of whole trajectories. Calls are synchronous."""

    def scores(self, batch: TrainBatch) -> Any:
        """[B] float32, one score a row; does not touch `reward_B`."""

    def close(self) -> None:
        """End every rank; safe to call twice."""


class WeightSource(Protocol[LayoutT_co, LinkT_contra, ProofT_co]):
    """One rank that holds a shard of the trained weights."""

    def layout(self) -> LayoutT_co:
        """Which rectangles of which Hugging Face tensors this rank holds."""

    def join(self, link: LinkT_contra, regions: Any) -> None:
        """Meet the other ranks of a link; regions: what is to be proven over it."""

    def send(self, key: str, version: int) -> ProofT_co:
        """Send this rank's part over the link of that key; digests of what it holds."""


class WeightSink(Protocol[LayoutT_co, LinkT_contra, ProofT_contra]):
    """An engine that takes weights, through all of its workers; paused meanwhile."""

    async def layout(self) -> LayoutT_co:
        """Which rectangles of which Hugging Face tensors each worker wants."""

    async def connect_weights(self, link: LinkT_contra) -> None:
        """Let every worker meet the other ranks of a link."""

    async def receive_weights(self, version: int) -> None:
        """Receive every part; raises `RuntimeError` that names tensor, ranks and bucket."""

    async def confirm_weights(self, version: int, expected: Sequence[ProofT_contra]) -> None:
        """Compare with the trainer's digests, by worker; only then can it serve again."""

    async def probe(self, token_ids: Sequence[int]) -> list[float]:
        """Log-probs of a fixed prompt, to compare with the trainer's."""

    async def refuse(self, reason: str) -> None:
        """Answer requests with the reason until an update has gone through."""


@runtime_checkable
class Stateful(Protocol):
    """Anything a checkpoint must hold."""

    def state_dict(self) -> dict[str, Any]:
        """Plain values that `load_state_dict` takes back."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore exactly; raises `ValueError` naming a missing or unknown key."""


class PromptSource(Stateful, Protocol):
    """Gives the prompts of a step; resumable.

    What `next` gave is out until it is settled or put back; a restored source gives again what
    was out when its state was taken, so that no prompt is lost or comes twice.
    """

    def next(self, num_prompts: int) -> Sequence[Prompt]:
        """The next prompts of the endless stream, those that were put back first."""

    def record(self, accuracies: Mapping[str, float]) -> None:
        """Note how the policy did: shares of correct trajectories, in [0, 1], by prompt id."""

    def settle(self, prompts: Sequence[Prompt]) -> None:
        """These are done with: trained on, or dropped for good."""

    def put_back(self, prompts: Sequence[Prompt]) -> None:
        """These were not needed: `next` gives them first, in this order."""

    @property
    def prompts(self) -> Sequence[Prompt]:
        """All prompts, in the order of the dataset."""

    @property
    def num_left_out(self) -> int:
        """How often a prompt was passed over so far."""

    def leave_out(self, rule: Callable[[int], Collection[str]] | None) -> None:
        """From now on pass over what the rule names for an epoch, by prompt id; None: nothing."""
