"""Protocols between the layers.

`rollout/` uses engines and tools through `Generator` and `ToolSession`. `train/` uses the trained
models through `Policy`, `Critic` and `RewardModel`. Weights move from a `WeightSource` to a
`WeightSink` along a plan that both sides know. Objects whose state belongs in a checkpoint are
`Stateful`. The classes that implement these protocols live in `generator/`, `tool/`, `actor/` and
`runtime/`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, TypeVar, runtime_checkable

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence
    from concurrent.futures import Future
    from pathlib import Path

    import torch

    from mega_agentrl.types.batch import TrainBatch, UpdateStats
    from mega_agentrl.types.images import ImageInput, PlacedImage
    from mega_agentrl.types.records import (
        AssistantText,
        GenerateRequest,
        Generation,
        InvalidToolCall,
        Message,
        Prompt,
        RolloutTree,
        Score,
        ToolCall,
        ToolOutcome,
        Trajectory,
    )

LayoutT_co = TypeVar("LayoutT_co", covariant=True)
TransferGroupT_contra = TypeVar("TransferGroupT_contra", contravariant=True)
DigestsT_co = TypeVar("DigestsT_co", covariant=True)
DigestsT_contra = TypeVar("DigestsT_contra", contravariant=True)


class Generator(Protocol):
    """Samples from the current policy with one or more engines."""

    @property
    def version(self) -> int:
        """Weight version that is being served."""

    @property
    def can_serve(self) -> bool:
        """Whether any engine accepts requests; otherwise they wait for the next weights."""

    async def generate(self, request: GenerateRequest) -> Generation:
        """Run a request to completion.

        Waits for the engine; unblocked by completion, `abort` or the engine's death.

        Raises:
            RuntimeError: the engine, which the message names, is dead or timed out.
        """

    async def abort(self, request_id: str) -> None:
        """End a running request; its `generate` returns the partial result as `aborted`."""

    async def pause(self) -> None:
        """Finish or freeze running requests, admit no new ones and drop the prefix cache."""

    async def resume(self) -> None:
        """Serve requests again after `pause`."""


class ToolSession(Protocol):
    """All tools of one trajectory, with the same lifetime.

    Call `create` once, `execute` per call, then `calc_reward` and `release` once at the end.
    """

    async def create(self, tools_kwargs: Mapping[str, Mapping[str, Any]]) -> None:
        """Create the state of the tools.

        Raises:
            ValueError: a tool is not registered.
            ToolSessionError: a tool failed; also raised by `fork` and `calc_reward`.
        """

    async def execute(self, tool: str, arguments: Mapping[str, Any]) -> ToolOutcome:
        """Run a call and return its typed outcome; never raises for what the policy wrote."""

    def show_images(self, images: Sequence[ImageInput]) -> None:
        """Tell the tools which images the policy has been shown, in addition to earlier ones."""

    def watch_waits(self, on_change: Callable[[bool], None]) -> None:
        """Report whenever the tools begin or cease to wait for the run.

        Args:
            on_change: Called with True when calls are under way and all of them wait for the run,
                such as for a free slot, with False when that is over.
        """

    async def fork(self) -> ToolSession:
        """Return a session with a copy of the state."""

    async def calc_reward(self) -> dict[str, float]:
        """Return the final reward by tool name; empty if no tool gives one."""

    async def release(self) -> None:
        """Free all resources; safe to call twice."""


class ToolProvider(Protocol):
    """Opens tool sessions and implements the call protocol of the policy."""

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """Closing tags after which the engine must stop generating."""

    @property
    def uses_tool_messages(self) -> bool:
        """Whether answers are chat messages with the role `tool` after the assistant's turn.

        Otherwise they are text within the assistant's turn.
        """

    def open_session(self) -> ToolSession:
        """Return a new session, on which `create` has not been called."""

    def parse_calls(self, turn_text: str) -> Sequence[ToolCall | InvalidToolCall]:
        """Return the calls of an assistant turn in order, including invalid ones."""

    def split_turn(self, turn_text: str) -> AssistantText:
        """Take an assistant turn apart into reasoning, content and valid calls."""

    def render_outcome(self, outcome: ToolOutcome) -> str:
        """Return an outcome as text for the policy, control tags escaped."""


class ImageLoader(Protocol):
    """Loads the images of conversations, and checks those of tools' answers."""

    async def load(self, images: Sequence[PlacedImage]) -> tuple[PlacedImage, ...]:
        """Return the images with their pixels.

        Raises:
            ToolSessionError: an image cannot be loaded.
        """

    def load_trees(self, trees: Sequence[RolloutTree]) -> list[RolloutTree]:
        """Return copies of trees, to be packed for training, whose images have their pixels.

        Raises:
            ToolSessionError: an image cannot be loaded.
        """

    async def check(self, data: bytes, where: str) -> ImageInput:
        """Return the record of an image file that somebody else has made.

        The file is parsed and decoded in a thread, once: the same bytes give the same record, which
        holds them.

        Args:
            data: The file.
            where: Place of the image, for the error.

        Raises:
            ConfigError: it is no image that the model can be shown.
        """

    async def check_answer(self, outcome: ToolOutcome) -> ToolOutcome:
        """Return the outcome of a call with records of its images, or an error in its place."""

    def locate(
        self, token_ids: Sequence[int], images: Sequence[ImageInput]
    ) -> tuple[PlacedImage, ...]:
        """Return where the images, in order, stand among token ids."""

    def placeholder_ids(self, image: ImageInput) -> list[int]:
        """Return the tokens of an image: start, a placeholder for each feature, end."""


