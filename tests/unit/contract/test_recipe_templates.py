"""Expressions in recipes: what they can do, and that nothing leads out of them or costs more than it should."""

from __future__ import annotations

import string
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.contract.recipes.templates import (
    MAX_RESULT_CHARS,
    Reference,
    TemplateError,
    arguments,
    check,
    evaluate,
    is_true,
    references,
    render,
)

VARIABLES: dict[str, Any] = {
    "parameters": {
        "steps": 5,
        "rate": 2e-6,
        "name": "a b",
        "items": "hidden by no method",
        "list": ["a", "b"],
        "none": None,
        "yes": True,
        "long": "x" * 30_000,
    },
    "dirs": {"data": "${BATON_DATA_DIR}"},
    "given": ["steps"],
}


@pytest.mark.parametrize(
    ("text", "rendered"),
    [
        ("plain { text } with % signs", "plain { text } with % signs"),
        ("--n={{ parameters.steps }}/{{ parameters.rate }}", "--n=5/2e-06"),
        ("{{ parameters.yes }},{{ not parameters.yes }}", "true,false"),
        ("{{ parameters.items }}", "hidden by no method"),
        ("{{ parameters['name'] }}", "a b"),
        ("{{ parameters.steps + 1 }}{{ parameters.steps // 2 * 1.5 }}", "63.0"),
        ("{{ 'a' ~ parameters.steps }}{{ 'a' + 'b' }}", "a5ab"),
        ("{{ 'big' if parameters.steps > 3 else 'small' }}", "big"),
        ("{{ parameters.list|join('-') }}", "a-b"),
        ("{{ parameters.none|default('d') }}", "d"),
        ("{{ parameters.name|upper|trim }} {{ 'x/y/z.png'|basename }}", "A B z.png"),
        ("{{ (parameters.rate * 1000000)|round }} {{ 1.26|round(1) }} {{ '7'|int + 1 }}", "2 1.3 8"),
        ("{{ parameters.list|length }} {{ parameters.list[0] }}", "2 a"),
        ("{% raw %}{{ x }}{% endraw %}", "{{ x }}"),
        ("a{# nothing #}b\n", "ab\n"),
    ],
)
def test_what_templates_can_do(text: str, rendered: str) -> None:
    assert render(text, VARIABLES) == rendered


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("{{ parameters.list }}", ["a", "b"]),
        ("{{ parameters.none }}", []),
        ("{{ [] }}", []),
        ("{{- parameters.steps -}}", ["5"]),
        ("{{ -parameters.steps }}", ["-5"]),
        ("{{ 1 }}{{ 2 }}", ["12"]),
        ("{{ ['--x', parameters.steps] if parameters.yes else [] }}", ["--x", "5"]),
        ("{{ parameters.list }} ", None),
        ("{{ [['a']] }}", None),
        ("{{ [parameters.none] }}", None),
    ],
)
def test_what_an_item_of_a_command_becomes(text: str, expected: list[str] | None) -> None:
    if expected is not None:
        assert arguments(text, VARIABLES) == expected
    else:
        with pytest.raises(TemplateError):
            arguments(text, VARIABLES)


@pytest.mark.parametrize(
    ("expression", "holds"),
    [
        ("parameters.steps > 3 and parameters.none is none", True),
        ("'a' in parameters.list", True),
        ("'steps' in given and 'rate' not in given", True),
        ("parameters.steps is divisibleby 8", False),
        ("1 < parameters.steps < 5", False),
    ],
)
def test_conditions(expression: str, holds: bool) -> None:
    assert is_true(expression, VARIABLES) is holds


@pytest.mark.parametrize("expression", ["parameters.steps", "parameters.name", "parameters.none", "parameters.list"])
def test_a_condition_is_true_or_false(expression: str) -> None:
    with pytest.raises(TemplateError, match="neither true nor false"):
        is_true(expression, VARIABLES)


ESCAPES = [
    "''.__class__",
    "''.__class__.__mro__[1].__subclasses__()",
    "parameters.__class__",
    "parameters['__class__']",
    "parameters.__init__.__globals__",
    "parameters.keys()",
    "parameters.list.append",
    "parameters.list.append(1)",
    "parameters.name.format",
    "'{0.__class__}'.format(1)",
    "'%s' % parameters",
    "parameters.name|attr('__class__')",
    "parameters|map(attribute='__class__')|list",
    "self.__init__",
    "self._TemplateReference__context",
    "cycler.__init__.__globals__.os",
    "lipsum.__globals__",
    "joiner()",
    "namespace(a=1)",
    "range(10)",
    "dict(a=1)",
    "config",
    "request",
    "get_flashed_messages",
    "environment",
    "loop",
    "caller()",
    "varargs",
    "_",
    "True.__class__",
    "(1).__class__",
    "[].__len__",
    "parameters.list[0:1]",
    "{'a': 1}",
    "(1, 2)",
]


