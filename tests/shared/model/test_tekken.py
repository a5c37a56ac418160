"""A tokenizer made from Mistral's tekken.json gives the numbers that Mistral's own library gives, and a damaged file ends by name."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("tokenizers", reason="the made file is read: pip install 'slipway-ml[prepare]'")
from tokenizers import Tokenizer

from slipway.errors import CheckpointValidationError
from slipway.model.tokens.byte_level import complete_tokenizer
from slipway.model.tokens.tekken import lacks_tokenizer, read_tekken
from support.models.tekken import IDS, VERSIONS, tekken_document, texts, write_tekken


def expected(version: str) -> list[list[int]]:
    """Return mistral-common's numbers: those of its file of this version, or shifted by another count of special tokens."""
    numbers = json.loads(IDS.read_text(encoding="ascii"))
    if version in numbers:
        return numbers[version]
    first = VERSIONS["v3"]["special"]
    shift = VERSIONS[version]["special"] - first
    return [[number if number < first else number + shift for number in each] for each in numbers["v3"]]


def numbers_of(tokenizer: Tokenizer) -> list[list[int]]:
    tokenizer.encode_special_tokens = True  # as in mistral-common, a special token in a text is text
    return [tokenizer.encode(text).ids for text in texts()]


@pytest.mark.parametrize("version", VERSIONS)
def test_the_numbers_are_those_of_mistral_common(version: str, tmp_path: Path) -> None:
    folder = write_tekken(tmp_path / "model", version)
    tekken = complete_tokenizer(folder)
    assert tekken is not None
    assert (tekken.version, len(tekken.special)) == (version, VERSIONS[version]["special"])
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert numbers_of(tokenizer) == expected(version)
    assert tokenizer.get_vocab_size() == tekken_document(version)["config"]["default_vocab_size"]
    for text, numbers in zip(texts(), expected(version), strict=True):
        assert tokenizer.decode(numbers) == text


@pytest.mark.parametrize("version", VERSIONS)
def test_the_library_itself_agrees(version: str, tmp_path: Path) -> None:
    library = pytest.importorskip("mistral_common.tokens.tokenizers.tekken", reason="pip install mistral-common")
    folder = write_tekken(tmp_path / "model", version)
    theirs = library.Tekkenizer.from_file(folder / "tekken.json")
    assert [theirs.encode(text, bos=True, eos=False) for text in texts()] == expected(version)


def test_special_tokens_in_a_text_are_found_as_by_every_tokenizer_of_transformers(tmp_path: Path) -> None:
    folder = write_tekken(tmp_path / "model", "v11")
    complete_tokenizer(folder)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    plain = tokenizer.encode("Hello", add_special_tokens=False).ids
    assert tokenizer.encode("[INST]Hello[/INST]<SPECIAL_99>").ids == [1, 3, *plain, 4, 99]
    assert tokenizer.decode([1, 3, *plain, 4, 99]) == "Hello"


def test_the_same_file_gives_the_same_bytes(tmp_path: Path) -> None:
    made = []
    for name in "ab":
        folder = write_tekken(tmp_path / name)
        complete_tokenizer(folder)
        made.append({path.name: path.read_bytes() for path in folder.iterdir()})
    assert made[0] == made[1]
    assert sorted(made[0]) == ["tekken.json", "tokenizer.json", "tokenizer_config.json"]


def test_transformers_reads_it_and_agrees_with_its_own_reading(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    module = pytest.importorskip("transformers.integrations.mistral.tokenizer")
    folder = write_tekken(tmp_path / "model", "v11")
    complete_tokenizer(folder)
    (folder / "config.json").write_text(json.dumps({"model_type": "mistral3", "transformers_version": "5.0.0"}))
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
    assert [getattr(tokenizer, f"{name}_token") for name in ("bos", "eos", "pad", "unk")] == ["<s>", "</s>", "<pad>", "<unk>"]  # fmt: skip
    assert [tokenizer(text, split_special_tokens=True)["input_ids"] for text in texts()] == expected("v11")
    theirs = module.MistralConverter(str(folder / "tekken.json")).converted()
    assert [[1, *each] for each in numbers_of(theirs)] == expected("v11")


def test_a_token_that_reads_like_a_special_one_gives_way(tmp_path: Path) -> None:
    document = tekken_document("v11")
    document["vocab"][-1] |= {"token_bytes": base64.b64encode(b"[IMG]").decode()}
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "tekken.json").write_text(json.dumps(document))
    complete_tokenizer(folder)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert tokenizer.token_to_id("[IMG]") == 10
    assert tokenizer.encode("a[IMG]b").ids[2] == 10


@pytest.mark.parametrize("packed", [True, False], ids=["json", "jinja"])
def test_the_folders_chat_template_is_used(packed: bool, tmp_path: Path) -> None:
    folder, template = write_tekken(tmp_path / "model"), "{{ bos_token }}[INST]{{ messages[0].content }}[/INST]"
    if packed:
        (folder / "chat_template.json").write_text(json.dumps({"chat_template": template}))
    else:
        (folder / "chat_template.jinja").write_text(template)
    complete_tokenizer(folder)
    assert (folder / "chat_template.jinja").read_text() == template


