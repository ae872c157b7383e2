"""What a user imports and types against."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from importlib import resources
from pathlib import Path

import pytest

import tetrad

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("name", tetrad.__all__)
def test_every_name_can_be_imported(name):
    """``from tetrad import RequestOutput`` failed, so nobody could annotate what ``generate`` returns."""
    namespace: dict[str, object] = {}
    exec(f"from tetrad import {name}", namespace)
    assert namespace[name] is getattr(tetrad, name)
    assert name in dir(tetrad)


def test_what_the_engine_raises_and_returns_is_among_them():
    """A public signature that needs a name from an inner module makes users import inner modules."""
    from tetrad import errors
    from tetrad.frontend import outputs

    public = {name for name in vars(outputs) if re.match("[A-Z]", name)} - {"Any", "Literal"}
    public |= {name for name, value in vars(errors).items() if isinstance(value, type) and issubclass(value, Exception)}
    assert public <= {*tetrad.__all__}


def test_a_name_that_does_not_exist():
    with pytest.raises(AttributeError, match=r"module 'tetrad' has no attribute 'Request'"):
        tetrad.Request  # noqa: B018  # pyright: ignore[reportAttributeAccessIssue]


def test_the_names_cost_nothing_until_they_are_used():
    """Who wants the kernels alone does not wait for the engine."""
    code = "import sys, tetrad; assert not [m for m in sys.modules if m.startswith(('tetrad.', 'torch'))]"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_type_checkers_may_read_the_annotations():
    """Without the marker they take every name of an installed package for Any."""
    assert resources.files("tetrad").joinpath("py.typed").is_file()


def test_changelog_version_and_stability_agree():
    with (ROOT / "pyproject.toml").open("rb") as file:
        project = tomllib.load(file)["project"]
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    released = re.findall(r"^## \[?(\d+\.\d+\.\d+)", changelog, re.MULTILINE)
    assert released[0] == tetrad.__version__ == project["version"]
    (status,) = [entry for entry in project["classifiers"] if entry.startswith("Development Status")]
    assert status == "Development Status :: 4 - Beta"
    assert "beta" in changelog.lower()
    assert "Typing :: Typed" in project["classifiers"]
