"""Evaluate the expressions of recipes in a small part of Jinja2's sandbox.

Expressions have operators, conditions, lists, and a few filters and tests. Statements, calls, attributes of Python
objects and powers are refused, so that cost and size stay in proportion to the text and the parameters. An unknown name
is an error. The module imports Jinja2 when it reads the first expression, because most API calls read none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import cache, lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from jinja2 import Environment
    from jinja2.nodes import Node

MAX_NODES = 400
MAX_DEPTH = 40
MAX_RESULT_CHARS = 64 * 1024
MAX_NUMBER = 2**63

_NODES = frozenset(
    (
        *("Template", "Output", "TemplateData", "Name", "Const", "Getattr", "Getitem", "List", "Compare", "Operand"),
        *("And", "Or", "Not", "CondExpr", "Filter", "Test", "Add", "Sub", "Mul", "Div", "FloorDiv", "Mod"),
        *("Neg", "Pos", "Concat"),
    )
)
_SYNTAX_NAMES = {
    "Call": "a call",
    "Pow": "a power",
    "Slice": "a slice",
    "Dict": "a mapping",
    "Tuple": "a tuple (write a list)",
    "For": "a loop",
    "If": "a statement (write '{{ a if b else c }}')",
}


class TemplateError(Exception):
    """The text is not a valid template, or rendering fails with these parameters."""


class TemplateTypeError(TemplateError):
    """An operation does not accept values of this type; rendering fails for every value of the type."""


class Reference(NamedTuple):
    """A name that an expression reads: `parameters.steps` is ("parameters", "steps")."""

    name: str
    member: str | None


def render(text: str, variables: Mapping[str, Any]) -> str:
    """Return the template with its expressions replaced. Raises TemplateError."""
    if not _is_template(text):
        return text
    template = _template(text)
    return _bounded(_evaluated(lambda: template.render(variables)))


def arguments(text: str, variables: Mapping[str, Any]) -> list[str]:
    """Render an item of a command into arguments. A single expression may give a list, or null for no argument."""
    alone = _alone(text)
    if alone is None:
        return [render(text, variables)]
    value = evaluate(alone, variables)
    if value is None:
        return []
    if isinstance(value, list):
        return [_bounded(_to_text(item)) for item in value]
    return [_bounded(_to_text(value))]


def evaluate(expression: str, variables: Mapping[str, Any]) -> Any:
    """Evaluate an expression without braces to null, a boolean, number, text or list. Raises TemplateError."""
    compiled = _expression(expression)
    value = _evaluated(lambda: compiled(variables))
    if not isinstance(value, (str, int, float, list, type(None))):
        raise TemplateError(f"a value of type {type(value).__name__} cannot be used")
    return value


def is_true(expression: str, variables: Mapping[str, Any]) -> bool:
    """Evaluate a condition. Raises TemplateError, also for a value that is neither true nor false."""
    value = evaluate(expression, variables)
    if not isinstance(value, bool):
        raise TemplateTypeError("the condition is neither true nor false; write a comparison")
    return value


def references(text: str, *, bare: bool) -> list[Reference]:
    """Return the names that a template, or a `bare` expression, reads. Raises TemplateError for an invalid text."""
    if not bare and not _is_template(text):
        return []
    found = []
    members = set()
    for node in _walk(_parsed(text, bare=bare)):
        kind = type(node).__name__
        inner = getattr(node, "node", None)
        if kind in ("Getattr", "Getitem") and type(inner).__name__ == "Name":
            members.add(id(inner))
            argument = getattr(node, "attr", None) or getattr(getattr(node, "arg", None), "value", None)
            found.append(Reference(str(getattr(inner, "name", "")), argument if isinstance(argument, str) else None))
        elif kind == "Name" and id(node) not in members:
            found.append(Reference(str(getattr(node, "name", "")), None))
    return found


def check(text: str, *, bare: bool) -> None:
    """Raise TemplateError unless the text is a valid template or `bare` expression."""
    if bare:
        _expression(text)
    elif _is_template(text):
        _template(text)


def _is_template(text: str) -> bool:
    return "{{" in text or "{%" in text or "{#" in text


def _alone(text: str) -> str | None:
    """Return the expression of a text that consists of one expression; None for another text."""
    if not (text.startswith("{{") and text.endswith("}}")):
        return None
    body = getattr(_parsed(text, bare=False), "body", [])
    outputs = [node for part in body for node in getattr(part, "nodes", [])]
    if len(outputs) != 1 or type(outputs[0]).__name__ == "TemplateData":
        return None
    # `{{-` and `-}}` remove the space around them; here there is none.
    return text[2:-2].removeprefix("+" if text[2:3] == "+" else "-").removesuffix("-")


@lru_cache(maxsize=512)
def _template(text: str) -> Any:
    _parsed(text, bare=False)
    return _evaluated(lambda: _environment().from_string(text))


@lru_cache(maxsize=512)
def _expression(text: str) -> Callable[[Mapping[str, Any]], Any]:
    _parsed(text, bare=True)
    compiled = _evaluated(lambda: _environment().compile_expression(text, undefined_to_none=False))

    def evaluated(variables: Mapping[str, Any]) -> Any:
        value = compiled(dict(variables))
        if _environment().undefined is type(value):
            str(value)  # raises an error that names the missing variable
        return value

    return evaluated


def _parsed(text: str, *, bare: bool) -> Node:
    """Parse a template and check that each node is allowed. Raises TemplateError."""
    if bare and ("}}" in text or "{{" in text or "%}" in text):
        raise TemplateError("an expression is written without braces here")
    tree: Node = _evaluated(lambda: _environment().parse("{{ " + text + " }}" if bare else text))
    _require_small(tree)
    for node in _walk(tree):
        kind = type(node).__name__
        if kind not in _NODES:
            raise TemplateError(f"{_SYNTAX_NAMES.get(kind, f'a statement ({kind})')} is not possible in a recipe")
        if kind == "Name" and getattr(node, "ctx", "load") != "load":
            raise TemplateError("nothing can be assigned in a recipe")
        if kind in ("Filter", "Test"):
            _require_known(kind, str(getattr(node, "name", "")))
        if kind in ("Filter", "Test") and (getattr(node, "dyn_args", None) or getattr(node, "dyn_kwargs", None)):
            raise TemplateError("arguments of a filter cannot be unpacked with '*'; write each argument")
    return tree


def _require_small(tree: Node) -> None:
    level: list[Any] = [tree]
    count = depth = 0
    while level:
        count, depth = count + len(level), depth + 1
        if count > MAX_NODES or depth > MAX_DEPTH:
            raise TemplateError("the expression is too large; compute in the program instead")
        level = [child for node in level for child in node.iter_child_nodes()]


def _walk(tree: Any) -> Iterator[Any]:
    yield tree
    for child in tree.iter_child_nodes():
        yield from _walk(child)


def _require_known(kind: str, name: str) -> None:
    known = _environment().filters if kind == "Filter" else _environment().tests
    if name not in known:
        raise TemplateError(f"no {kind.lower()} {name!r} is known; there are {', '.join(sorted(known))}")


def _evaluated(work: Callable[[], Any]) -> Any:
    """Call `work` and convert every error that a user's text can cause into a TemplateError."""
    from jinja2 import TemplateError as JinjaError

    try:
        return work()
    except TemplateError:
        raise
    except JinjaError as error:
        raise TemplateError(str(error).rstrip(".") or type(error).__name__) from None
    except RecursionError:
        raise TemplateError("the expression is nested too deeply") from None
    except TypeError as error:
        raise TemplateTypeError(str(error).rstrip(".") or type(error).__name__) from None
    except (ValueError, ArithmeticError, LookupError, SyntaxError, MemoryError) as error:
        raise TemplateError(str(error).rstrip(".") or type(error).__name__) from None


