"""The recipe schema: a named, versioned, declarative training tool."""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from contract.base import MAX_PARAMETERS_BYTES, JsonObject, RelativePath, WireModel

ParameterName = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_-]{0,63}$")]


class ParameterSpec(WireModel):
    """One parameter: its type, default and bounds. Example: `{"type": "integer", "default": 600, "minimum": 1}`"""

    type: Literal["integer", "number", "string", "boolean"]
    default: int | float | str | bool | None = None
    required: bool = False
    minimum: float | None = None
    maximum: float | None = None
    choices: Annotated[list[Annotated[str, Field(max_length=256)]], Field(min_length=1, max_length=256)] | None = None
    max_length: Annotated[int, Field(ge=1, le=MAX_PARAMETERS_BYTES)] = 4096
    description: Annotated[str, Field(max_length=1024)] = ""

    def problem(self, value: object) -> str | None:
        """Why `value` is not allowed; None if it is."""
        if value is None:
            return "must not be null" if self.required else None
        if self.type == "boolean":
            return None if isinstance(value, bool) else "must be true or false"
        if self.type == "string":
            if not isinstance(value, str):
                return "must be a string"
            if len(value) > self.max_length:
                return f"must have at most {self.max_length} characters"
            if "\0" in value:
                return "must not contain a NUL character"
            if self.choices and value not in self.choices:
                return f"must be one of {', '.join(self.choices)}"
            return None
        if isinstance(value, bool) or not isinstance(value, int if self.type == "integer" else (int, float)):
            return "must be a whole number" if self.type == "integer" else "must be a number"
        if isinstance(value, float) and not math.isfinite(value):
            return "must be finite"
        # 15 digits: a bound must not be rounded to a number that the value satisfies.
        if self.minimum is not None and value < self.minimum:
            return f"must be at least {self.minimum:.15g}"
        if self.maximum is not None and value > self.maximum:
            return f"must be at most {self.maximum:.15g}"
        return None


class Recipe(WireModel):
    """A training tool. The command is run with `BATON_PARAMS` naming a JSON file of the parameters;
    with `pass_parameters: flags` they are appended as `--name=value` (and `--name` for true) as well.

    Example: `{"name": "digits", "version": 1, "title": "...", "command": ["python", "-m",
    "gpu_client.training.digits"], "parameters": {}, "outputs": ["model.safetensors"]}`
    """

    name: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9-]{0,62}$")]
    version: Annotated[int, Field(ge=1, le=999_999)]
    title: Annotated[str, Field(max_length=256)]
    command: Annotated[list[Annotated[str, Field(max_length=4096)]], Field(min_length=1, max_length=256)]
    pass_parameters: Literal["file", "flags"] = "file"
    parameters: Annotated[dict[ParameterName, ParameterSpec], Field(max_length=256)] = {}
    outputs: Annotated[list[RelativePath], Field(max_length=64)] = []

    @property
    def id(self) -> str:
        """`name@version`."""
        return f"{self.name}@{self.version}"

    @model_validator(mode="after")
    def _defaults_are_allowed(self) -> Self:
        for name, spec in self.parameters.items():
            problem = None if spec.default is None else spec.problem(spec.default)
            if problem:
                raise ValueError(f"default of parameter {name!r} {problem}")
        return self

    def problems(self, given: JsonObject) -> list[tuple[str, str]]:
        """What is wrong with the given parameters: pairs of parameter name and reason."""
        found = [(name, f"is not a parameter of {self.id}") for name in given if name not in self.parameters]
        for name, spec in self.parameters.items():
            if name not in given:
                if spec.required:
                    found.append((name, "is required"))
                continue
            problem = spec.problem(given[name])
            if problem:
                found.append((name, problem))
        return found

    def filled(self, given: JsonObject) -> JsonObject:
        """The given parameters with defaults for the others; null asks for the default too."""
        defaults: dict[str, Any] = {name: spec.default for name, spec in self.parameters.items()}
        chosen = {name: value for name, value in given.items() if value is not None}
        return {name: value for name, value in {**defaults, **chosen}.items() if value is not None}

    def command_for(self, parameters: JsonObject) -> list[str]:
        """The command line for filled parameters."""
        if self.pass_parameters == "file":
            return list(self.command)
        flags = [
            f"--{name}" if value is True else f"--{name}={value}"
            for name, value in parameters.items()
            if value is not False
        ]
        return [*self.command, *flags]
