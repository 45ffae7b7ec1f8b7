"""What the package shows of itself."""

from importlib import metadata

import fusednorm
import pytest


def test_it_lists_what_is_public():
    assert {"LayerNorm", "layer_norm_forward", "patch", "__version__"} <= set(dir(fusednorm))
    assert all(hasattr(fusednorm, name) for name in fusednorm.__all__)
    assert not {"operators", "TYPE_CHECKING", "metadata"} & set(dir(fusednorm))


def test_it_has_the_version_of_the_distribution():
    assert fusednorm.__version__ == metadata.version("normserve")
    with pytest.raises(AttributeError, match="has no attribute 'version'"):
        fusednorm.version  # noqa: B018


def test_a_tree_that_is_not_installed_has_no_known_version(monkeypatch):
    def absent(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", absent)
    assert fusednorm.__version__ == "0+unknown"
