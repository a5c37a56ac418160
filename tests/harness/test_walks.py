"""A value that was opened once is passed on: it comes back to rooms that it has left no more often than it did."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.walks import STARTS, Place, Tree, walk

MOST_RETURNS = {
    "the configuration": 8,
    "merge: base": 3,
    "validate: inputs": 32,
    "onnx_export: inputs": 8,
    "executorch: folder": 1,
}
"""Lower them when they fall."""


@pytest.fixture(scope="module")
def tree() -> Tree:
    return Tree(Path(__file__).parents[2])


@pytest.mark.parametrize("start", STARTS)
def test_no_walk_becomes_longer(tree: Tree, start: str) -> None:
    assert walk(tree, Place(*STARTS[start])).returns <= MOST_RETURNS[start]


def test_a_walk_counts_rooms_and_returns(tmp_path: Path) -> None:
    package = tmp_path / "shared" / "slipway"
    package.mkdir(parents=True)
    (package / "one.py").write_text(
        "from slipway.two import read\nfrom slipway import three\n\n"
        "def start(folder, other):\n    part = folder / 'a'\n    read(folder)\n    three.write(part)\n    read(part)\n    read(other)\n"
    )
    (package / "two.py").write_text("def read(path):\n    return open(path)\n")
    (package / "three.py").write_text("from slipway.two import read\n\ndef write(path):\n    read(path)\n")
    found = walk(Tree(tmp_path), Place("slipway.one", "start", "folder"))
    assert found.rooms == ["slipway.one", "slipway.two", "slipway.three"]
    assert found.returns == 2
