"""Where the text comes from, how it is cut, which shapes are tried, and what headers tell."""

from __future__ import annotations

import json
import shutil
from itertools import pairwise
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest

from slipway.documents.heldout import HeldOutText
from slipway.documents.reader import Document
from slipway.model.configuration import ModelConfig
from slipway.model.families import DECODER, ENCODER_DECODER, FEATURE_EXTRACTION, SEQUENCE_CLASSIFIER
from slipway.proof import precision
from slipway.proof.runtime import Bounds, Unusable, padded, positions_of, segments_within
from slipway.proof.transformers_runtime import from_pretrained
from slipway_validate import folders
from slipway_validate.cases import shape_cases
from slipway_validate.params import ValidateParams
from slipway_validate.preparation import _affordable, decoder, padding_token
from slipway_validate.protocol.messages import Spec, TokenizeSpec
from slipway_validate.runner.main import _to_result, execute
from slipway_validate.runner.runtime_tensorrt import NotRunnable, choose_engine, deserialise
from slipway_validate.runner.sampling.audio import make_features
from slipway_validate.runner.sampling.making import cut_windows, load_tokenizer
from support.models.tiny_models import describe_a_layer_more, make_base
from support.models.validation_models import TEXT, Models


def spec(tmp_path: Path, *, windows: int = 5, length: int = 20, seed: int = 0) -> TokenizeSpec:
    return TokenizeSpec(
        tokenizer=tmp_path, model=tmp_path, text=tmp_path, samples=tmp_path, windows=windows, length=length, seed=seed
    )


def test_windows_do_not_overlap_and_follow_the_seed(tiny: Models, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(tiny.base)
    ids = tokenizer(TEXT)["input_ids"]
    first = cut_windows(tokenizer, TEXT, spec=spec(tmp_path))
    assert first.shape == (5, 20)
    starts = [next(n for n in range(len(ids)) if ids[n : n + 20] == row.tolist()) for row in first]
    assert all(later - earlier >= 20 for earlier, later in pairwise(starts))
    assert np.array_equal(first, cut_windows(tokenizer, TEXT, spec=spec(tmp_path)))
    assert not np.array_equal(first, cut_windows(tokenizer, TEXT, spec=spec(tmp_path, seed=1)))


def test_short_text_gives_fewer_windows_and_too_short_text_none(tiny: Models, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(tiny.base)
    assert cut_windows(tokenizer, "the a of b is not in c or " * 3, spec=spec(tmp_path)).shape[0] < 5
    with pytest.raises(Unusable, match="at least 8"):
        cut_windows(tokenizer, "the a", spec=spec(tmp_path))


def test_a_start_token_leads_every_window(tiny: Models, tmp_path: Path) -> None:
    from tokenizers.processors import TemplateProcessing

    tokenizer = load_tokenizer(tiny.base)
    tokenizer.add_special_tokens({"bos_token": "<unk>"})
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="<unk> $A", special_tokens=[("<unk>", 0)])
    windows = cut_windows(tokenizer, TEXT, spec=spec(tmp_path))
    assert windows.shape == (5, 20)
    assert (windows[:, 0] == 0).all()
    assert (windows[:, 1] != 0).all()


@pytest.mark.parametrize(("windows", "length"), [(1, 8), (2, 9), (10, 128), (3, 4096)])
def test_cases_fit_the_windows(windows: int, length: int) -> None:
    for case in shape_cases(DECODER, windows, length):
        longest = max(row.length for row in case.rows)
        assert sum(case.segments) == longest <= length
        assert all(0 <= row.window < windows and row.length >= 1 for row in case.rows)
        assert min(case.segments) >= 1
        if len(case.segments) > 1:  # the prefill has to hold a token of every row
            assert min(row.length for row in case.rows) > longest - case.segments[0]


def test_left_padding() -> None:
    ids, mask = padded([np.array([5, 6, 7]), np.array([9])], side="left", token=0)
    assert ids.tolist() == [[5, 6, 7], [0, 0, 9]]
    assert mask.tolist() == [[1, 1, 1], [0, 0, 1]]
    assert positions_of(mask).tolist() == [[0, 1, 2], [0, 0, 0]]
    assert segments_within(10, Bounds(sequence=4)) == (4, 4, 2)


def test_logits_stay_within_the_disk_they_may_use() -> None:
    config = ModelConfig({"vocab_size": 151_936, "max_position_embeddings": 4096})
    windows, length = _affordable(config, DECODER, ValidateParams(test_samples=1000, max_logit_bytes=1 << 30))
    assert windows * length * 151_936 * 4 * 4 <= 1 << 30
    assert windows > 1
    assert _affordable(config, DECODER, ValidateParams(sequence_length=8192, max_logit_bytes=1 << 40)) == (10, 4096)


@pytest.mark.parametrize(
    ("config", "length"),
    [
        ({"max_position_embeddings": 514, "pad_token_id": 1}, 512),  # RoBERTa counts positions from its padding token
        ({"max_position_embeddings": 512, "pad_token_id": 58_100}, 512),  # Marian's vocabulary ends with it
        ({"max_position_embeddings": 1024, "pad_token_id": 50_256}, 1024),
        ({"max_position_embeddings": "many", "n_positions": [9], "pad_token_id": "1", "text_config": 7}, 2048),
        ({"id2label": 5, "hidden_size": "wide", "vocab_size": -3, "max_position_embeddings": 64.5}, 2048),
    ],
    ids=["roberta", "marian", "gpt2", "texts", "sizes"],
)
def test_windows_are_as_long_as_the_model_allows(config: dict[str, object], length: int) -> None:
    params = ValidateParams(sequence_length=2048, max_logit_bytes=1 << 40)
    for family in (SEQUENCE_CLASSIFIER, FEATURE_EXTRACTION, ENCODER_DECODER):
        assert _affordable(ModelConfig(config), family, params) == (10, length)


@pytest.mark.parametrize(
    ("config", "token"),
    [
        ({"pad_token_id": 3, "vocab_size": 9}, 3),
        ({"pad_token_id": -1, "vocab_size": 9}, 0),
        ({"pad_token_id": 9, "vocab_size": 9}, 0),
        ({"pad_token_id": [3], "vocab_size": 9}, 0),
    ],
    ids=["one", "minus", "too-large", "list"],
)
def test_a_padding_token_is_one_of_the_model(config: dict[str, object], token: int) -> None:
    assert padding_token(ModelConfig(config), SEQUENCE_CLASSIFIER) == token
    assert padding_token(ModelConfig(config), DECODER) == 0


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"sampling_rate": 10**9}, "sampling_rate 1000000000"),
        ({"sampling_rate": 0}, "sampling_rate 0"),
        ({"chunk_length": 10**9}, "samples of sound"),
    ],
    ids=["rate", "zero", "length"],
)
def test_a_feature_extractor_that_asks_for_impossible_sound_is_refused(
    tmp_path: Path, changes: dict[str, object], named: str
) -> None:
    from transformers import WhisperFeatureExtractor

    WhisperFeatureExtractor(feature_size=8).save_pretrained(tmp_path)
    settings = json.loads((tmp_path / "preprocessor_config.json").read_text())
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(settings | changes))
    with pytest.raises(Unusable, match=named):
        make_features(tmp_path, count=1, seed=0)