class TextCodec(Protocol):
    """Converts text to token ids and back; text never becomes special tokens."""

    @property
    def eos_id(self) -> int:
        """Id of the token that ends an assistant turn."""

    @property
    def vocab_size(self) -> int:
        """Number of tokens, including added tokens."""

    def encode(self, text: str) -> list[int]:
        """Return the token ids of exactly this text."""

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of the ids without special tokens."""


class InteractionSession(Protocol):
    """The simulated user or environment of one trajectory.

    Every step raises `ToolSessionError` if it fails or times out.
    """

    @property
    def can_respond(self) -> bool:
        """Whether the user has messages left."""

    @property
    def can_fork(self) -> bool:
        """Whether the session can be forked, so that the trajectory may branch."""

    async def create(self) -> None:
        """Create the session's state."""

    async def respond(self, messages: Sequence[Message]) -> tuple[ToolOutcome, bool]:
        """Return the answer to the assistant's last message, and whether the conversation ends."""

    def record_response(self) -> None:
        """Count an answer that was passed on to the policy."""

    async def fork(self) -> InteractionSession:
        """Return a session with a copy of the state."""

    async def calc_reward(self) -> dict[str, float]:
        """Return the final reward by name; empty if there is none."""

    async def release(self) -> None:
        """Free all resources; safe to call twice."""


class InteractionProvider(Protocol):
    """Opens sessions of simulated users."""

    def open_session(self, prompt: Prompt) -> InteractionSession | None:
        """Return a session, on which `create` has not been called, or None without a user."""


