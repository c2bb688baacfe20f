"""A reference page of a recipe in Markdown, made from what it says of itself. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence

from baton.contract.recipes.model import Command, Output, Parameter, Recipe, Step


def page_of(recipe: Recipe) -> str:
    """The page, without a line break at its end."""
    parts = [f"# {recipe.id}", _line(recipe.description), *_parameters(recipe), *_rules(recipe), *_needs(recipe)]
    parts += [*_inputs(recipe), *_steps(recipe), *_outputs(recipe), _usage(recipe)]
    return "\n\n".join(part for part in parts if part)


def _parameters(recipe: Recipe) -> Iterator[str]:
    yield "## Parameters"
    if not recipe.parameters:
        yield "None."
        return
    # what must be given first; the rest as the recipe has it
    ordered = sorted(recipe.parameters.items(), key=lambda item: not item[1].required)
    rows = [(f"`{name}`", _default(spec), spec.expected(), spec.description) for name, spec in ordered]
    yield _table(("parameter", "default", "value", "meaning"), rows)


def _default(spec: Parameter) -> str:
    if spec.required:
        return "required"
    return "none" if spec.default is None else f"`{json.dumps(spec.default, ensure_ascii=False)}`"


def _rules(recipe: Recipe) -> Iterator[str]:
    if recipe.rules:
        yield "Between them:"
        yield _list(f"`{rule.fields[0]}` {rule.message}. {rule.remedy}" for rule in recipe.rules)


def _needs(recipe: Recipe) -> Iterator[str]:
    needs = recipe.requirements
    said = [
        *([f"GPU memory: {needs.min_vram_gib:g} GiB"] if needs.min_vram_gib else []),
        *([f"disk: {needs.min_disk_gib:g} GiB"] if needs.min_disk_gib else []),
        *([f"GPUs: {needs.min_gpus}"] if needs.min_gpus else []),
        *([f"one of {', '.join(needs.gpu_models)}"] if needs.gpu_models else []),
        *([f"the image `{needs.image}`"] if needs.image else []),
    ]
    if recipe.health.check is not None:
        said.append(f"a machine on which {_command(recipe.health.check)} succeeds")
    if recipe.health.no_progress_timeout_s is not None:
        said.append(f"progress at least every {recipe.health.no_progress_timeout_s} s")
    if said:
        yield "## Needs"
        yield _list(said)


def _inputs(recipe: Recipe) -> Iterator[str]:
    if recipe.inputs:
        yield "## Inputs"
        rows = [
            (f"`{one.into}`" if one.into else "(the data directory)", "yes" if one.required else "no", one.description)
            for one in recipe.inputs
        ]
        yield _table(("into", "required", "what"), rows)


def _steps(recipe: Recipe) -> Iterator[str]:
    yield "## Steps"
    yield "\n".join(f"{number}. {_step(step)}" for number, step in enumerate(recipe.steps, 1))
    if recipe.cleanup:
        yield "In the end, however it went:"
        yield _list(map(_command, recipe.cleanup))


def _step(step: Step) -> str:
    said = [f"**{step.name}**: {_command(step)}"]
    if step.description:
        said.append(_line(step.description))
    if step.when:
        said.append(f"Only when `{step.when}`.")
    if step.timeout_s:
        said.append(f"At most {step.timeout_s} s.")
    if step.retries:
        said.append(f"Tried again {step.retries} times.")
    if step.checkpoints == "none":
        said.append("Begins anew after an interruption.")
    return " ".join(said)


def _outputs(recipe: Recipe) -> Iterator[str]:
    if recipe.outputs:
        yield "## Outputs"
        yield _table(("path", "checked", "what"), [(f"`{o.path}`", _checks(o), o.description) for o in recipe.outputs])
    if recipe.shared:
        yield "## Shared with later jobs"
        rows = [(f"`{one.path}`", ", ".join(f"`{name}`" for name in one.key), one.description) for one in recipe.shared]
        yield _table(("path", "with jobs that have the same", "what"), rows)


def _checks(output: Output) -> str:
    said = [
        *([f"only when `{output.when}`"] if output.when else []),
        *([] if output.required else ["may be missing"]),
        *([f"at least {output.min_bytes} bytes"] if output.min_bytes else []),
        *([f"at least {output.min_files} files"] if output.min_files else []),
        *([output.format] if output.format else []),
    ]
    return ", ".join(said) or "is there"


def _usage(recipe: Recipe) -> str:
    required = {name: spec for name, spec in recipe.parameters.items() if spec.required}
    words = ["baton submit --recipe", recipe.id]
    # a list is written as JSON, which the shell must leave alone
    words += [
        f"--set {name}=" + ("""'["...", "..."]'""" if spec.type == "strings" else "...")
        for name, spec in required.items()
    ]
    words += [f"--input PREFIX/:{one.into}" if one.into else "--input PREFIX/" for one in recipe.inputs if one.required]
    return f"## Submit\n\n    {' '.join(words)}"


def _command(command: Command) -> str:
    return f"`{' '.join(command.run)}`"


def _list(items: Iterable[str]) -> str:
    return "\n".join(f"- {_line(item)}" for item in items)


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join(f"| {' | '.join(_line(cell).replace('|', chr(92) + '|') for cell in line)} |" for line in lines)


def _line(text: str) -> str:
    return " ".join(text.split())