def test_without_a_usable_tokenizer_file_token_ids_become_no_text(tiny: Models, tmp_path: Path) -> None:
    assert decoder(tmp_path)([1, 2]) == ""
    (tmp_path / "tokenizer.json").write_text("{}")  # a slow tokenizer never reads it
    assert decoder(tmp_path)([1, 2]) == ""
    assert decoder(tiny.base)([1, 2])


def test_an_expression_of_the_tokenizer_that_never_ends_is_a_failure_with_a_reason(
    tiny: Models, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(tiny.base, tmp_path / "base"))
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    split = {"type": "Split", "pattern": {"Regex": "(e|ee)+$"}, "behavior": "Isolated", "invert": False}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer | {"pre_tokenizer": split}))
    documents = (Document("text", text=("e" * 60 + " the a of b is not in c or ") * 40),)
    text = HeldOutText(documents, "test", ("text",), held_out=True).write(tmp_path / "documents.jsonl")
    places = {"tokenizer": folder, "model": folder, "text": text, "samples": tmp_path / "samples"}
    wanted = Spec(tokenize=spec(tmp_path).model_copy(update=places))
    result, _ = execute(wanted, tmp_path)
    assert (result.status, result.reason) == ("failed", "VALIDATION_IMPOSSIBLE")
    assert "PanicException" in result.message


def test_dtypes_from_headers(tiny: Models, tmp_path: Path) -> None:
    assert precision.stored_dtype(tiny.merged) == "float32"
    (tmp_path / "model.onnx").write_bytes(b"")
    assert precision.stored_dtype(tmp_path) == "float32"
    (tmp_path / "quantization.json").write_text(json.dumps({"level": "int8"}))
    assert precision.stored_dtype(tmp_path) == "int8"
    assert folders.format_and_level("onnx-int8") == ("onnx", "int8")
    assert folders.format_and_level("pytorch") == ("pytorch", "none")


def test_runtime_by_contents(tiny: Models, tmp_path: Path) -> None:
    def runtime(name: str, folder: Path) -> str:
        found = folders.runtime_for(name, folder)
        return found.name if found is not None else ""

    for name in ("pytorch", "mine"):
        assert runtime(name, tiny.merged) == "transformers"
        assert runtime(name, tmp_path) == ""
    (tmp_path / "model.onnx").write_bytes(b"")
    for name in ("onnx-int8", "pytorch", "mine"):
        assert runtime(name, tmp_path) == "onnxruntime"
    (tmp_path / "beside").mkdir()
    (tmp_path / "beside" / "base.gguf").write_bytes(b"")  # where a user puts one
    refused = folders.find_refusal("adapter-gguf", tmp_path / "beside", None, DECODER)
    assert refused is not None
    assert "*-LoRA.gguf" in refused.message
    (tmp_path / "beside" / "tiny-F32-LoRA.gguf").write_bytes(b"")
    for name, alone in (("adapter-gguf", True), ("gguf", False), ("mine", True)):
        found = folders.runtime_for(name, tmp_path / "beside")
        assert found is not None
        assert (found.name, found.on_base) == ("llama.cpp", alone)
    (tmp_path / "model.sm89.engine").write_bytes(b"")
    assert runtime("tensorrt", tmp_path) == runtime("mine", tmp_path) == "tensorrt"
    assert runtime("onnx", tmp_path) == "onnxruntime"


