"""Read YAML documents into plain values with their line and column, and write plain values as YAML.

The accepted subset has the data model of JSON: no aliases, tags or duplicate keys. As in YAML 1.2, `no` is text and
`2e-6` a number. The module imports PyYAML when it reads the first text, so that other calls start without PyYAML.
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
    """Plain values with their places: line and column from 1. A member of a mapping has the place of its key."""

    value: Any = None
    places: dict[Location, tuple[int, int]] = field(default_factory=dict)
    faults: list[Fault] = field(default_factory=list)
    texts: dict[Location, _TextPlace] = field(default_factory=dict)
    too_large: bool = False
    """True if the text exceeded a limit on bytes, nodes or depth. The limits hold for every document language."""

    def place(self, location: Location) -> tuple[int, int]:
        """Return line and column of the value at `location`, or of its innermost container that exists."""
        while location not in self.places and location:
            location = location[:-1]
        return self.places.get(location, (1, 1))

    def text_place(self, location: Location, offset: int) -> tuple[int, int]:
        """Return line and column of the character at `offset` (from 0) in the text at `location`.

        Folding and escapes hide the places of characters; then the result is the start of the text.
        """
        known = self.texts.get(location)
        return known.place(offset) if known else self.place(location)

    def fault(self, location: Location, reason: str, remedy: str = "", *, code: str = "") -> None:
        """Record a fault of the value at `location`."""
        line, column = self.place(location)
        self.faults.append(Fault(".".join(map(str, location)), reason, remedy, line, column, code))

    def text_fault(self, location: Location, offset: int, reason: str, remedy: str = "", *, code: str = "") -> None:
        """Record a fault of the character at `offset` in the text at `location`."""
        line, column = self.text_place(location, offset)
        self.faults.append(Fault(".".join(map(str, location)), reason, remedy, line, column, code))


@dataclass(frozen=True)
class _TextPlace:
    """Place of a text's first character, and the mapping from its lines to lines of the document."""

    line: int
    column: int
    block: tuple[tuple[int, int], ...] = ()
    """For each line of a literal block: its offset in the text, and its column in the document."""
    straight: bool = True
    """True if each character of the text stands for one character of the document."""

    def place(self, offset: int) -> tuple[int, int]:
        if not self.straight:
            return self.line, self.column
        if not self.block:
            return self.line, self.column + offset
        number = max(index for index, (start, _) in enumerate(self.block) if start <= max(offset, 0))
        start, column = self.block[number]
        return self.line + 1 + number, column + offset - start


def read_document(text: str, *, max_bytes: int = MAX_DOCUMENT_BYTES) -> Document:
    """Read a YAML text. A text that is not YAML gives a document without a value and with faults."""
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
    """Load a YAML text with the scalars of `read_document`; anchors and merge keys are allowed.

    Raises yaml.YAMLError, RecursionError, and ValueError for a number that is too long.
    """
    import yaml

    return yaml.load(text, _values_loader())  # noqa: S506 - a SafeLoader


def write_document(value: Any) -> str:
    """Write plain values as a YAML document. `read_document` returns the same values."""
    import yaml

    return str(yaml.dump(value, Dumper=_dumper(), sort_keys=False, allow_unicode=True, width=120))


def _place_texts(node: Any, location: Location, document: Document, source: str) -> None:
    """Record the place of every text. Runs after the values are read, so that only nodes without faults are visited."""
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
            reason = f"{name!r} occurs twice (first in line {line})"
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
"""The core schema of YAML 1.2 without the numbers that JSON cannot represent."""


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
        """Composes nodes up to the limits. Refuses aliases, so that no document expands beyond its own text.

        The loader of libyaml is faster, but has other marks and messages and is missing in some installations.
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
        """Constructs values without recording their places."""

        yaml_implicit_resolvers = _resolvers() | {"<": [(_PREFIX + "merge", re.compile("^<<$"))]}

    # PyYAML's constructor reads 010 as octal 8; YAML 1.2 means 10.
    ValuesLoader.add_constructor(_PREFIX + "int", lambda _, node: int(node.value))
    return ValuesLoader


@cache
def _dumper() -> type[Dumper]:
    import yaml

    class Writer(yaml.SafeDumper):
        """Writes no aliases, and quotes each text that the loaders above would resolve to another type."""

        yaml_implicit_resolvers = _resolvers()

        def ignore_aliases(self, data: Any) -> bool:
            return True

    def text(writer: Any, value: str) -> Any:
        # PyYAML drops the next-line character from texts without double quotes.
        return writer.represent_scalar(_PREFIX + "str", value, style='"' if "\x85" in value else None)

    Writer.add_representer(str, text)
    return Writer  # type: ignore[return-value]