@pytest.mark.parametrize("expression", ESCAPES)
def test_nothing_leads_out_of_the_sandbox(expression: str) -> None:
    for work in (render, arguments):
        with pytest.raises(TemplateError):
            work("{{ " + expression + " }}", VARIABLES)
    with pytest.raises(TemplateError):
        evaluate(expression, VARIABLES)


COSTLY = [
    "9**9**9",
    "'a' * 99999999",
    "[1] * 99999999",
    "'a'|center(99999999)",
    "'%0999999999d' % 1",
    "parameters.list|join('x' * 999)",
    "parameters.long|join(parameters.long)",
    " ~ ".join(["parameters.long"] * 9),
    " + ".join(["parameters.long"] * 9),
    "*".join(["9999999999999"] * 9),
    "1.5|round(999999999)",
    "-".join(["1"] * 500),
    "(" * 3000 + "1" + ")" * 3000,
    "not " * 3000 + "true",
    "[" * 3000 + "]" * 3000,
    "-" * 3000 + "1",
    "'9'|int * 99999999999999999999",
    "parameters.long|replace('x', parameters.long)",
    "parameters.steps|pprint",
    "1/0",
    "'x'|int",
]


@pytest.mark.parametrize("expression", COSTLY, ids=lambda text: text[:24])
def test_nothing_costs_more_than_its_text(expression: str) -> None:
    with pytest.raises(TemplateError):
        render("{{ " + expression + " }}", VARIABLES)


@pytest.mark.parametrize(
    "text",
    [
        "{% for x in parameters.list %}{{ x }}{% endfor %}",
        "{% if true %}a{% endif %}",
        "{% set a = 1 %}",
        "{% macro f() %}{% endmacro %}",
        "{% include 'x' %}",
        "{% import 'os' as os %}",
        "{% extends 'x' %}",
        "{% with %}{% endwith %}",
        "{% block a %}{% endblock %}",
        "{% filter upper %}a{% endfilter %}",
        "{% call f() %}{% endcall %}",
        "{% autoescape true %}{% endautoescape %}",
        "{{",
        "{{ }}",
        "{% x",
        "{{ a b }}",
        "{{ 'a }}",
        "{{ nope }}",
        "{{ parameters.nope }}",
        "{{ parameters.nope.deeper }}",
        "{{ parameters }}",
        "a{{ parameters.none }}",
        "a{{ parameters.list }}",
    ],
)
def test_what_is_no_template(text: str) -> None:
    with pytest.raises(TemplateError) as refused:
        render(text, VARIABLES)
    assert str(refused.value) and "\n" not in str(refused.value)


def test_an_unknown_name_is_named() -> None:
    with pytest.raises(TemplateError, match="'nope'"):
        render("{{ parameters.nope }}", VARIABLES)
    with pytest.raises(TemplateError, match="'bogus'"):
        evaluate("bogus", VARIABLES)


def test_an_expression_is_written_without_braces() -> None:
    with pytest.raises(TemplateError, match="without braces"):
        evaluate("{{ parameters.steps }}", VARIABLES)


def test_rendering_changes_nothing_and_remembers_nothing() -> None:
    variables = {"parameters": {"list": ["a"]}}
    assert render("{{ parameters.list|join }}", variables) == "a"
    assert variables == {"parameters": {"list": ["a"]}}
    assert render("{{ parameters.list|join }}", {"parameters": {"list": ["b"]}}) == "b"


def test_what_a_text_reads() -> None:
    found = references("{{ parameters.a }} {{ b }} {{ parameters['c']|default(dirs.d) }}", bare=False)
    expected = {
        Reference("parameters", "a"), Reference("b", None), Reference("parameters", "c"), Reference("dirs", "d")
    }  # fmt: skip
    assert set(found) == expected
    assert references("parameters.a is none", bare=True) == [Reference("parameters", "a")]
    assert references("no template", bare=False) == []


WORDS = st.sampled_from(
    [
        *("parameters", "dirs", "given", ".steps", ".list", "['name']", "[0]", "1", "2.5", "'text'", "true", "none"),
        *("+", "-", "*", "/", "//", "%", "**", "~", "|join", "|length", "|round", "|default(1)", "|int", "(", ")"),
        *("[", "]", " and ", " or ", " not ", " in ", " is none", " if ", " else ", "==", "<", "{{", "}}", "{%", "%}"),
        *("__class__", ".__init__", "()", ",", ":", "for x in ", "\n", "\\", "é", "\x00"),
    ]
)


@settings(max_examples=300, deadline=None)
@given(st.lists(WORDS, max_size=12).map("".join) | st.text(alphabet=string.printable, max_size=40))
def test_whatever_is_written_gives_a_bounded_text_or_an_error_of_ours(text: str) -> None:
    for work in (
        lambda: render("{{" + text + "}}", VARIABLES),
        lambda: "".join(arguments("{{" + text + "}}", VARIABLES)),
        lambda: str(evaluate(text, VARIABLES)),
        lambda: str(check(text, bare=True)),
    ):
        try:
            found = work()
        except TemplateError:
            continue
        assert len(found) <= 2 * MAX_RESULT_CHARS
        assert "object at 0x" not in found and "<class" not in found and "built-in" not in found
