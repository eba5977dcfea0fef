"""What the documents name is there: settings by their keys, tests by file and function."""

import ast
import re
from pathlib import Path

import pytest
from ml_collections import ConfigDict

from sspjax.config import default, override

ROOT = Path(__file__).parent.parent
CODE = re.compile(r"`([^`]+)`")
TEXT = (ROOT / "docs" / "ssp.md").read_text()
NAMED = sorted(set(CODE.findall(TEXT)))
TESTS = [name for name in NAMED if name.startswith("tests/") and "::" in name]
GROUPS = {name for name, value in default().items() if isinstance(value, ConfigDict)}
SETTINGS = [
    name for name in NAMED if name.partition("=")[0].split(".")[0] in GROUPS and "." in name
]


def test_there_is_something_to_check():
    assert len(TESTS) > 60
    assert len(SETTINGS) > 60


@pytest.mark.parametrize("name", SETTINGS)
def test_settings(name):
    """The key is known, and takes the value that is named."""
    key, given, value = name.partition("=")
    if given:
        override(default(), key, value)
    else:
        node = default()
        for part in key.split("."):
            node = node[part]


@pytest.mark.parametrize("file", sorted({name.partition("::")[0] for name in TESTS}))
def test_tests(file):
    functions = {
        node.name
        for node in ast.walk(ast.parse((ROOT / file).read_text()))
        if isinstance(node, ast.FunctionDef)
    }
    assert {name.partition("::")[2] for name in TESTS if name.startswith(f"{file}::")} <= functions


def test_every_test_of_a_row_is_named_whole():
    """A cell of a test column that lost its backticks would be checked by nobody."""
    assert TEXT.count("::") == sum(CODE.findall(TEXT).count(name) for name in TESTS)
