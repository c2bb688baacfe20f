"""Documents that people write: from YAML to plain values, with the place of each; and back.

The YAML is that of JSON: no aliases, no tags, no duplicate keys; `no` is text and `2e-6` a number, as in YAML 1.2.
YAML's library is loaded when the first text is read, nowhere before.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any

from baton.contract.errors import Fault

if TYPE_CHECKING:
    from yaml import Dumper, Node, SafeLoader

MAX_DOCUMENT_BYTES = 64 * 1024
MAX_DEPTH = 24
MAX_NODES = 8_192
"""Keys and values of one document. Parsing costs about 25 us per node; documents at the byte limit have up to 7,200."""
Location = tuple[str | int, ...]


@dataclass
class Document:
    """Plain values, and where each lies: line and column from 1, of a mapping's member those of its key."""

    value: Any = None
    places: dict[Location, tuple[int, int]] = field(default_factory=dict)
    faults: list[Fault] = field(default_factory=list)
    texts: dict[Location, _TextPlace] = field(default_factory=dict)
    too_large: bool = False
    """A limit on bytes, nodes or depth refused the text, whatever language it is written in."""

    def place(self, location: Location) -> tuple[int, int]:
        """Of a value; of what it lies in, if it is not there itself."""
        while location not in self.places and location:
            location = location[:-1]
        return self.places.get(location, (1, 1))

    def text_place(self, location: Location, offset: int) -> tuple[int, int]:
        """Of a character inside a text, counted from 0; of the text's begin where folding or escapes hide it."""
        known = self.texts.get(location)
        return known.place(offset) if known else self.place(location)

    def fault(self, location: Location, reason: str, remedy: str = "", *, code: str = "") -> None:
        """Note one."""
        line, column = self.place(location)
        self.faults.append(Fault(".".join(map(str, location)), reason, remedy, line, column, code))

    def text_fault(self, location: Location, offset: int, reason: str, remedy: str = "", *, code: str = "") -> None:
        """Note one of a character inside a text."""
        line, column = self.text_place(location, offset)
        self.faults.append(Fault(".".join(map(str, location)), reason, remedy, line, column, code))


@dataclass(frozen=True)
class _TextPlace:
    """Where a text begins, and how its lines lie in the document."""

    line: int
    column: int
    block: tuple[tuple[int, int], ...] = ()
    """Of a literal block: offset in the text at which each line begins, and the column it has in the document."""
    straight: bool = True
    """Each character of the text is one of the document."""

    def place(self, offset: int) -> tuple[int, int]:
        if not self.straight:
            return self.line, self.column
        if not self.block:
            return self.line, self.column + offset
        number = max(index for index, (start, _) in enumerate(self.block) if start <= max(offset, 0))
        start, column = self.block[number]
        return self.line + 1 + number, column + offset - start


def read_document(text: str, *, max_bytes: int = MAX_DOCUMENT_BYTES) -> Document:
    """The values in a YAML text; without any, but with faults, if it is none."""
    import yaml

    document = Document()
    try:
        size_bytes = len(text.encode())
        if size_bytes > max_bytes:
            reason = f"the document has {size_bytes} bytes; at most {max_bytes} are allowed"
            document.fault((), reason, "Shorten it.")
            document.too_large = True
            return document
        root = _composed(text)
        if root is not None:
            document.value = _value(root, (), document)
            _place_texts(root, (), document, text)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
        place = (mark.line + 1, mark.column + 1) if mark else (1, 1)
        reason = str(getattr(error, "problem", None) or getattr(error, "reason", None) or "unreadable")
        document.faults.append(Fault("", f"not YAML: {reason}", "Check indentation, quotes and colons.", *place))
    except UnicodeEncodeError:
        document.fault((), "the text is not valid Unicode", "Save it as UTF-8.")
    except _TooLargeError as error:
        document.faults.append(Fault("", error.reason, error.remedy, error.line, error.column))
        document.too_large = True
    return document


