"""The miniatures as fixtures."""

from collections.abc import Callable

import miniature
import pytest

from speedproof.settings.execution import Execution
from speedproof.settings.recipe import Recipe


@pytest.fixture(scope="session")
def miniature_recipe() -> Callable[..., Recipe]:
    return miniature.recipe


@pytest.fixture(scope="session")
def miniature_execution() -> Callable[..., Execution]:
    return miniature.execution
