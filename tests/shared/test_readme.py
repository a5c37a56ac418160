"""The package's README keeps step with the code."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

from slipway.configuration.schema import keys, values

ROOT = Path(__file__).parents[2]
README = ROOT / "shared" / "slipway" / "README.md"


def test_its_tables_of_settings_are_those_of_the_models() -> None:
    generator = runpy.run_path(str(ROOT / "docs" / "generate_settings.py"))
    text = README.read_text(encoding="utf-8")
    assert "EXPORT_CHECKPOINT_PATH" in text
    assert generator["page"](text) == text, "run python docs/generate_settings.py"


def test_its_table_of_settings_has_every_value_of_those_with_only_so_many() -> None:
    rows = {
        line.split("`")[1]: line for line in README.read_text(encoding="utf-8").splitlines() if line.startswith("| `")
    }
    for key in keys():
        missing = [value for value in values(key) if values(key) != ("true", "false") and f"`{value}`" not in rows[key]]
        assert missing == [], key
    assert "`aggressive`" in rows["recovery.profile"]


def test_its_code_map_names_what_is_there() -> None:
    rows = [line for line in README.read_text(encoding="utf-8").splitlines() if re.match(r"\| `[a-z_]+(\.py|/)`", line)]
    named = {name for row in rows for name in re.findall(r"`([a-z_]+)(?:\.py|/)`", row.split("|")[1])}
    modules = {p.stem for p in README.parent.iterdir() if p.suffix == ".py" or (p / "__init__.py").is_file()}
    assert sorted(modules - named - {"__init__"}) == []
    assert sorted(named - modules) == []
