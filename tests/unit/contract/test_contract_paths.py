"""Object keys and paths: what S3, a file system and a browser can all carry; nothing that leaves its directory."""

from __future__ import annotations

import pytest
from pydantic import TypeAdapter, ValidationError

from baton.contract.base import MAX_KEY_BYTES, MAX_PATH_BYTES, KeyPrefix, ObjectKey, RelativePath, path_problem
from baton.contract.errors import ErrorCode
from baton.contract.jobs.job import InputRef

ALLOWED = {
    "colon": "runs/2026-01-01T10:00:00/a:b.bin",
    "spaces": "my images/photo of a dog.jpg",
    "leading space": " a",
    "unicode": "bilder/größe/写真/🐕.png",
    "combining": "e\u0301te\u0301.txt",
    "dots in names": "..a/b../c...d/.hidden",
    "tilde": "~/x",
    "percent": "a%2e%2e/b",
    "question": "a?b#c&d=e+f",
    "quotes": 'it\'s "quoted"',
    "800 bytes": "a" * MAX_PATH_BYTES,
    "800 bytes of two-byte characters": "é" * (MAX_PATH_BYTES // 2),
    "deep": "/".join(["d"] * 400),
}
REFUSED = {
    "empty": "",
    "dot": ".",
    "parent": "..",
    "parent first": "../a",
    "parent inside": "a/../b",
    "parent last": "a/..",
    "dot inside": "a/./b",
    "absolute": "/etc/passwd",
    "trailing slash": "a/",
    "double slash": "a//b",
    "backslash": "a\\b",
    "windows parent": "..\\a",
    "nul": "a\0b",
    "newline": "a\nb",
    "trailing newline": "a\n",
    "escape": "\x1b[2J",
    "delete": "a\x7f",
    "c1 control": "a\x9b",
    "901 bytes": "a" * (MAX_KEY_BYTES + 1),
    "1024 bytes": "a" * 1024,
    "too many bytes in few characters": "é" * (MAX_KEY_BYTES // 2 + 1),
    "lone surrogate": "a\ud800",
}


@pytest.mark.parametrize("path", ALLOWED.values(), ids=ALLOWED)
@pytest.mark.parametrize("kind", [ObjectKey, RelativePath, KeyPrefix])
def test_allowed(kind: object, path: str) -> None:
    assert path_problem(path) is None
    assert TypeAdapter(kind).validate_python(path) == path


@pytest.mark.parametrize("path", REFUSED.values(), ids=REFUSED)
@pytest.mark.parametrize("kind", [ObjectKey, RelativePath])
def test_refused(kind: object, path: str) -> None:
    assert path_problem(path)
    with pytest.raises(ValidationError) as caught:
        TypeAdapter(kind).validate_python(path)
    assert [problem["type"] for problem in caught.value.errors()] == ["invalid_key"]


def test_the_message_is_printable_whatever_the_key() -> None:
    with pytest.raises(ValidationError) as caught:
        TypeAdapter(ObjectKey).validate_python("größe\x1b[2J\n" + "x" * 2000)
    message = caught.value.errors()[0]["msg"]
    assert message.isascii()
    assert message.isprintable()
    assert len(message) < 300


def test_a_limit_of_its_own() -> None:
    assert path_problem("abcd", max_bytes=3) == "has 4 bytes; 1 to 3 are allowed"


@pytest.mark.parametrize("prefix", ["", "digits/", "digits/3", "a:b/", "写真/"])
def test_prefixes_may_be_empty_or_end_with_a_slash(prefix: str) -> None:
    assert TypeAdapter(KeyPrefix).validate_python(prefix) == prefix
    assert InputRef(prefix=prefix).into == ""


@pytest.mark.parametrize("prefix", ["/", "//", "a//", "../", "a/../", "./", "a\\", "a\n", "a" * 901])
def test_prefixes_that_are_refused(prefix: str) -> None:
    with pytest.raises(ValidationError):
        TypeAdapter(KeyPrefix).validate_python(prefix)


def test_the_remedy_names_the_limit_that_is_enforced() -> None:
    assert str(MAX_KEY_BYTES) in ErrorCode.INVALID_KEY.remedy


def test_keys_may_be_longer_than_paths() -> None:
    key, path = TypeAdapter(ObjectKey), TypeAdapter(RelativePath)
    longest = "a" * MAX_KEY_BYTES
    assert key.validate_python(longest) == longest
    with pytest.raises(ValidationError, match="1 to 800 are allowed"):
        path.validate_python("a" * (MAX_PATH_BYTES + 1))
