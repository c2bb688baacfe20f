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
    """A parameter with its type, default, bounds and description.

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
    """Largest number of characters of a string, or of each string of a list."""
    max_items: Annotated[int, Field(ge=1, le=256)] = 256
    description: Prose = ""

    def problem(self, value: object) -> str | None:
        """Return the reason for which `value` is not allowed; None if `value` is allowed."""
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
        """Describe the allowed values: `a whole number, at least 1, at most 100`."""
        kinds = {
            "integer": "a whole number",
            "number": "a number",
            "string": "text",
            "boolean": "true or false",
            "strings": f"a list of at most {self.max_items} texts",
        }
        phrases = [kinds[self.type], *self._bounds()]
        if self.choices:
            phrases = [f"one of {', '.join(self.choices)}"]
        elif self.type in ("string", "strings"):
            least = f"{self.min_length} to " if self.min_length else "at most "
            phrases.append(f"{least}{self.max_length} characters")
        return ", ".join(phrases)

    def _bounds(self) -> Iterator[str]:
        # With fewer than 15 digits, the text could show a rounded bound that the refused value satisfies.
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
    """Condition on several parameters. If the expression `require` is false, `message` describes the fault.

    Example: `{"require": "parameters.a < parameters.b", "fields": ["a", "b"], "message": "must be less than b",
    "remedy": "Make a smaller."}`
    """

    require: Expression
    fields: Annotated[list[ParameterName], Field(min_length=1, max_length=16)]
    message: Annotated[str, Field(min_length=1, max_length=512)]
    remedy: Annotated[str, Field(max_length=512)] = ""


class Input(WireModel):
    """A folder of files that a job must provide, as the job's input with the same `into`.

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
    """A file or directory that must exist below the output directory, with the checks of its content.

    An output that is not `required` may be missing; if it exists, the worker checks and uploads it. `format` checks a
    file: `json` parses; `safetensors` has a header that fits the file's size; `png` and `jpeg` begin with the signature
    of the format. `min_bytes` of a directory counts all of its files.
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
    """A file below the output directory that a job shares with later jobs, because the file is expensive to make.

    Each later job of the tenant with equal parameters in `key` receives the file of a complete job below `dirs.shared`,
    until a later job publishes its own file. The file is optional at the beginning and at the end of a job. Later
    attempts at a job receive the parts that an attempt left below `<path>.parts/`, until the job has a checkpoint.
    Example: `{"path": "words.bin", "key": ["language"], "description": "The dictionary."}`
    """

    path: RelativePath
    key: Annotated[list[ParameterName], Field(min_length=1, max_length=64)]
    description: Prose = ""
    when: Expression | None = None


class Program(WireModel):
    """A program with its arguments. No shell is involved, so an argument with spaces stays one argument.

    Example: `{"run": ["nvidia-smi", "--list-gpus"], "timeout_s": 20}`
    """

    run: Annotated[list[Template], Field(min_length=1, max_length=256)]
    """Arguments. An argument that consists of one expression may give a list, which becomes zero or more arguments."""
    environment: Annotated[dict[EnvironmentName, Template], Field(max_length=64)] = {}
    timeout_s: Seconds | None = None


class RecipeStep(Program):
    """A step of the job: a program that runs until it ends.

    A false `when` leaves the step out. `retries` bounds the reruns after failures in one attempt at the job, and
    `timeout_s` the time of one run. `outputs` must exist when the program ends. `keeps` lists the paths of the output
    directory that later steps need; unset means all paths. `checkpoints`: `directories` are the script's
    `checkpoint-<step>` in the output directory, `session` means that a Baton session writes the checkpoints, and `none`
    that an interrupted step begins anew.
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
    """Checks of the machine and of the training's progress.

    `check` runs before the steps of every attempt. If `check` fails, the attempt ends as a node fault, and another
    machine takes the job. `no_progress_timeout_s` is the default for jobs that do not set their own.
    Example: `{"check": {"run": ["nvidia-smi"], "timeout_s": 30}, "no_progress_timeout_s": 1800}`
    """

    check: Program | None = None
    no_progress_timeout_s: Annotated[int, Field(ge=0, le=86_400)] | None = None


class Recipe(WireModel):
    """A training tool. A version never changes; jobs name `name@version`.

    Steps receive the parameters by templates, and by `BATON_PARAMS`, the path of a JSON file with all parameters.
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
    """Places of the rings that the programs use. The job's ring token opens the rings of the form `baton:NAME`."""
    health: Health = Health()
    cleanup: Annotated[list[Program], Field(max_length=8)] = []
    """Programs that run in order after the steps, also after a failure, unless the attempt has lost its lease."""

    @property
    def id(self) -> str:
        """Return `name@version`."""
        return f"{self.name}@{self.version}"

    def filled(self, given: JsonObject) -> JsonObject:
        """Return the given parameters and the defaults of the others; a null selects the default."""
        defaults: dict[str, Any] = {name: spec.default for name, spec in self.parameters.items()}
        chosen = {name: value for name, value in given.items() if value is not None}
        return {name: value for name, value in {**defaults, **chosen}.items() if value is not None}
