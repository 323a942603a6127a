"""Options of the test run.

``--law-cases N`` sets how many random steps the laws of plans are tried on. The default keeps ``make test`` short;
``make laws`` tries 10,000.
"""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings

LAW_CASES = 2_000


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--law-cases", type=int, default=LAW_CASES, help="Random steps for the laws of plans.")


def pytest_configure(config: pytest.Config) -> None:
    number, unchecked = config.getoption("--law-cases"), list(HealthCheck)
    settings.register_profile(
        "laws", max_examples=number, deadline=None, database=None, suppress_health_check=unchecked
    )
