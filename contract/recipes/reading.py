"""From YAML to plain values, with the place of each; and back. Job files are read with the same scalars.

The YAML is that of JSON: no aliases, no tags, no duplicate keys; `no` is text and `2e-6` a number, as in YAML 1.2.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any

from contract.errors import Fault
from contract.recipes.model import MAX_DOCUMENT_BYTES, Recipe

if TYPE_CHECKING:
    from yaml import Dumper, Node, SafeLoader

MAX_DEPTH = 24
Location = tuple[str | int, ...]


@dataclass
class Document:
    """Plain values, and where each lies: line and column from 1, of a mapping's member those of its key."""

    value: Any = None
    places: dict[Location, tuple[int, int]] = field(default_factory=dict)
    faults: list[Fault] = field(default_factory=list)

    def place(self, location: Location) -> tuple[int, int]:
        """Of a value; of what it lies in, if it is not there itself."""
        while location not in self.places and location:
            location = location[:-1]
        return self.places.get(location, (1, 1))

    def fault(self, location: Location, reason: str, remedy: str = "") -> None:
        """Note one."""
        line, column = self.place(location)
        self.faults.append(Fault(".".join(map(str, location)), reason, remedy, line, column))


def read_document(text: str) -> Document:
    """The values in a YAML text; without any, but with faults, if it is none."""
    import yaml

    document = Document()
    try:
        size_bytes = len(text.encode())
        if size_bytes > MAX_DOCUMENT_BYTES:
            reason = f"the document has {size_bytes} bytes; at most {MAX_DOCUMENT_BYTES} are allowed"
            document.fault((), reason, "Shorten its descriptions.")
            return document
        root = _composed(text)
        if root is not None:
            document.value = _value(root, (), document)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
        place = (mark.line + 1, mark.column + 1) if mark else (1, 1)
        reason = str(getattr(error, "problem", None) or getattr(error, "reason", None) or "unreadable")
        document.faults.append(Fault("", f"not YAML: {reason}", "Check indentation, quotes and colons.", *place))
    except UnicodeEncodeError:
        document.fault((), "the text is not valid Unicode", "Save it as UTF-8.")
    except RecursionError:
        document.fault((), "nested too deeply", f"At most {MAX_DEPTH} levels are allowed.")
    return document


def load_values(text: str) -> Any:
    """The values of a YAML text with the scalars that recipes have, and with anchors and merge keys.

    Raises yaml.YAMLError, RecursionError, and ValueError for a number that is too long.
    """
    import yaml

    return yaml.load(text, _values_loader())  # noqa: S506 - a SafeLoader


def dump(recipe: Recipe) -> str:
    """The recipe as a document: what is not said is left out."""
    import yaml

    value = recipe.model_dump(mode="json", exclude_defaults=True)
    return str(yaml.dump(value, Dumper=_dumper(), sort_keys=False, allow_unicode=True, width=120))


def _composed(text: str) -> Node | None:
    loader = _loader()(text)
    try:
        return loader.get_single_node()
    finally:
        loader.dispose()


def _value(node: Any, location: Location, document: Document) -> Any:
    document.places.setdefault(location, (node.start_mark.line + 1, node.start_mark.column + 1))
    if len(location) > MAX_DEPTH:
        document.fault(location, "nested too deeply", f"At most {MAX_DEPTH} levels are allowed.")
        return None
    if node.tag not in _KINDS:
        document.fault(location, f"the tag {node.tag!r} is not allowed", "Write plain values.")
        return None
    if node.id == "mapping":
        return _mapping(node, location, document)
    if node.id == "sequence":
        return [_value(item, (*location, number), document) for number, item in enumerate(node.value)]
    return _scalar(node, location, document)


def _mapping(node: Any, location: Location, document: Document) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in node.value:
        place = (key.start_mark.line + 1, key.start_mark.column + 1)
        name = key.value if key.id == "scalar" else None
        if not isinstance(name, str) or key.tag == "tag:yaml.org,2002:merge":
            document.faults.append(
                Fault(".".join(map(str, location)), "a key is not plain text", "Write name: value.", *place)
            )
            continue
        if name in found:
            line, _ = document.place((*location, name))
            reason = f"{name!r} is said twice (first in line {line})"
            document.faults.append(Fault(".".join(map(str, (*location, name))), reason, "Keep one of them.", *place))
            continue
        document.places[*location, name] = place
        found[name] = _value(value, (*location, name), document)
    return found


def _scalar(node: Any, location: Location, document: Document) -> Any:
    kind = node.tag.rpartition(":")[2]
    text = node.value
    if kind == "null":
        return None
    if kind == "bool":
        return text.lower() == "true"
    if kind in ("int", "float"):
        if len(text) > 64:
            document.fault(location, "the number is too long", "Numbers have at most 64 characters.")
            return None
        return int(text) if kind == "int" else float(text)
    return text


_PREFIX = "tag:yaml.org,2002:"
_KINDS = frozenset(_PREFIX + name for name in ("null", "bool", "int", "float", "str", "map", "seq"))
_RESOLVERS: Mapping[str, tuple[str, str]] = {
    "null": (r"~|null|Null|NULL|", "~nN\0"),
    "bool": (r"true|True|TRUE|false|False|FALSE", "tTfF"),
    "int": (r"[-+]?[0-9]+", "-+0123456789"),
    "float": (r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?", "-+.0123456789"),
}
"""YAML 1.2's core schema, without the numbers that JSON has not."""


def _resolvers() -> dict[str, list[tuple[str, re.Pattern[str]]]]:
    found: dict[str, list[tuple[str, re.Pattern[str]]]] = {"": [(_PREFIX + "null", re.compile("$"))]}
    for name, (pattern, first) in _RESOLVERS.items():
        for character in first:
            found.setdefault(character, []).append((_PREFIX + name, re.compile(rf"^(?:{pattern})$")))
    return found


@cache
def _loader() -> type[SafeLoader]:
    import yaml

    class Loader(yaml.SafeLoader):
        """Composes nodes; no alias gets through, so that no text grows beyond itself."""

        yaml_implicit_resolvers = _resolvers()

        def compose_node(self, parent: Any, index: Any) -> Any:
            event = self.peek_event()  # type: ignore[no-untyped-call]
            if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None) is not None:
                raise yaml.composer.ComposerError(None, None, "anchors and aliases are not allowed", event.start_mark)
            return super().compose_node(parent, index)

    return Loader


@cache
def _values_loader() -> type[SafeLoader]:
    import yaml

    class Loader(yaml.SafeLoader):
        """Makes values itself, where no places are wanted."""

        yaml_implicit_resolvers = _resolvers() | {"<": [(_PREFIX + "merge", re.compile("^<<$"))]}

    # PyYAML's own takes 010 for 8.
    Loader.add_constructor(_PREFIX + "int", lambda _, node: int(node.value))
    return Loader


@cache
def _dumper() -> type[Dumper]:
    import yaml

    class Writer(yaml.SafeDumper):
        """Writes no aliases, and quotes what the loader above would take for something else than text."""

        yaml_implicit_resolvers = _resolvers()

        def ignore_aliases(self, data: Any) -> bool:
            return True

    def text(writer: Any, value: str) -> Any:
        # PyYAML loses the next-line character where it does not quote twice
        return writer.represent_scalar(_PREFIX + "str", value, style='"' if "\x85" in value else None)

    Writer.add_representer(str, text)
    return Writer  # type: ignore[return-value]