def _bounded(text: str) -> str:
    if len(text) > MAX_RESULT_CHARS:
        raise TemplateError(f"the result has {len(text)} characters; at most {MAX_RESULT_CHARS} are allowed")
    return text


def _to_text(value: Any) -> str:
    """Format a value as text; booleans become `true` and `false`."""
    if value is None:
        raise TemplateError("a value is not set; test the value with 'is none' first")
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (str, int, float)):
        return str(value)
    if type(value) is _environment().undefined:
        str(value)  # raises an error that names the missing variable
    raise TemplateTypeError("a list cannot be part of a text; use 'join', or make the expression the whole argument")


def _type_error(value: Any, reason: str) -> TemplateError:
    """Return a TemplateTypeError, or a TemplateError for an undefined value, whose type is not known."""
    return TemplateError(reason) if type(value) is _environment().undefined else TemplateTypeError(reason)


def _number(value: Any) -> Any:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise _type_error(value, "arithmetic takes numbers up to 2**63 only")
    if not -MAX_NUMBER <= value <= MAX_NUMBER:
        raise TemplateError("arithmetic takes numbers up to 2**63 only")
    return value


def _joined(value: Any, separator: str = "") -> str:
    if not isinstance(value, list) or not isinstance(separator, str):
        raise _type_error(value, "'join' takes a list and the text between its items")
    items = [_to_text(item) for item in value]
    if sum(map(len, items)) + len(separator) * len(items) > MAX_RESULT_CHARS:
        raise TemplateError("the joined text is too long")
    return separator.join(items)


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise _type_error(value, "this filter takes text")
    return value


