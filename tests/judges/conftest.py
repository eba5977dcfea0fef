"""No proxy between a test and the service in its thread."""

import os

import pytest


@pytest.fixture(autouse=True)
def _no_proxy(monkeypatch):
    for name in list(os.environ):
        if "proxy" in name.lower():
            monkeypatch.delenv(name)
