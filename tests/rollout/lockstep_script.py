"""The scripted engine and tools of `golden/arpo_rollout_traces.json`.

One token is one character; the end of a turn is one token. The engine answers from the `outputs` of
the current round; the trajectory of the request determines the row.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import groupby

from mega_agentrl.config.enums import Branching
from mega_agentrl.config.sections.rollout import BranchConfig, RolloutConfig
from mega_agentrl.rollout.branching.lockstep_arpo import LockstepArpoRollout
from mega_agentrl.tool.call_protocol.tags import TagProtocol
from mega_agentrl.types.records import FinishReason, Generation, ToolOutcome, ToolStatus
from tests.algo.golden_values import load_golden
from tests.fakes import EOS, CharCodec, FakeSession, FakeTools, make_context

GOLDEN = load_golden("arpo_rollout_traces")["scenarios"]


@dataclass
class ScriptedEngine:
    """Answers requests with the rows of a trace; `batch` is the `ReleasedCodeRollout` that asks."""

    rounds: list
    batch: object = None
    max_tokens: list = field(default_factory=list)

    version = 1

    async def generate(self, request):
        path_name = request.request_id.rpartition("/")[0]
        (path,) = [one for one in self.batch.trajectories if one.trajectory_id == path_name]
        index = len(self.batch.rounds)
        self.max_tokens.append((index, request.max_tokens))
        (row,) = [
            out for out in self.rounds[index]["outputs"] if out["traj"] == path.trajectory_index
        ]
        text = row["text"] + EOS * row["ends_with_eos"]
        assert len(text) == row["n_tokens"], "one token is one character"
        finish = FinishReason.eos
        if row["finish_reason"] == "length":
            finish = FinishReason.length
        elif row["stop_reason"] is not None:
            finish = FinishReason.stop
        return Generation(
            request_id=request.request_id,
            token_ids=tuple(map(ord, text)),
            logps=(-1.0,) * len(text),
            entropies=(1.0,) * len(text),
            argmax_ids=tuple(map(ord, text)),
            finish_reason=finish,
            stop_string=row["stop_reason"],
            version=1,
            top_logps=(tuple(row["logprobs"]),) * len(text),
        )


@dataclass(kw_only=True)
class Round:
    """What happened in one round. Numbers are in the order of creation in the batch."""

    active: list
    """Paths that sent a request."""
    decisions: list
    """Number of the path and decision, in order."""
    created: list
    """Paths created at the end of the round."""


class ReleasedCodeRollout(LockstepArpoRollout):
    """The rollout with two bugs of the released code, and a record of its rounds.

    baselines: by number of the path; kept from batch to batch. draw: one stream for all prompts.
    """

    def __init__(self, context, prompts, keys, *, baselines, draw):
        super().__init__(context, prompts, keys)
        self._baselines, self._draw = baselines, draw
        self.rounds, self._decisions = [], []

    def _draw_uniform(self, path):
        return self._draw()

    def _decide(self, path):
        decision = super()._decide(path)
        self._decisions.append((path.trajectory_index, decision))
        return decision

    async def _run_round(self):
        active, before = [one.trajectory_index for one in self._active], len(self.trajectories)
        self._decisions = []
        await super()._run_round()
        created = list(range(before, len(self.trajectories)))
        self.rounds.append(Round(active=active, decisions=self._decisions, created=created))


class ScriptedSession(FakeSession):
    """Answers from the table; what raises there is our own fault here."""

    async def execute(self, tool, arguments):
        query = arguments["text"]
        answer = self.provider.table.get(query, f"ok:{query}")
        self.provider.num_calls += 1
        broken = answer == "!raise"
        self.provider.num_failed += broken or not answer
        return ToolOutcome(
            tool=tool,
            status=ToolStatus.infra_error if broken else ToolStatus.ok,
            answer="it raised" if broken else answer,
            latency_s=0.1,
        )

    async def fork(self):
        child = ScriptedSession(self.provider)
        self.provider.sessions.append(child)
        return child


class ScriptedTools(FakeTools):
    """ARPO's tags over the table."""

    def __init__(self, table):
        super().__init__()
        self.table, self.num_calls, self.num_failed = table, 0, 0
        self._tags = TagProtocol({"search": "text", "python": "text"})

    def open_session(self):
        return ScriptedSession(self)

    def parse_final_call(self, turn_text):
        return self._tags.parse(turn_text)

    def render_outcome(self, outcome):
        return self._tags.render(outcome.answer)


class ScriptedCodec(CharCodec):
    def __init__(self, vocab_size):
        self.vocab_size = vocab_size


def context_of(scenario, engine, tools):
    """The settings of a scenario; beam_size is one more than the forks of a decision."""
    config = scenario["config"]
    return make_context(
        RolloutConfig(
            group_size=config["n"],
            branching=Branching.released,
            branch=BranchConfig(
                initial_rollouts=min(config["initial_rollouts"], config["n"]),
                num_forks_per_decision=config["beam_size"] - 1,
                alpha=config["branch_probability"],
                beta=config["entropy_weight"],
            ),
            max_response_tokens=config["response_length"],
            max_tool_calls=config["call_limit"],
            max_turns=1000,
        ),
        generator=engine,
        tools=tools,
        codec=ScriptedCodec(scenario["vocab_size"]),
        max_model_len=100_000,
    )


def runs(mask):
    """Run lengths of a mask, as the golden file has them."""
    return [[value, len(list(same))] for value, same in groupby(mask)]


def shown(token_ids):
    """Text with the end of a turn spelled out."""
    return "".join("<eos>" if token == 0 else chr(token) for token in token_ids)