def _rounded(value: Any, digits: int = 0) -> Any:
    if not isinstance(digits, int) or not 0 <= digits <= 15:
        raise TemplateError("'round' takes 0 to 15 digits")
    found = round(_number(value), digits)
    return found if digits else int(found)


def _length(value: Any) -> int:
    if not isinstance(value, (str, list)):
        raise _type_error(value, "'length' takes text or a list")
    return len(value)


_FILTERS: dict[str, Callable[..., Any]] = {
    "abs": lambda value: abs(_number(value)),
    "basename": lambda value: _text(value).rstrip("/").rpartition("/")[2],
    "default": lambda value, other: other if value is None else value,
    "float": lambda value: float(value if isinstance(value, str) else _number(value)),
    "int": lambda value: int(value if isinstance(value, str) else _number(value)),
    "join": _joined,
    "length": _length,
    "lower": lambda value: _text(value).lower(),
    "round": _rounded,
    "string": _to_text,
    "trim": lambda value: _text(value).strip(),
    "upper": lambda value: _text(value).upper(),
}
_TESTS = ("none", "in", "true", "false", "string", "number", "odd", "even", "divisibleby")


@cache
def _environment() -> Environment:
    from jinja2 import StrictUndefined
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Expressions(ImmutableSandboxedEnvironment):
        """Jinja2's sandbox without Python attributes, and with bounds on arithmetic and concatenation."""

        intercepted_binops = frozenset(("+", "-", "*", "/", "//", "%", "**"))

        def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
            if operator == "+" and type(left) is type(right) and isinstance(left, (str, list)):
                if len(left) + len(right) > MAX_RESULT_CHARS:
                    raise TemplateError("the text is too long")
                return left + right
            return _number(super().call_binop(context, operator, _number(left), _number(right)))

        def getitem(self, obj: Any, argument: Any) -> Any:
            """Return a member of a mapping or an item of a list, never an attribute of a Python object."""
            if isinstance(obj, Mapping) and isinstance(argument, str) and argument in obj:
                return obj[argument]
            if isinstance(obj, list) and isinstance(argument, int) and -len(obj) <= argument < len(obj):
                return obj[argument]
            return self.undefined(hint=f"there is no {argument!r}", obj=obj, name=argument)

        def getattr(self, obj: Any, attribute: str) -> Any:
            return self.getitem(obj, attribute)

    environment = Expressions(undefined=StrictUndefined, finalize=_to_text, keep_trailing_newline=True, cache_size=0)
    environment.globals.clear()
    environment.filters = dict(_FILTERS)
    environment.tests = {name: environment.tests[name] for name in _TESTS}
    return environment