def test_settings_that_are_there_stay_but_for_the_class(tmp_path: Path) -> None:
    folder = write_tekken(tmp_path / "model")
    own = {"model_max_length": 4096, "pad_token": "</s>", "tokenizer_class": "MistralCommonBackend"}
    (folder / "tokenizer_config.json").write_text(json.dumps(own))
    complete_tokenizer(folder)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    assert settings == own | {
        "clean_up_tokenization_spaces": False,
        "bos_token": "<s>",
        "eos_token": "</s>",
        "unk_token": "<unk>",
        "tokenizer_class": "PreTrainedTokenizerFast",
    }


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer.model"])
def test_a_folder_with_a_usual_tokenizer_is_left_alone(name: str, tmp_path: Path) -> None:
    folder = write_tekken(tmp_path / "model")
    assert lacks_tokenizer(folder)
    (folder / name).write_bytes(b"{}")
    assert not lacks_tokenizer(folder)
    assert complete_tokenizer(folder) is None


def _config(**changes: Any) -> Callable[[dict[str, Any]], None]:
    return lambda document: document["config"].update(changes)


def _token(rank: int, /, **changes: Any) -> Callable[[dict[str, Any]], None]:
    return lambda document: document["vocab"][rank].update(changes)


def _special(rank: int, /, **changes: Any) -> Callable[[dict[str, Any]], None]:
    return lambda document: document["special_tokens"][rank].update(changes)


def _joined(document: dict[str, Any]) -> None:
    """Make tokens of which every pair of neighbours makes another: far more merges than a trained tokenizer has."""
    text = bytes(index % 251 for index in range(400))
    spans = {text[start : start + size] for size in range(2, 180) for start in range(len(text) - size)}
    tokens = [*(bytes([byte]) for byte in range(256)), *sorted(spans)]
    document["vocab"] = [{"rank": rank, "token_bytes": base64.b64encode(each).decode()} for rank, each in enumerate(tokens)]  # fmt: skip
    document["config"] |= {"default_vocab_size": 100 + len(tokens), "num_vocab_tokens": len(tokens)}


FAULTS: dict[str, tuple[Callable[[dict[str, Any]], None], str]] = {
    "no settings": (lambda document: document.pop("config"), "no settings"),
    "no pattern": (_config(pattern=None), "as its pattern"),
    "long pattern": (_config(pattern="a" * 2001), "as its pattern"),
    "no expression": (_config(pattern="(a"), "no regular expression"),
    "endless pattern": (_config(pattern="(?:a+)+(?:a+)+(?:a+)+(?:a+)+b|."), "pattern"),
    "version": (_config(version=7), "as its version"),
    "negative size": (_config(default_vocab_size=-1), "default_vocab_size"),
    "size": (_config(default_vocab_size=1 << 40), "default_vocab_size"),
    "true size": (_config(default_num_special_tokens=True), "default_num_special_tokens"),
    "fewer tokens than sizes say": (_config(default_vocab_size=2500), "tokens, and its sizes say"),
    "fewer tokens counted": (_config(num_vocab_tokens=1999), "num_vocab_tokens"),
    "special tokens missing": (lambda document: document.pop("special_tokens"), "lists no special tokens"),
    "too many special tokens": (_config(default_num_special_tokens=20), "special tokens, and says that there are 20"),
    "special token twice": (_special(4, token_str="[INST]"), "twice"),
    "special token like a filler": (_special(4, token_str="<SPECIAL_50>"), "twice"),
    "special token out of place": (_special(4, rank=7), "number of its special token 4"),
    "special token empty": (_special(4, token_str=""), "as its special token 4"),
    "no tokens": (lambda document: document.pop("vocab"), "no list of tokens"),
    "rank": (_token(700, rank=701), "rank of its token 700"),
    "rank of another type": (_token(1, rank=True), "rank of its token 1"),
    "no base64": (_token(700, token_bytes="?"), "token 700"),
    "empty token": (_token(700, token_bytes=""), "token 700"),
    "long token": (_token(700, token_bytes=base64.b64encode(bytes(257)).decode()), "token 700"),
    "token of another type": (lambda document: document["vocab"].__setitem__(700, []), "token 700"),
    "bytes twice": (_token(700, token_bytes="YQ=="), "bytes of its token 700 twice"),
    "other single bytes": (_token(65, token_bytes="Qg=="), "single bytes"),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_a_damaged_file_ends_by_name(fault: str, tmp_path: Path) -> None:
    document = tekken_document("v11")
    change, message = FAULTS[fault]
    change(document)
    (tmp_path / "tekken.json").write_text(json.dumps(document))
    with pytest.raises(CheckpointValidationError, match=message) as caught:
        complete_tokenizer(tmp_path)
    assert caught.value.reason == "TOKENIZER_INVALID"
    assert "tekken.json again" in caught.value.remedy
    assert [path.name for path in tmp_path.iterdir()] == ["tekken.json"]


def test_more_merges_than_a_tokenizer_has_are_refused(tmp_path: Path) -> None:
    document = tekken_document("v11")
    _joined(document)
    (tmp_path / "tekken.json").write_text(json.dumps(document))
    with pytest.raises(CheckpointValidationError, match="pairs of others") as caught:
        complete_tokenizer(tmp_path)
    assert caught.value.reason == "TOKENIZER_INVALID"


@pytest.mark.parametrize(
    "content", [b"", b"[]", b"{", b"\xff", b"[" * 100_000], ids=["empty", "list", "half", "bytes", "deep"]
)
def test_what_is_no_document_ends_by_name(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "tekken.json").write_bytes(content)
    with pytest.raises(CheckpointValidationError) as caught:
        read_tekken(tmp_path / "tekken.json")
    assert caught.value.reason == "TOKENIZER_INVALID"
