"""Order of the suite: what is quick and precise first, what starts real processes last."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

HERE = Path(__file__).parent
ORDER = ("unit", "simulated", "real")

# Two busy cores say nothing about the code: only what is wrong may fail a property.
settings.register_profile("busy", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("busy")


def _folder(item: pytest.Item) -> str:
    try:
        return item.path.relative_to(HERE).parts[0]
    except ValueError:
        return ""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Unit tests first, real processes last, and within a folder the order in which pytest found them."""
    items.sort(key=lambda item: ORDER.index(_folder(item)) if _folder(item) in ORDER else 1)
    for item in items:
        if _folder(item) == "real":
            item.add_marker(pytest.mark.real)
