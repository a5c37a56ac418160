"""Train the tokens and write mistral-common's numbers of the texts: ``python -m support.models.tekken.make_expected`` with mistral-common and tokenizers."""

from __future__ import annotations

import base64
import json
import tempfile
from pathlib import Path

from mistral_common.tokens.tokenizers.tekken import Tekkenizer
from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers

from support.models.tekken import IDS, PATTERN, RANKS, VERSIONS, texts, write_tekken

_TOKENS = 2000


def train() -> list[bytes]:
    """Return byte strings in the order of their merges: the single bytes, then what is frequent in this repository's pages and the texts."""
    tokenizer = Tokenizer(models.BPE())
    splits = pre_tokenizers.Split(Regex(PATTERN), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])  # fmt: skip
    root = Path(__file__).parents[4]
    pages = [path.read_text(encoding="utf-8") for path in sorted(root.glob("docs/*.md"))]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=_TOKENS, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([*pages, *texts() * 20], trainer)
    model = json.loads(tokenizer.to_str())["model"]
    visible = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in visible]
    of_character = {chr(byte): byte for byte in visible} | {chr(256 + place): byte for place, byte in enumerate(others)}
    made = [bytes(of_character[each] for each in "".join(pair)) for pair in model["merges"]]
    return [*(bytes([byte]) for byte in range(256)), *dict.fromkeys(made)]


def main() -> None:
    """Write both files."""
    RANKS.write_text("".join(base64.b64encode(each).decode() + "\n" for each in train()), encoding="ascii")
    numbers = {}
    with tempfile.TemporaryDirectory() as folder:
        for version in VERSIONS:
            tokenizer = Tekkenizer.from_file(write_tekken(Path(folder), version) / "tekken.json")
            numbers[version] = [tokenizer.encode(text, bos=True, eos=False) for text in texts()]
    first = VERSIONS["v3"]["special"]
    for version in ("v7", "v11"):  # the same tokens behind another count of special ones
        shift = VERSIONS[version]["special"] - first
        shifted = [[number if number < first else number + shift for number in each] for each in numbers["v3"]]
        assert numbers[version] == shifted, version
    kept = {"v3": numbers["v3"], "v13": numbers["v13"]}
    lines = ",\n".join(
        f'"{name}": [\n' + ",\n".join(json.dumps(each, separators=(",", ":")) for each in ids) + "\n]"
        for name, ids in kept.items()
    )
    IDS.write_text("{\n" + lines + "\n}\n", encoding="ascii")


if __name__ == "__main__":
    main()