def test_an_output_that_nothing_runs_is_failed_only_where_its_format_says_what_is_missing(tmp_path: Path) -> None:
    named = folders.find_refusal("onnx-int8", tmp_path, None, DECODER)
    assert named is not None
    assert (named.status, named.reason) == ("failed", "VALIDATION_IMPOSSIBLE")
    assert "model.onnx" in named.message
    strange = folders.find_refusal("nonesuch-int8", tmp_path, None, DECODER)
    assert strange is not None
    assert strange.status == "not_run"
    assert "nonesuch" in strange.message


def test_engine_for_this_gpu(tmp_path: Path) -> None:
    (tmp_path / "model.sm80.engine").write_bytes(b"")
    (tmp_path / "model.sm89.engine").write_bytes(b"")
    assert choose_engine(tmp_path, ("sm89",)).name == "model.sm89.engine"
    with pytest.raises(NotRunnable, match="another GPU than this machine's sm90"):
        choose_engine(tmp_path, ("sm90",))
    with pytest.raises(NotRunnable, match="no NVIDIA GPU"):
        choose_engine(tmp_path, ())


def test_an_engine_of_another_version_is_not_called_broken(tmp_path: Path) -> None:
    """Loading needs a GPU, so the library is a stand-in that loads nothing but "plan"."""

    logged: list[str] = []
    library, path = tensorrt_that_logs(logged), tmp_path / "model.sm89.engine"
    path.write_bytes(b"plan")
    assert deserialise(library, path, built_by="1.6.0").engine == "engine"
    path.write_bytes(b"other")
    with pytest.raises(NotRunnable, match=r"built by tensorrt_rtx 1\.6\.0, and tensorrt_rtx 1\.7\.1.*install 1\.6\.0"):
        deserialise(library, path, built_by="1.6.0")
    for version in ("1.7.1", ""):
        with pytest.raises(Unusable, match=r"1\.7\.1 cannot deserialise .*gives no reason"):
            deserialise(library, path, built_by=version)
    logged.append("Serialization failed:\n magic tag")
    with pytest.raises(Unusable, match="Serialization failed: magic tag"):
        deserialise(library, path, built_by="")


@pytest.mark.parametrize("built_by", ["1.6.0", "1.7.1"])
def test_an_engine_that_finds_no_room_on_the_gpu_is_not_run_and_not_called_broken(
    tmp_path: Path, built_by: str
) -> None:
    library, path = tensorrt_that_logs(["Error Code 1: Cuda Runtime (out of memory)"]), tmp_path / "model.sm89.engine"
    path.write_bytes(b"other")
    with pytest.raises(Unusable) as caught:
        deserialise(library, path, built_by=built_by)
    found = _to_result(caught.value)
    assert (found.status, found.reason) == ("not_run", "GPU_OUT_OF_MEMORY")
    assert "nvidia-smi" in found.message


@pytest.mark.parametrize(
    "error",
    [RuntimeError("DefaultCPUAllocator: can't allocate memory"), Unusable("it does not load: std::bad_alloc"), MemoryError()],
)  # fmt: skip
def test_a_runtime_without_memory_is_no_fault_of_the_output(error: Exception) -> None:
    assert _to_result(error).reason == "OUT_OF_MEMORY"
    assert _to_result(Unusable("it has no tensors")).reason == "VALIDATION_IMPOSSIBLE"


def tensorrt_that_logs(messages: list[str]) -> ModuleType:
    """Replace TensorRT, which needs a GPU, by what loads ``plan`` and logs these errors for anything else."""

    class ILogger:
        Severity = SimpleNamespace(INTERNAL_ERROR=0, ERROR=1, WARNING=2)

        def log(self, severity: int, message: str) -> None:
            raise NotImplementedError

    class Runtime:
        def __init__(self, logger: ILogger) -> None:
            self._logger = logger

        def deserialize_cuda_engine(self, data: bytes) -> str | None:
            if data == b"plan":
                return "engine"
            self._logger.log(ILogger.Severity.WARNING, "not an error")
            for message in messages:
                self._logger.log(ILogger.Severity.ERROR, message)
            return None

    library = ModuleType("tensorrt_rtx")
    vars(library).update(__version__="1.7.1", ILogger=ILogger, Runtime=Runtime)
    return library


def test_a_model_that_describes_much_more_than_it_has_is_not_loaded(tmp_path: Path) -> None:
    base = make_base(tmp_path / "base")
    describe_a_layer_more(base)
    with pytest.raises(Unusable, match="describes a model of"):
        from_pretrained(base, dtype="auto")
