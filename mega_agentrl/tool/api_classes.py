"""Tools that are the methods of the user's API classes, of which each trajectory has instances.

An API class simulates a service with a state, as in the multi-turn part of BFCL: a file system, a
ticket desk. Every public method is a tool; schema and description come from its type hints and
docstring. The user writes the classes and names them in `tool.user_tools_file`::

    - class_name: mega_agentrl.tool.api_classes.ApiClasses
      config:
        classes: [examples/my_api.py:TodoList]    # FILE.py:NAME (from the working folder) or
        check_types: true                         # package.module:NAME
      timeout_s: 5

A trajectory has one instance of each class, `Class()`, which all tools share. If the class has a
method `_load_scenario`, it is called with the class's part of the initial configuration, which the
`create_kwargs` of any of the prompt's tools hold:

    initial_config      JSON text, or an object: the configuration by name of the class
    involved_classes    names of the classes; default: all
    long_context        true calls `_load_scenario(config, long_context=True)`; default: false

A fork copies the instances with `copy.deepcopy`. What a method returns is shown as BFCL shows it: a
text as it is, a dict as JSON, anything else as `str`. An exception of a method is an error of the
policy, which reads its text. Methods run in a thread, one at a time in a trajectory.
"""

from __future__ import annotations

import copy
import inspect
import json
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from mega_agentrl.config.errors import ConfigError
from mega_agentrl.config.user_code import load_user_object
from mega_agentrl.errors import InputError
from mega_agentrl.tool.base import Tool, ToolResponse, ToolSet
from mega_agentrl.tool.function import (
    DEFAULT_MAX_CONCURRENT,
    parameters_schema,
    parse_docstring,
    run_in_thread,
)
from mega_agentrl.tool.function_schema import ALL_ARGUMENTS_AS_JSON
from mega_agentrl.types.records import ToolStatus

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

SCENARIO_KEYS = ("initial_config", "involved_classes", "long_context")
"""Keys of the `create_kwargs` that describe the instances."""
_EXPECTED_CLASS = "a class that can be created without arguments"


@dataclass(slots=True)
class ApiState:
    """The instances of a trajectory."""

    instances: dict[str, Any]
    """Instance by name of its class."""

    def call(
        self, name: str, values: Sequence[Any] = (), named: Mapping[str, Any] | None = None
    ) -> tuple[str, bool]:
        """Call a method.

        Args:
            name: `method`, or `Class.method`.
            values: positional arguments.
            named: arguments by name.

        Returns:
            What the policy reads, and whether the method exists and raised nothing.
        """
        try:
            method = self._find_method(name)
            result = method(*copy.deepcopy(tuple(values)), **copy.deepcopy(dict(named or {})))
        except Exception as error:  # noqa: BLE001  a simulated service may raise anything
            return f"Error during execution: {error}", False
        return _as_text(result), True

    def attributes(self) -> dict[str, dict[str, Any]]:
        """Return the attributes of each instance that do not start with an underscore."""
        return {
            name: {key: value for key, value in vars(instance).items() if not key.startswith("_")}
            for name, instance in self.instances.items()
        }

    def _find_method(self, name: str) -> Any:
        owner, _, method = name.rpartition(".")
        for class_name, instance in self.instances.items():
            if owner in ("", class_name) and method in method_names(type(instance)):
                return getattr(instance, method)
        raise ValueError(f"there is no function {name}")


