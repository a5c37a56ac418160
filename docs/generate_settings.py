"""Write the tables of settings into shared/slipway/README.md: ``python docs/generate_settings.py``.

What a setting means is said once, in the docstring of the model that holds it; the tables are made of that.
"""

import re
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from slipway.configuration.export import ExportConfiguration
from slipway.configuration.layers import ENVIRONMENT
from slipway.configuration.schema import default, keys, values
from slipway.settings import Settings
from slipway.settings.sections import Listed, field_meanings

PAGE = Path(__file__).parents[1] / "shared" / "slipway" / "README.md"
_VARIABLE = re.compile(r" \(`([A-Z_]+)`\)")


def page(text: str) -> str:
    """Make the tables between a page's markers anew."""
    for name, table in (("settings", settings_table()), ("machine", machine_table())):
        begin, end = f"<!-- {name}: made by docs/generate_settings.py -->\n", f"<!-- end of {name} -->"
        before, _, rest = text.partition(begin)
        text = f"{before}{begin}\n{table}\n{end}{rest.partition(end)[2]}"
    return text


def settings_table() -> str:
    """Every setting of an export."""
    variables = {key: variable for variable, key in ENVIRONMENT.items()}
    rows = ["| YAML key, below `export:` | variable | default | meaning |", "|---|---|---|---|"]
    for key in keys():
        *path, name = key.split(".")
        meaning = _with_values(markdown(_section(path))[name], key)
        rows.append(f"| `{key}` | `{variables[key]}` | {_shown(default(key))} | {meaning} |")
    return "\n".join(rows) + "\n"


def machine_table() -> str:
    """Every setting of a machine or process."""
    rows = ["| variable | meaning |", "|---|---|"]
    for meaning in markdown(Settings).values():
        variable = _VARIABLE.search(meaning)
        if variable is not None:
            rows.append(f"| `{variable[1]}` | {_VARIABLE.sub('', meaning)} |")
    return "\n".join(rows) + "\n"


def markdown(model: type[BaseModel]) -> dict[str, str]:
    """Write the meaning of each field of a model as Markdown."""
    return {key: text.replace("``", "`").replace("|", "\\|") for key, text in field_meanings(model).items()}


def _with_values(meaning: str, key: str) -> str:
    """Write the meaning, and the possible values if it does not name them all; true and false go without saying."""
    possible = values(key)
    if possible == ("true", "false") or all(f"`{value}`" in meaning for value in possible):
        return meaning
    return f"{meaning} Values: {', '.join(f'`{value}`' for value in possible)}."


def _section(path: list[str]) -> type[BaseModel]:
    model: type[BaseModel] = ExportConfiguration
    for name in path:
        annotation = model.model_fields[name].annotation
        assert isinstance(annotation, type)
        model = annotation
    return model


def _shown(value: Any) -> str:
    if value is None or value == "":
        return "–"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if isinstance(value, Listed):
        return f"`{value}`"
    if isinstance(value, tuple):
        return f"`{', '.join(value)}`" if value else "none"
    return f"`{value}`"


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
