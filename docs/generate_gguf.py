"""Write the lists of models into docs/gguf.md: ``python docs/generate_gguf.py [--check]``.

They are made of the table of architectures. With ``--check`` nothing is written, and a page that is not current is an error.
"""

import sys
from pathlib import Path

from slipway_gguf.architectures import ARCHITECTURES, COMPUTED_OTHERWISE
from slipway_gguf.architectures.entry import Architecture
from slipway_gguf.vision import ENCODERS

PAGE = Path(__file__).parent / "gguf.md"
_HEAD = "| class of transformers | architecture | rope scaling | beside names |\n|---|---|---|---|\n"


def page(text: str) -> str:
    """Make the lists between a page's markers anew."""
    for name, made in (("models", models()), ("refused", refused())):
        begin, end = f"<!-- {name}: made by docs/generate_gguf.py -->\n", f"<!-- end of {name} -->"
        before, _, rest = text.partition(begin)
        text = f"{before}{begin}\n{made}\n{end}{rest.partition(end)[2]}"
    return text


def models() -> str:
    """Return a row for each entry of the table, and for each class that takes more than text."""
    rows = [
        f"| `{each.class_name}` | `{each.name}` | {_scalings(each)} | {'; '.join(_properties(each))} |"
        for each in ARCHITECTURES
    ]
    return _HEAD + "\n".join(dict.fromkeys([*rows, *_wholes()])) + "\n"


def refused() -> str:
    """Return a line for each class of which no file is written, although llama.cpp has a graph for it."""
    return "\n".join(f"- `{name}` is refused: {reason}." for name, reason in COMPUTED_OTHERWISE.items()) + "\n"


def _scalings(each: Architecture) -> str:
    return ", ".join(kind for kind in each.rope if kind not in ("default", "mrope"))


def _properties(each: Architecture) -> list[str]:
    """Return what an entry says of tensors and layers, in words."""
    seen = any(each.class_name in encoder.classes for encoder in ENCODERS)
    said = {
        "rows of queries and keys in pairs": each.paired,
        "weights transposed": each.kind.transposed,
        "norms + 1": each.kind.norm_offset,
        "a part of each head turns": each.partial,
        "windows": each.has_windows,
        "experts": each.experts and not each.dense,
        "experts behind the first layers": each.dense,
        "layers that predict further tokens": each.heads and each.heads.names,
        "[vectors](#vectors-and-scores)": each.reading and not each.reading.scores,
        "[scores](#vectors-and-scores)": each.reading and each.reading.scores,
        "[images](#images)": seen,
        each.notes: each.notes,
    }
    return [words for words, holds in said.items() if holds]


def _wholes() -> list[str]:
    """Return rows for classes whose text part has an entry of its own."""
    classes: dict[str, list[str]] = {}
    for each in ARCHITECTURES:
        for whole in each.wholes:
            if whole != each.class_name:
                classes.setdefault(whole, []).append(each.class_name)
    seen = {name for encoder in ENCODERS for name in encoder.classes}
    return [
        f"| `{whole}` | as {' or '.join(f'`{each}`' for each in parts)} | | "
        f"text{' and [images](#images)' if whole in seen else ' part alone'} |"
        for whole, parts in classes.items()
    ]


def main() -> int:
    """Write the page, or say that it is not current."""
    text = PAGE.read_text(encoding="utf-8")
    made = page(text)
    if made == text:
        return 0
    if "--check" in sys.argv[1:]:
        print("docs/gguf.md is not current: run python docs/generate_gguf.py", file=sys.stderr)
        return 1
    PAGE.write_text(made, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