def load_values(text: str) -> Any:
    """The values of a YAML text with the same scalars, and with anchors and merge keys.

    Raises yaml.YAMLError, RecursionError, and ValueError for a number that is too long.
    """
    import yaml

    return yaml.load(text, _values_loader())  # noqa: S506 - a SafeLoader


def write_document(value: Any) -> str:
    """Plain values as a document that reads as the same values."""
    import yaml

    return str(yaml.dump(value, Dumper=_dumper(), sort_keys=False, allow_unicode=True, width=120))


def _place_texts(node: Any, location: Location, document: Document, source: str) -> None:
    """Note where every text begins, by walking the nodes once more: only what was read without fault is there."""
    pending: list[tuple[Any, Location]] = [(node, location)]
    lines: list[str] | None = None
    while pending:
        node, location = pending.pop()
        if node.id == "mapping":
            pending += [(value, (*location, key.value)) for key, value in node.value if isinstance(key.value, str)]
        elif node.id == "sequence":
            pending += [(item, (*location, number)) for number, item in enumerate(node.value)]
        elif location not in document.texts:
            lines = source.splitlines() if lines is None else lines
            document.texts[location] = _text_place(node, lines)


def _text_place(node: Any, lines: list[str]) -> _TextPlace:
    start, end = node.start_mark, node.end_mark
    line, column = start.line + 1, start.column + 1
    if node.style == "|":
        block, offset = [], 0
        for number, text in enumerate(node.value.split("\n")):
            written = lines[start.line + 1 + number] if start.line + 1 + number < len(lines) else ""
            block.append((offset, len(written) - len(text) + 1 if written.endswith(text) else 1))
            offset += len(text) + 1
        return _TextPlace(line, column, tuple(block))
    quotes = 2 if node.style else 0
    straight = start.line == end.line and end.column - start.column == len(node.value) + quotes
    return _TextPlace(line, column + quotes // 2 if straight else column, straight=straight)


def _composed(text: str) -> Node | None:
    loader = _loader()(text)
    try:
        return loader.get_single_node()
    finally:
        loader.dispose()


def _value(node: Any, location: Location, document: Document) -> Any:
    document.places.setdefault(location, (node.start_mark.line + 1, node.start_mark.column + 1))
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


class _TooLargeError(Exception):
    """A document exceeds the limit on nodes or on depth; line and column count from 1."""

    def __init__(self, reason: str, remedy: str, mark: Any) -> None:
        super().__init__(reason)
        self.reason = reason
        self.remedy = remedy
        self.line: int = mark.line + 1
        self.column: int = mark.column + 1


@cache
def _loader() -> type[SafeLoader]:
    import yaml

    class NodeLoader(yaml.SafeLoader):
        """Composes nodes up to the limits; no alias gets through, so that no text grows beyond itself.

        libyaml's loader is faster, but its marks and messages differ, and not every installation has it.
        """

        yaml_implicit_resolvers = _resolvers()
        nodes = 0
        depth = -1

        def compose_node(self, parent: Any, index: Any) -> Any:
            event = self.peek_event()  # type: ignore[no-untyped-call]
            if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None) is not None:
                raise yaml.composer.ComposerError(None, None, "anchors and aliases are not allowed", event.start_mark)
            self.nodes += 1
            if self.nodes > MAX_NODES:
                raise _TooLargeError(f"the document has more than {MAX_NODES} values", "Shorten it.", event.start_mark)
            if self.depth == MAX_DEPTH:
                raise _TooLargeError("nested too deeply", f"At most {MAX_DEPTH} levels are allowed.", event.start_mark)
            self.depth += 1
            node = super().compose_node(parent, index)
            self.depth -= 1
            return node

    return NodeLoader


@cache
def _values_loader() -> type[SafeLoader]:
    import yaml

    class ValuesLoader(yaml.SafeLoader):
        """Makes values itself, where no places are wanted."""

        yaml_implicit_resolvers = _resolvers() | {"<": [(_PREFIX + "merge", re.compile("^<<$"))]}

    # PyYAML's own takes 010 for 8.
    ValuesLoader.add_constructor(_PREFIX + "int", lambda _, node: int(node.value))
    return ValuesLoader


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
