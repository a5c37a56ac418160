"""Files ``tekken.json`` in the layout of each version, with 2,000 trained tokens, and the numbers that mistral-common 1.13.1 gives to texts.

``ranks.txt`` has the tokens in base64, a line each; ``ids.json`` the numbers. Both were made by ``make_expected.py``.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from slipway.validation.texts import TEXTS

_HERE = Path(__file__).parent
IDS = _HERE / "ids.json"
RANKS = _HERE / "ranks.txt"
PATTERN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""The expression of every file that Mistral has published."""
_NAMED = [
    "<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]", "[TOOL_CALLS]",
    "[IMG]", "<pad>", "[IMG_BREAK]", "[IMG_END]", "[PREFIX]", "[MIDDLE]", "[SUFFIX]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[TOOL_CONTENT]",
    "[CALL_ID]", "[ARGS]", "[THINK]", "[/THINK]",
]  # fmt: skip
VERSIONS: dict[str, dict[str, Any]] = {
    "v3": {"special": 1000, "named": 0},
    "v7": {"special": 1000, "named": 20, "multimodal": {"image_patch_size": 14, "max_image_size": 1540}},
    "v11": {"special": 100, "named": 24, "image": {"image_patch_size": 14, "max_image_size": 1540}},
    "v13": {"special": 24, "named": 24, "left_out": 700},
}
"""By version: how many special tokens there are, how many of them the file lists (none: the list is missing), and tokens beyond the vocabulary."""


def tekken_document(version: str = "v11") -> dict[str, Any]:
    """Return the content of a file of a version."""
    form = VERSIONS[version]
    ranks = RANKS.read_text(encoding="ascii").split()
    document: dict[str, Any] = {
        "config": {
            "pattern": PATTERN,
            "num_vocab_tokens": len(ranks),
            "default_vocab_size": form["special"] + len(ranks) - form.get("left_out", 0),
            "default_num_special_tokens": form["special"],
            "version": version,
        },
        "vocab": [{"rank": rank, "token_bytes": token, "token_str": None} for rank, token in enumerate(ranks)],
    }
    if form["named"]:
        document["special_tokens"] = [
            {"rank": rank, "token_str": text, "is_control": True} for rank, text in enumerate(_NAMED[: form["named"]])
        ]
    return document | {key: form[key] for key in ("multimodal", "image") if key in form}


def write_tekken(folder: Path, version: str = "v11") -> Path:
    """Write a file of a version into a folder."""
    folder.mkdir(exist_ok=True)
    (folder / "tekken.json").write_text(json.dumps(tekken_document(version)), encoding="utf-8")
    return folder


def texts() -> list[str]:
    """Return some hundred texts: several scripts, spaces, digits, emoji, marks without a letter before them, special tokens written out."""
    letters = [
        "ab", "a \n\t", " ", "-=*", "abcdefgh ", "ABCabc019.,!?/\\ \n\r\t", "é\u0301eßİǅʰª", "日本語の文章です中文字符한국어", "привет Мир", "नमस्तेदुनिया ",
        "مرحبا بالعالم ", "\u0301\u0327a\u200dB", "\u00a0\u2003\u3000\u0085\u180e\u200b\x0b\x0c\x1ca", "😀👩\u200d🇩🇪❤️ a", "0123456789 ٣४",
    ]  # fmt: skip
    draw = random.Random(7)
    made = [
        "".join(draw.choice(each) for _ in range(length)) for each in letters for length in (1, 2, 3, 5, 8, 13, 21, 34, 55, 89, 144, 200)
    ]  # fmt: skip
    marks = [f"a{mark}b {mark}\n{mark}{mark}" for mark in (*_NAMED, "<SPECIAL_30>", "[INST", "</s")]
    return ["", *made, *marks, *(text for several in TEXTS.values() for text in several)]
