"""The recipe language as models. `lint.py` reads documents and finds faults, `rendering.py` makes plans."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Annotated, Any, Literal, Self

from pydantic import Field, StringConstraints, model_validator

from baton.contract.base import MAX_KEY_BYTES, MAX_PARAMETERS_BYTES, JsonObject, RelativePath, WireModel, checked_path
from baton.contract.jobs.job import EnvironmentName
from baton.contract.jobs.policy import Requirements

MAX_TEMPLATE_CHARS = 4096
MAX_STEPS = 32

ParameterName = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_-]{0,63}$")]
PlainName = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9-]{0,62}$")]
Prose = Annotated[str, Field(max_length=2048)]
Template = Annotated[
    str,
    StringConstraints(max_length=MAX_TEMPLATE_CHARS, pattern=r"^[^\x00]*$"),
    Field(description="Text with `{{ expressions }}` in it"),
]
Expression = Annotated[str, Field(min_length=1, max_length=1024, description="An expression, without braces")]
Seconds = Annotated[int, Field(ge=1, le=30 * 86_400)]
_Number = Annotated[float, Field(ge=-1e300, le=1e300)]
_Choice = Annotated[str, Field(max_length=256)]


class Parameter(WireModel):
    """One parameter: its type, default, bounds, and what it is for.

    Example: `{"type": "integer", "default": 600, "minimum": 1, "description": "Optimizer steps."}`
    """

    type: Literal["integer", "number", "string", "boolean", "strings"]
    default: int | float | str | bool | list[str] | None = None
    required: bool = False
    minimum: _Number | None = None
    exclusive_minimum: _Number | None = None
    maximum: _Number | None = None
    exclusive_maximum: _Number | None = None
    multiple_of: Annotated[int, Field(ge=1, le=10**9)] | None = None
    choices: Annotated[list[_Choice], Field(min_length=1, max_length=256)] | None = None
    min_length: Annotated[int, Field(ge=0, le=MAX_PARAMETERS_BYTES)] = 0
    max_length: Annotated[int, Field(ge=1, le=MAX_PARAMETERS_BYTES)] = 4096
    """Characters of a string, or of each of several."""
    max_items: Annotated[int, Field(ge=1, le=256)] = 256
    description: Prose = ""

    def problem(self, value: object) -> str | None:
        """Why `value` is not allowed; None if it is."""
        if value is None:
            return "must not be null" if self.required else None
        if self.type == "boolean":
            return None if isinstance(value, bool) else "must be true or false"
        if self.type == "string":
            return self._problem_of_text(value)
        if self.type == "strings":
            return self._problem_of_texts(value)
        return self._problem_of_number(value)

    def expected(self) -> str:
        """What is allowed, in words: `a whole number, at least 1, at most 100`."""
        kinds = {
            "integer": "a whole number",
            "number": "a number",
            "string": "text",
            "boolean": "true or false",
            "strings": f"a list of at most {self.max_items} texts",
        }
        said = [kinds[self.type], *self._bounds()]
        if self.choices:
            said = [f"one of {', '.join(self.choices)}"]
        elif self.type in ("string", "strings"):
            least = f"{self.min_length} to " if self.min_length else "at most "
            said.append(f"{least}{self.max_length} characters")
        return ", ".join(said)

    def _bounds(self) -> Iterator[str]:
        # 15 digits: a bound must not be rounded to a number that the value satisfies.
        if self.minimum is not None:
            yield f"at least {self.minimum:.15g}"
        if self.exclusive_minimum is not None:
            yield f"more than {self.exclusive_minimum:.15g}"
        if self.maximum is not None:
            yield f"at most {self.maximum:.15g}"
        if self.exclusive_maximum is not None:
            yield f"less than {self.exclusive_maximum:.15g}"
        if self.multiple_of is not None:
            yield f"a multiple of {self.multiple_of}"

    def _problem_of_text(self, value: object) -> str | None:
        if not isinstance(value, str):
            return "must be a string"
        if len(value) > self.max_length:
            return f"must have at most {self.max_length} characters"
        if len(value) < self.min_length:
            return f"must have at least {self.min_length} characters" if value else "must not be empty"
        if "\0" in value:
            return "must not contain a NUL character"
        if self.choices and value not in self.choices:
            return f"must be one of {', '.join(self.choices)}"
        return None

    def _problem_of_texts(self, value: object) -> str | None:
        if not isinstance(value, list):
            return "must be a list of strings"
        if len(value) > self.max_items:
            return f"must have at most {self.max_items} items"
        if self.required and not value:
            return "must not be empty"
        for number, item in enumerate(value):
            problem = self._problem_of_text(item)
            if problem:
                return f"{problem} in item {number}"
        return None

    def _problem_of_number(self, value: object) -> str | None:
        whole = self.type == "integer"
        if isinstance(value, bool) or not isinstance(value, int if whole else (int, float)):
            return "must be a whole number" if whole else "must be a number"
        assert isinstance(value, (int, float))
        if isinstance(value, float) and not math.isfinite(value):
            return "must be finite"
        if self.minimum is not None and value < self.minimum:
            return f"must be at least {self.minimum:.15g}"
        if self.exclusive_minimum is not None and value <= self.exclusive_minimum:
            return f"must be more than {self.exclusive_minimum:.15g}"
        if self.maximum is not None and value > self.maximum:
            return f"must be at most {self.maximum:.15g}"
        if self.exclusive_maximum is not None and value >= self.exclusive_maximum:
            return f"must be less than {self.exclusive_maximum:.15g}"
        if self.multiple_of is not None and value % self.multiple_of:
            return f"must be a multiple of {self.multiple_of}"
        return None


class ParameterRule(WireModel):
    """What must hold between parameters. `require` is an expression; `message` says what is wrong when it is false.

    Example: `{"require": "parameters.a < parameters.b", "fields": ["a", "b"], "message": "must be less than b",
    "remedy": "Make a smaller."}`
    """

    require: Expression
    fields: Annotated[list[ParameterName], Field(min_length=1, max_length=16)]
    message: Annotated[str, Field(min_length=1, max_length=512)]
    remedy: Annotated[str, Field(max_length=512)] = ""


class Input(WireModel):
    """A folder of files that a job brings: it has to have an input whose `into` is this one's.

    Example: `{"into": "instance", "description": "Pictures of the subject."}`
    """

    into: Annotated[str, Field(max_length=MAX_KEY_BYTES)] = ""
    required: bool = True
    description: Prose = ""

    @model_validator(mode="after")
    def _into_is_relative(self) -> Self:
        if self.into:
            checked_path(self.into)
        return self


class Output(WireModel):
    """A file or directory below the output directory that must be there, and what is looked at.

    One that is not `required` may be missing: it is looked at and uploaded where it is there. `format` is looked at in
    a file: `json` parses; `safetensors` has a header that fits the file's size; `png` and `jpeg` begin as such files
    do. A directory is as large as its files together.
    Example: `{"path": "model.safetensors", "min_bytes": 1024, "format": "safetensors"}`
    """

    path: RelativePath
    description: Prose = ""
    when: Expression | None = None
    required: bool = True
    min_bytes: Annotated[int, Field(ge=0, le=2**50)] = 0
    min_files: Annotated[int, Field(ge=0, le=500)] = 0
    format: Literal["json", "safetensors", "png", "jpeg"] | None = None


class Shared(WireModel):
    """A file below the output directory that a job may leave for later ones, because it is dear to make.

    What a complete job has left there is given to each later job of its tenant whose parameters in `key` are the same,
    below `dirs.shared`, until one of these leaves a file of its own: because it had to add something, or could not use
    it. It need not be there, neither at the beginning of a job nor at its end. What an attempt shows below
    `<path>.parts/` while it makes the file is given to later attempts at the job until there is a checkpoint.
    Example: `{"path": "words.bin", "key": ["language"], "description": "The dictionary."}`
    """

    path: RelativePath
    key: Annotated[list[ParameterName], Field(min_length=1, max_length=64)]
    description: Prose = ""
    when: Expression | None = None


class Program(WireModel):
    """One program with its arguments. No shell is involved: an argument stays one, whatever is in it.

    Example: `{"run": ["nvidia-smi", "--list-gpus"], "timeout_s": 20}`
    """

    run: Annotated[list[Template], Field(min_length=1, max_length=256)]
    """An argument that is one expression and nothing else may give a list, which becomes several arguments, or none."""
    environment: Annotated[dict[EnvironmentName, Template], Field(max_length=64)] = {}
    timeout_s: Seconds | None = None


class RecipeStep(Program):
    """One part of the work: a program that runs until it ends.

    `when` false leaves the step out. `retries`: how often it is run again after it failed, in one attempt at the job.
    `timeout_s` is of one run. `outputs` must be there when it ends. `keeps`: what later steps need of the output
    directory; unset means all of it. `checkpoints`: `directories` are `checkpoint-<step>` in the output directory,
    `session` means our session writes them, `none` that the step begins anew when it was interrupted.
    Example: `{"name": "train", "run": ["python", "train.py"], "timeout_s": 86400}`
    """

    name: PlainName
    description: Prose = ""
    when: Expression | None = None
    retries: Annotated[int, Field(ge=0, le=10)] = 0
    retry_wait_s: Annotated[int, Field(ge=0, le=3600)] = 10
    outputs: Annotated[list[Output], Field(max_length=64)] = []
    keeps: Annotated[list[RelativePath], Field(max_length=64)] | None = None
    checkpoints: Literal["directories", "session", "none"] = "directories"


class Health(WireModel):
    """Whether the machine is fit and the training alive.

    `check` runs before the steps of every attempt; where it fails the machine is at fault, and another one gets the
    job. `no_progress_timeout_s` is the job's, unless the job says its own.
    Example: `{"check": {"run": ["nvidia-smi"], "timeout_s": 30}, "no_progress_timeout_s": 1800}`
    """

    check: Program | None = None
    no_progress_timeout_s: Annotated[int, Field(ge=1, le=86_400)] | None = None


class Recipe(WireModel):
    """A training tool. A version never changes; jobs name `name@version`.

    Steps are told the parameters by templates, and by `BATON_PARAMS`, the path of a JSON file of all of them.
    Example: `{"name": "digits", "version": 1, "description": "...", "steps": [{"name": "train", "run":
    ["python", "-m", "gpu_client.training.digits"]}], "outputs": [{"path": "model.safetensors"}]}`
    """

    name: PlainName
    version: Annotated[int, Field(ge=1, le=999_999)]
    description: Annotated[str, Field(min_length=1, max_length=4096)]
    parameters: Annotated[dict[ParameterName, Parameter], Field(max_length=256)] = {}
    rules: Annotated[list[ParameterRule], Field(max_length=64)] = []
    requirements: Requirements = Requirements()
    inputs: Annotated[list[Input], Field(max_length=32)] = []
    steps: Annotated[list[RecipeStep], Field(min_length=1, max_length=MAX_STEPS)]
    outputs: Annotated[list[Output], Field(max_length=64)] = []
    shared: Annotated[list[Shared], Field(max_length=8)] = []
    rings: Annotated[list[Template], Field(max_length=8)] = []
    """Places of rings that the programs use: those of them that are `baton:NAME` are opened to the job."""
    health: Health = Health()
    cleanup: Annotated[list[Program], Field(max_length=8)] = []
    """Run in order when the steps are over, however they ended, unless the job was lost to another machine."""

    @property
    def id(self) -> str:
        """`name@version`."""
        return f"{self.name}@{self.version}"

    def filled(self, given: JsonObject) -> JsonObject:
        """The given parameters with defaults for the others; null asks for the default too."""
        defaults: dict[str, Any] = {name: spec.default for name, spec in self.parameters.items()}
        chosen = {name: value for name, value in given.items() if value is not None}
        return {name: value for name, value in {**defaults, **chosen}.items() if value is not None}