@runtime_checkable
class ChatCodec(TextCodec, Protocol):
    """A text codec with a chat template; message texts never become special tokens."""

    @property
    def turn_end_text(self) -> str:
        """Text that the template renders after the last assistant turn."""

    def apply_chat_template(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Return the ids of a conversation, in which the template renders the schemas `tools`.

        `variables` are variables of the template, such as `enable_thinking`.
        """

    def encode_next_turn(
        self, messages: Sequence[Message], variables: Mapping[str, Any] | None = None
    ) -> list[int]:
        """Return the ids between an assistant turn's end and the next assistant turn."""

    def encode_assistant_turn(self, text: str) -> list[int]:
        """Return the ids, with end of turn, of an assistant turn that the policy did not sample."""

    def decode_with_special_tokens(self, token_ids: Sequence[int]) -> str:
        """Return the text of the ids, including special tokens."""


class Rubric(Protocol):
    """Computes the reward of finished trajectories."""

    def score(self, trajectory: Trajectory) -> Score | Future[Score]:
        """Return the reward, or its future if another process computes it; never blocks.

        Never raises for what the policy wrote. The future raises `RewardError` if the reward cannot
        be computed. It needs no event loop and may be cancelled.
        """

    def needs_reward_model(self, prompt: Prompt) -> bool:
        """Return whether the prompt's trajectories also need the score of a `RewardModel`."""

    def add_model_score(self, trajectory: Trajectory, value: float) -> Score:
        """Return the trajectory's score with the reward model's value added."""


class Policy(Protocol):
    """The trained model, over any number of ranks. Calls are synchronous."""

    def compute_log_probs(self, batch: TrainBatch) -> TrainBatch:
        """Fill `old_logp_BT`, `entropy_BT` and, with a reference, `ref_logp_BT`."""

    def update(
        self,
        batch: TrainBatch,
        kl_weight_BT: torch.Tensor | None = None,
        has_signal_B: torch.Tensor | None = None,
    ) -> UpdateStats:
        """Run one policy-gradient update; needs `advantage_BT` and `old_logp_BT`.

        Rows without signal have no loss; the policy leaves them out.
        """

    def sft_step(self, batch: TrainBatch) -> UpdateStats:
        """Run one maximum-likelihood step on the masked tokens."""

    def reset_optimizer(self) -> None:
        """Reset the optimizer's moments before the next stage of training."""

    def sync_weights(self, generator: Generator, version: int) -> Mapping[str, float]:
        """Send the current weights to every engine; returns metrics such as bytes and seconds."""

    def set_objective(self, algo: Any, temperature: float) -> None:
        """Switch to another training objective.

        If the new objective needs a reference policy, the current weights become the reference.
        `algo` is an `AlgoConfig`; `temperature` is the sampling temperature of the rollouts.
        """

    def start_save(self, folder: Path) -> Any:
        """Start to write the state, without the reference policy, to an empty folder.

        The ranks copy their state first, so that it may change when this returns. Only one save
        may be running.

        Returns:
            A `checkpoint_dir.CheckpointManifest` without files.

        Raises:
            RuntimeError: a rank, which the message names, failed or timed out.
        """

    def save_result(self, wait_s: float) -> Mapping[str, Any] | None:
        """Return a `checkpoint_dir.FileRecord` of every file of the save by name.

        The result is None if a rank has not written its files after `wait_s` seconds.

        Raises:
            RuntimeError: a rank, which the message names, failed or timed out.
        """

    def abandon_save(self) -> None:
        """End the running save, if there is one, so that its folder can be removed."""

    def load_checkpoint(self, folder: Path) -> dict[str, Any]:
        """Load a checkpoint of any parallel layout and return its `extra` values.

        Raises:
            RuntimeError: the checkpoint is incomplete, damaged or of another model. Nothing has
                changed then.
        """

    def start_profile(self) -> None:
        """Start a profiler trace of rank 0; discards one that was never stopped."""

    def stop_profile(self, file: Path) -> None:
        """Stop the profiler and write a Chrome trace."""

    def export_hf(self, folder: Path) -> None:
        """Write a Hugging Face checkpoint folder that transformers and vLLM load."""

    def restart(self) -> None:
        """Recreate all ranks with the initial weights, after a `RankLostError`.

        Any call may raise that error when a rank dies or hangs; afterwards only `restart` and
        `close` may be called.
        """

    def close(self) -> None:
        """Stop every rank; safe to call twice."""


class Critic(Protocol):
    """Estimates the remaining return at each token. Calls are synchronous."""

    def compute_values(self, batch: TrainBatch) -> TrainBatch:
        """Fill `value_BT` with the value before each response token."""

    def update(self, batch: TrainBatch) -> UpdateStats:
        """Run one update towards `return_BT`; needs `value_BT` from before the update."""

    def start_save(self, folder: Path) -> Any:
        """Start a save, with the arguments, result and errors of `Policy.start_save`."""

    def save_result(self, wait_s: float) -> Mapping[str, Any] | None:
        """Return what has been written, with the arguments and errors of `Policy.save_result`."""

    def abandon_save(self) -> None:
        """End the running save, if there is one."""

    def load_checkpoint(self, folder: Path) -> dict[str, Any]:
        """Load a checkpoint, with the result and errors of `Policy.load_checkpoint`."""

    def reset(self) -> None:
        """Restore the initial weights and optimizer; does nothing if they are unchanged."""

    def restart_if_lost(self) -> None:
        """Restart all ranks from the initial weights if one of them was lost."""

    def close(self) -> None:
        """Stop every rank; safe to call twice."""


class RewardModel(Protocol):
    """A learned model that scores whole trajectories. Calls are synchronous."""

    def compute_scores(self, batch: TrainBatch) -> Any:
        """Return [B] float32 scores; `reward_B` does not change."""

    def restart_if_lost(self) -> None:
        """Restart all ranks if one of them was lost."""

    def close(self) -> None:
        """Stop every rank; safe to call twice."""


class WeightSource(Protocol[LayoutT_co, TransferGroupT_contra, DigestsT_co]):
    """A rank that holds a shard of the trained weights."""

    def layout(self) -> LayoutT_co:
        """Return the rectangles of Hugging Face tensors that this rank holds."""

    def join_weight_transfer(self, session: TransferGroupT_contra, regions: Any) -> None:
        """Join the other ranks of a transfer session, and compute digests of `regions` in it."""

    def send_weights(
        self, key: str, version: int, contents: Sequence[str] = ("weights",)
    ) -> DigestsT_co:
        """Send this rank's part in the sessions of a link; returns digests of its regions."""


class WeightSink(Protocol[LayoutT_co, TransferGroupT_contra, DigestsT_contra]):
    """An engine whose workers receive weights while it is paused."""

    async def layout(self) -> LayoutT_co:
        """Return the rectangles of Hugging Face tensors that each worker needs."""

    async def join_weight_transfer(self, session: TransferGroupT_contra, first_rank: int) -> None:
        """Make every worker join the other ranks of a transfer session, from rank `first_rank`."""

    async def receive_weights(self, version: int, contents: Sequence[str] = ("weights",)) -> None:
        """Receive all parts; raises `RuntimeError` naming tensor, ranks and bucket."""

    async def verify_weights(self, version: int, expected: Sequence[DigestsT_contra]) -> None:
        """Compare each worker's digests with the trainer's; only then can the engine serve."""

    async def compute_prompt_log_probs(self, token_ids: Sequence[int]) -> list[float]:
        """Return log-probs of a prompt, to compare with the trainer's."""

    async def refuse_requests(self, reason: str) -> None:
        """Fail all requests with the given reason until an update has succeeded."""


@runtime_checkable
class Stateful(Protocol):
    """An object whose state is part of a checkpoint."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state as plain values."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state exactly; raises `ValueError` naming a missing or unknown key."""


class PromptSource(Stateful, Protocol):
    """A resumable stream of training prompts.

    A prompt that `next_prompts` returned is outstanding until `ack` or `nack`. A restored source
    returns the outstanding prompts again, so that no prompt is lost or used twice.
    """

    def next_prompts(self, num_prompts: int) -> Sequence[Prompt]:
        """Return the next prompts of the endless stream, returned (`nack`) prompts first."""

    def record_accuracies(self, accuracies: Mapping[str, float]) -> None:
        """Record the fraction of correct trajectories, in [0, 1], by prompt id."""

    def ack(self, prompts: Sequence[Prompt]) -> None:
        """Acknowledge prompts that were trained on or dropped for good."""

    def nack(self, prompts: Sequence[Prompt]) -> None:
        """Return prompts that were not used; `next_prompts` gives them first, in this order."""

    @property
    def prompts(self) -> Sequence[Prompt]:
        """All prompts in the order of the dataset."""

    @property
    def num_epochs(self) -> float:
        """Number of passes over the dataset done so far, fractions included."""

    @property
    def num_excluded(self) -> int:
        """Number of times that a prompt was skipped so far."""

    def exclude(self, rule: Callable[[int], Collection[str]] | None) -> None:
        """Skip prompts from now on.

        Args:
            rule: given the epoch, returns the ids of the prompts to skip; None skips none.
        """
