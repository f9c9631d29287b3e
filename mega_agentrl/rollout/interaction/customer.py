"""The customer of the order game (`data.orders`): answers questions, and judges the order.

The prompt's `interaction_kwargs` hold the `values` by attribute and the `wanted` attributes. After
the assistant's first message, whatever it says, the customer names the wanted attributes. A
question is answered with the attribute's value; anything else ends the game. The final reward is 1
if it ended with an order of all wanted attributes with their values, else 0.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from mega_agentrl.data.orders.orders import (
    ATTRIBUTES,
    NUM_WANTED,
    format_request,
    format_value,
    parse_order,
    parse_question,
)
from mega_agentrl.errors import InputError
from mega_agentrl.rollout.interaction.base import Interaction, Reply

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from mega_agentrl.types.records import Message


@dataclass(slots=True)
class _CustomerState:
    values: Mapping[str, str]
    wanted: Sequence[str]
    is_greeted: bool = False
    is_correct: bool = False


class Customer(Interaction):
    """Sends a request and one answer for each wanted attribute, and no more."""

    name = "customer"
    timeout_s = 5.0
    max_turns = 1 + NUM_WANTED

    def check_kwargs(self, kwargs: Mapping[str, Any]) -> None:
        """Raise `ValueError` unless all attributes have values and the wanted ones are known."""
        values, wanted = kwargs.get("values"), kwargs.get("wanted")
        if not isinstance(values, dict) or set(values) != set(ATTRIBUTES):
            expected = f"a value of each of {', '.join(ATTRIBUTES)}"
            raise InputError("interaction_kwargs.values", values, expected)
        if not isinstance(wanted, list) or not wanted or not set(wanted) <= set(ATTRIBUTES):
            expected = f"a list of some of {', '.join(ATTRIBUTES)}"
            raise InputError("interaction_kwargs.wanted", wanted, expected)

    async def create(self, kwargs: Mapping[str, Any]) -> _CustomerState:
        """Start a game with `values` and `wanted` of `kwargs`."""
        return _CustomerState(kwargs["values"], kwargs["wanted"])

    async def respond(self, state: _CustomerState, messages: Sequence[Message]) -> Reply:
        """Answer the last message, or end the game."""
        if not state.is_greeted:
            state.is_greeted = True
            return Reply(text=format_request(state.wanted))
        text = str(messages[-1]["content"])
        attribute = parse_question(text)
        if attribute is not None:
            return Reply(text=format_value(attribute, state.values[attribute]))
        state.is_correct = parse_order(text) == {name: state.values[name] for name in state.wanted}
        return Reply(is_last=True)

    async def fork(self, state: _CustomerState) -> _CustomerState:
        """Copy the state."""
        return replace(state)

    async def calc_reward(self, state: _CustomerState) -> float:
        """Return 1 if the game ended with the wanted order, else 0."""
        return float(state.is_correct)
