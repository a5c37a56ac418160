"""A GGUF file as a model of the validation: logits of every token, row by row, through llama.cpp's cache."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from slipway.proof.numerics import Logits
from slipway.proof.precision import stored_dtype
from slipway.proof.runtime import Bounds, LanguageModel, NotRunnable, Past, Step, Unusable
from slipway.proof.sights import Sight
from slipway.validation.speed import Engine
from slipway_gguf.files import text_files
from slipway_gguf.metadata import BETWEEN, DIFFERS
from slipway_gguf.runtime.llama import AUTO_FLASH, F16, F32, NO_FLASH, Batch, ChatServer, Llama
from slipway_gguf.runtime.pictures import Eye

_CALL = 128
"""Number of tokens that llama.cpp computes in one call; it keeps logits for each of them."""
_FIRST_CONTEXT = 512
_LONGEST_VALUE = 1 << 20


@dataclass(frozen=True, slots=True)
class Beside:
    """An adapter beside the file of a base.

    Attributes:
        adapter: The adapter's file.
        template: The adapter's chat template; empty for the base's.
        release: Removes the base's file; only the chat server would open it again.
    """

    adapter: Path
    template: str = ""
    release: Callable[[], None] = lambda: None


@dataclass(frozen=True, slots=True)
class _Cached:
    """A cache: the tokens in it, and the context that has it."""

    tokens: tuple[int, ...]
    context: int


class GGUFModel(LanguageModel):
    """A GGUF file in llama.cpp.

    Logits are compared without flash attention and with a cache in float32; it is served and timed with llama.cpp's own choice and a cache
    in float16. Products with weights round their other side as llama.cpp does: to float16 beside float16, to blocks of int8 beside
    quantized weights. The model is not freed: the process that validates one output ends with it.
    """

    device = "cpu"
    has_cache = True
    reads_text = True

    def __init__(self, llama: Llama, file: Path, *, threads: int, stored: str, beside: Beside | None = None) -> None:
        self._llama, self._file, self._threads, self._beside = llama, file, threads, beside
        functions = llama.functions
        params = functions.llama_model_default_params()
        params.n_gpu_layers = 0
        self._model = functions.llama_model_load_from_file(str(file).encode(), params)
        if not self._model:
            raise Unusable(f"llama.cpp cannot load {file.name}: {llama.errors()}")
        self._adapter = (
            self._load_adapter(beside.adapter) if beside else None
        )  # before any context, so that contexts have room for it
        self._vocabulary = functions.llama_model_get_vocab(self._model)
        self._values = functions.llama_vocab_n_tokens(self._vocabulary)
        longest = max(1, functions.llama_model_n_ctx_train(self._model))
        self.bounds = Bounds(batch=1, sequence=longest, past=longest)
        self.native_dtype, self._comparing = "float16", False
        self._context: int | None = None
        self._size = self._number = 0
        self._tokens: tuple[int, ...] = ()
        self._chat: ChatServer | None = None
        self._eye: Eye | None = None
        self.engine = Engine(
            runtime="llama.cpp",
            version=llama.version,
            provider="cpu",
            stored_dtype=stored or "float16",
            compute_dtype="float32",
            native_dtype=self.native_dtype,
        )

    def forward(self, step: Step) -> tuple[Logits, Past]:
        """As :meth:`slipway.proof.runtime.LanguageModel.forward`, for one row; padding gets zeros."""
        if len(step.input_ids) != 1:
            raise Unusable(f"it computes one row at a time, and got {len(step.input_ids)}")
        width = step.input_ids.shape[1]
        columns = np.flatnonzero(step.attention_mask[0, -width:])
        past = step.past if isinstance(step.past, _Cached) else _Cached((), self._number)
        ids, positions = step.input_ids[0, columns], step.position_ids[0, columns]
        self._return_to(past, room=len(ids))
        wanted = columns[-1:] if step.last_only else columns
        results = np.zeros((1, 1 if step.last_only else width, self._values), dtype=np.float32)
        if len(ids):
            logits = self._decode(ids, positions, last_only=step.last_only)
            results[0, [0] if step.last_only else wanted] = logits
        return results, _Cached(self._tokens, self._number)

    def look(self, sight: Sight) -> Logits:
        """As :meth:`LanguageModel.look`; what continues the prompt is computed token by token."""
        if self._beside:
            raise NotRunnable("an adapter's file for llama.cpp has no part for images")
        if self._eye is None:
            self._eye = Eye(self._llama, self._model, self._file.parent, threads=self._threads)
        with self._eye.pieces(sight) as pieces:
            # Tokens of a picture may see later ones of it, so a piece is computed at once.
            call = max(_CALL, self._eye.most_tokens(pieces))
            self._open(len(sight.tokens), call=call)
            self._decode(sight.tokens[: sight.begin], np.arange(sight.begin), last_only=True)
            place = sight.begin
            for each in pieces:
                place = self._eye.add(self._context or 0, each, place=place, batch=call)
        written = len(sight.tokens) - sight.continued
        logits = [
            self._decode(
                sight.tokens[sight.end : written], np.arange(place, place + written - sight.end), last_only=False
            )
        ]
        for at in range(written, len(sight.tokens)):
            position = place + at - sight.end
            logits.append(self._decode(sight.tokens[at : at + 1], np.array([position]), last_only=False))
        self._open(self._size)  # the tokens of a picture are not among those that the cache is known by
        return np.concatenate(logits)

    def prepare_comparison(self) -> None:
        """As :meth:`LanguageModel.prepare_comparison`."""
        self._comparing = True
        self._open(self._size)

    def leave_comparison(self) -> None:
        """As :meth:`LanguageModel.leave_comparison`. End the server, so that it takes no time or memory during measurements."""
        if self._chat:
            self._chat.end()
            self._chat = None
        if self._eye:
            self._eye.close()
            self._eye = None
        if self._beside:
            self._beside.release()
        self._comparing = False
        self._open(self._size)

    def tokens_of(self, text: str) -> list[int]:
        """As :meth:`LanguageModel.tokens_of`."""
        data = text.encode()
        room = 2 * len(data) + 16
        ids = (ctypes.c_int32 * room)()
        count = self._llama.functions.llama_tokenize(self._vocabulary, data, len(data), ids, room, True, True)
        if count < 0:
            raise Unusable(f"llama.cpp cannot split a text of {len(data)} bytes: {self._llama.errors()}")
        return list(ids[:count])

    def rendered(
        self,
        messages: Sequence[dict[str, Any]],
        tools: Sequence[dict[str, Any]] = (),
        *,
        options: Mapping[str, Any] | None = None,
    ) -> str | None:
        """As :meth:`LanguageModel.rendered`; None if there is no template, because llama.cpp would use one of its own."""
        template = self._beside.template if self._beside else ""
        if not template and not self._value("tokenizer.chat_template"):
            return None
        if self._chat is None:
            self._chat = ChatServer(self._llama, self._file, threads=self._threads, template=template)
        return self._chat.render(messages, tools, options or {})

    def text_differences(self) -> tuple[str, ...]:
        """As :meth:`LanguageModel.text_differences`; read them from the file's metadata."""
        return tuple(filter(None, self._value(DIFFERS).split(BETWEEN)))

    def _load_adapter(self, adapter: Path) -> int:
        handle = self._llama.functions.llama_adapter_lora_init(self._model, str(adapter).encode())
        if not handle:
            raise Unusable(f"llama.cpp cannot load {adapter.name} beside its base: {self._llama.errors()}")
        return int(handle)

    def _value(self, key: str) -> str:
        buffer = ctypes.create_string_buffer(_LONGEST_VALUE)
        length = self._llama.functions.llama_model_meta_val_str(self._model, key.encode(), buffer, _LONGEST_VALUE)
        return buffer.value.decode(errors="replace") if length > 0 else ""

    def _open(self, size: int, *, call: int = _CALL) -> None:
        """Open an empty context that computes ``call`` tokens at once."""
        functions = self._llama.functions
        if self._context:
            functions.llama_free(self._context)
            self._context = None  # so that it is not freed twice if the next steps fail
        params = functions.llama_context_default_params()
        params.n_ctx = self._size = max(_FIRST_CONTEXT, size)
        params.n_batch = params.n_ubatch = call
        params.n_seq_max = 1
        params.n_threads = params.n_threads_batch = max(1, self._threads)
        params.flash_attn_type = NO_FLASH if self._comparing else AUTO_FLASH
        params.type_k = params.type_v = F32 if self._comparing else F16
        params.swa_full = True  # a cache that is cut back needs tokens that have left the window
        params.no_perf = True
        self._llama.listen()
        self._context = functions.llama_init_from_model(self._model, params)
        if not self._context:
            raise Unusable(f"llama.cpp cannot open a context of {self._size} tokens: {self._llama.errors()}")
        if self._adapter:
            one, whole = (ctypes.c_void_p * 1)(self._adapter), (ctypes.c_float * 1)(1.0)
            if functions.llama_set_adapters_lora(self._context, one, 1, whole):
                raise Unusable(f"llama.cpp cannot use the adapter: {self._llama.errors()}")
        self._number += 1
        self._tokens = ()

    def _return_to(self, past: _Cached, *, room: int) -> None:
        """Make the cache hold the tokens of ``past``, with room for more."""
        functions, needed = self._llama.functions, len(past.tokens) + room
        if not self._context or needed > self._size:
            size = _FIRST_CONTEXT
            while size < needed:
                size *= 2
            self._open(size)
        same = self._tokens[: len(past.tokens)] == past.tokens
        memory = functions.llama_get_memory(self._context)
        if not past.tokens:
            functions.llama_memory_clear(memory, True)
        elif not same or not functions.llama_memory_seq_rm(memory, 0, len(past.tokens), -1):
            functions.llama_memory_clear(memory, True)
            self._tokens = ()
            ids = np.array(past.tokens)
            self._decode(ids, np.arange(len(ids)), last_only=True)
        self._tokens = past.tokens

    def _decode(self, ids: Any, positions: Any, *, last_only: bool) -> Logits:
        """Compute tokens behind those in the cache; return the logits (S, V) of all of them, or of the last one."""
        logits = []
        for start in range(0, len(ids), _CALL):
            piece = slice(start, start + _CALL)
            is_last = start + _CALL >= len(ids)
            logits += self._call(ids[piece], positions[piece], outputs=int(is_last) if last_only else len(ids[piece]))
        self._tokens += tuple(map(int, ids))
        return np.concatenate(logits)

    def _call(self, ids: Any, positions: Any, *, outputs: int) -> list[Logits]:
        count = len(ids)
        row = ctypes.c_int32(0)
        batch = Batch(
            n_tokens=count,
            token=(ctypes.c_int32 * count)(*map(int, ids)),
            pos=(ctypes.c_int32 * count)(*map(int, positions)),
            n_seq_id=(ctypes.c_int32 * count)(*[1] * count),
            seq_id=(ctypes.POINTER(ctypes.c_int32) * count)(*[ctypes.pointer(row)] * count),
            logits=(ctypes.c_int8 * count)(*[0] * (count - outputs), *[1] * outputs),
        )
        failed = self._llama.functions.llama_decode(self._context, batch)
        if failed:
            raise Unusable(f"llama.cpp could not compute {count} tokens ({failed}): {self._llama.errors()}")
        if not outputs:
            return []
        logits = self._llama.functions.llama_get_logits(self._context)
        return [np.ctypeslib.as_array(logits, shape=(outputs, self._values)).copy()]


def load(folder: Path, *, threads: int) -> GGUFModel:
    """Load the GGUF file in a folder.

    Raises:
        NotRunnable: llama.cpp is missing here, or of another version.
        Unusable: The folder has no single GGUF file, or llama.cpp cannot load it.
    """
    return GGUFModel(Llama(), only_file(folder), threads=threads, stored=stored_dtype(folder))


def only_file(folder: Path, pattern: str = "*.gguf") -> Path:
    """Return the only file in a folder that matches a pattern, beside an ``mmproj`` file for images.

    Raises:
        Unusable: There is none, or several.
    """
    files = text_files(folder, pattern)
    if len(files) != 1:
        raise Unusable(f"the folder has {len(files)} GGUF files, and one is needed")
    return files[0]