class ApiClasses(ToolSet):
    """The API classes of a run.

    Args:
        classes: references to classes, `FILE.py:NAME` or `package.module:NAME`.
        check_types: whether to refuse a call whose arguments have other types than the hints,
            which BFCL would run.

    Raises:
        ConfigError: a class cannot be loaded, two have the same name or a method of the same name,
            or a method's parameters have no JSON schema.
    """

    def __init__(self, classes: Sequence[str], check_types: bool = True) -> None:
        self._classes: dict[str, type] = {}
        self._methods: dict[str, ApiMethod] = {}
        for reference in classes:
            api_class = load_user_object(reference, "classes", _EXPECTED_CLASS)
            if not isinstance(api_class, type):
                raise ConfigError("classes", reference, _EXPECTED_CLASS, f"got {api_class!r}")
            if api_class.__name__ in self._classes:
                raise ConfigError("classes", reference, "classes with different names")
            self._classes[api_class.__name__] = api_class
            for name in method_names(api_class):
                if name in self._methods:
                    raise ConfigError(
                        "classes", reference, f"a method name other than {name}", "it is taken"
                    )
                self._methods[name] = ApiMethod(
                    self, name, getattr(api_class(), name), check_types=check_types
                )

    def tools(self) -> Sequence[Tool]:
        """Return one tool for each public method."""
        return list(self._methods.values())

    def tool(self, name: str) -> Tool | None:
        """Return the tool of a method, or None if there is none."""
        return self._methods.get(name)

    def create_state(self, scenario: Mapping[str, Any]) -> ApiState:
        """Return new instances.

        Args:
            scenario: `create_kwargs` with the keys `SCENARIO_KEYS`.

        Raises:
            ValueError: the scenario is malformed or names unknown classes. Errors of the classes
                themselves pass through.
        """
        configs, class_names = self._parse_scenario(scenario)
        instances = {}
        for name in class_names:
            instance = self._classes[name]()
            if hasattr(instance, "_load_scenario"):
                options = {"long_context": True} if scenario.get("long_context") else {}
                instance._load_scenario(copy.deepcopy(configs.get(name, {})), **options)
            instances[name] = instance
        return ApiState(instances)

    def check_scenario(self, scenario: Mapping[str, Any]) -> None:
        """Raise `InputError` for a scenario that `create_state` cannot read."""
        self._parse_scenario(scenario)

    def _parse_scenario(
        self, scenario: Mapping[str, Any]
    ) -> tuple[Mapping[str, Any], Sequence[str]]:
        """Return the configuration by class, and the names of the classes to create."""
        if unknown := sorted(set(scenario) - set(SCENARIO_KEYS)):
            raise InputError("create_kwargs", unknown, f"some of {', '.join(SCENARIO_KEYS)}")
        configs = scenario.get("initial_config", {})
        if isinstance(configs, str):
            try:
                configs = json.loads(configs)
            except (ValueError, RecursionError) as error:
                raise InputError("initial_config", configs, "JSON", f"{error}") from error
        if not isinstance(configs, dict):
            raise InputError("initial_config", configs, "an object")
        class_names = scenario.get("involved_classes") or list(self._classes)
        if unknown := sorted({*class_names, *configs} - set(self._classes)):
            raise InputError(
                "involved_classes, initial_config",
                unknown,
                f"some of {sorted(self._classes)}",
                "tool.user_tools_file lacks a class",
            )
        return configs, class_names


class ApiMethod(Tool):
    """A public method of an API class as a tool.

    Args:
        api: the classes, whose tools share a state.
        name: name of the method.
        method: the method of some instance, for hints and docstring.
        check_types: whether to refuse arguments of other types than the hints.
    """

    text_argument = ALL_ARGUMENTS_AS_JSON
    max_concurrent = DEFAULT_MAX_CONCURRENT

    def __init__(
        self, api: ApiClasses, name: str, method: Any, *, check_types: bool = True
    ) -> None:
        self.name = name
        self.state_group = api
        self._api = api
        self.description, parameter_docs = parse_docstring(inspect.getdoc(method) or "")
        self.parameters = parameters_schema(method, parameter_docs, f"method {name}")
        if not check_types:
            properties = self.parameters["properties"]
            self.parameters["properties"] = {
                parameter: {key: schema[key] for key in ("description", "default") if key in schema}
                for parameter, schema in properties.items()
            }

    def check_kwargs(self, kwargs: Mapping[str, Mapping[str, Any]]) -> None:
        """Check the part of the scenario that this tool's `create_kwargs` hold."""
        self._api.check_scenario(kwargs.get("create_kwargs") or {})

    async def create(self, kwargs: Mapping[str, Any]) -> ApiState:
        """Create the instances of a trajectory."""
        return await run_in_thread(partial(self._api.create_state, kwargs))  # type: ignore[no-any-return]

    async def execute(
        self, state: ApiState, arguments: Mapping[str, Any], kwargs: Mapping[str, Any]
    ) -> ToolResponse:
        """Call the method; an exception of the method is an error of the policy."""
        text, is_ok = await run_in_thread(lambda: state.call(self.name, (), arguments))
        return ToolResponse(text=text, status=ToolStatus.ok if is_ok else ToolStatus.user_error)

    async def fork(self, state: ApiState) -> ApiState:
        """Return a deep copy of the instances."""
        return await run_in_thread(partial(copy.deepcopy, state))  # type: ignore[no-any-return]


def method_names(api_class: type) -> list[str]:
    """Return the names of a class's public methods, in alphabetical order."""
    members = inspect.getmembers(api_class, inspect.isfunction)
    return [name for name, _ in members if not name.startswith("_")]


def _as_text(result: Any) -> str:
    if isinstance(result, str):
        return result
    if not isinstance(result, dict):
        return str(result)
    try:
        return json.dumps(result)
    except (TypeError, ValueError):
        return str(result)
