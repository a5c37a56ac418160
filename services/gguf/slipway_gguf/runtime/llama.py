"""Call llama.cpp's C functions, which the wheel of xllamacpp exports, and the chat template engine, which only its server has.

Structs are passed by value and carry no version, so only versions of xllamacpp whose ``llama.h`` has this layout are used. As a second
guard, the library's defaults must lie where the layout says.
"""

from __future__ import annotations

import contextlib
import ctypes
import http.client
import json
from collections import deque
from collections.abc import Mapping, Sequence
from ctypes import POINTER, Structure, c_bool, c_char_p, c_float, c_int8, c_int32, c_size_t, c_uint32, c_void_p
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from slipway.proof.runtime import NotRunnable, Unusable

VERSIONS = ("2026.10.11549",)
"""Versions of xllamacpp whose header has the structs below."""
F32, F16 = 0, 1
"""ggml's numbers of these types."""
NO_FLASH, AUTO_FLASH = 0, -1
CONTROL, USER_DEFINED = 1 << 3, 1 << 4

_P = c_void_p
_LOG = ctypes.CFUNCTYPE(None, c_int32, c_char_p, c_void_p)
LOG_ERROR = 4
_MOST_ERRORS = 1000
_errors: deque[str] = deque(maxlen=_MOST_ERRORS)
"""llama.cpp's messages of errors since the last call of :meth:`Llama.errors`."""

_SECONDS = 60.0
_LARGEST = 16 << 20


class ModelParams(Structure):
    """``struct llama_model_params``."""

    _fields_ = (
        ("devices", c_void_p),
        ("tensor_buft_overrides", c_void_p),
        ("n_gpu_layers", c_int32),
        ("split_mode", c_int32),
        ("load_mode", c_int32),
        ("lazy_mode", c_int32),
        ("main_gpu", c_int32),
        ("tensor_split", c_void_p),
        ("progress_callback", c_void_p),
        ("progress_callback_user_data", c_void_p),
        ("kv_overrides", c_void_p),
        ("vocab_only", c_bool),
        ("check_tensors", c_bool),
        ("use_extra_bufts", c_bool),
        ("no_host", c_bool),
        ("no_alloc", c_bool),
        ("load_mtp", c_bool),
    )


class ContextParams(Structure):
    """``struct llama_context_params``."""

    _fields_ = (
        ("n_ctx", c_uint32),
        ("n_batch", c_uint32),
        ("n_ubatch", c_uint32),
        ("n_seq_max", c_uint32),
        ("n_rs_seq", c_uint32),
        ("n_outputs_max", c_uint32),
        ("n_outputs_max_per_seq", c_uint32),
        ("n_threads", c_int32),
        ("n_threads_batch", c_int32),
        ("ctx_type", c_int32),
        ("rope_scaling_type", c_int32),
        ("pooling_type", c_int32),
        ("attention_type", c_int32),
        ("flash_attn_type", c_int32),
        ("rope_freq_base", c_float),
        ("rope_freq_scale", c_float),
        ("yarn_ext_factor", c_float),
        ("yarn_attn_factor", c_float),
        ("yarn_beta_fast", c_float),
        ("yarn_beta_slow", c_float),
        ("yarn_orig_ctx", c_uint32),
        ("defrag_thold", c_float),
        ("cb_eval", c_void_p),
        ("cb_eval_user_data", c_void_p),
        ("type_k", c_int32),
        ("type_v", c_int32),
        ("moe_cache_size", c_size_t),
        ("abort_callback", c_void_p),
        ("abort_callback_data", c_void_p),
        ("embeddings", c_bool),
        ("offload_kqv", c_bool),
        ("no_perf", c_bool),
        ("op_offload", c_bool),
        ("swa_full", c_bool),
        ("kv_unified", c_bool),
        ("samplers", c_void_p),
        ("n_samplers", c_size_t),
        ("ctx_other", c_void_p),
    )


class Batch(Structure):
    """``struct llama_batch``."""

    _fields_ = (
        ("n_tokens", c_int32),
        ("token", POINTER(c_int32)),
        ("embd", c_void_p),
        ("pos", POINTER(c_int32)),
        ("n_seq_id", POINTER(c_int32)),
        ("seq_id", POINTER(POINTER(c_int32))),
        ("logits", POINTER(c_int8)),
    )


_SIGNATURES: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "llama_backend_init": (None, ()),
    "llama_model_default_params": (ModelParams, ()),
    "llama_context_default_params": (ContextParams, ()),
    "llama_model_load_from_file": (_P, (c_char_p, ModelParams)),
    "llama_init_from_model": (_P, (_P, ContextParams)),
    "llama_adapter_lora_init": (_P, (_P, c_char_p)),
    "llama_set_adapters_lora": (c_int32, (_P, POINTER(_P), c_size_t, POINTER(c_float))),
    "llama_free": (None, (_P,)),
    "llama_get_memory": (_P, (_P,)),
    "llama_memory_clear": (None, (_P, c_bool)),
    "llama_memory_seq_rm": (c_bool, (_P, c_int32, c_int32, c_int32)),
    "llama_decode": (c_int32, (_P, Batch)),
    "llama_get_logits": (POINTER(c_float), (_P,)),
    "llama_model_get_vocab": (_P, (_P,)),
    "llama_model_n_ctx_train": (c_int32, (_P,)),
    "llama_model_meta_val_str": (c_int32, (_P, c_char_p, c_char_p, c_size_t)),
    "llama_vocab_n_tokens": (c_int32, (_P,)),
    "llama_tokenize": (c_int32, (_P, c_char_p, c_int32, POINTER(c_int32), c_int32, c_bool, c_bool)),
    "llama_log_set": (None, (_P, _P)),
}


@_LOG  # type: ignore[untyped-decorator]
def note_error(level: int, text: bytes, _: Any) -> None:
    """Keep an error. llama.cpp holds this function until the process ends, so it must not belong to an object that may end before."""
    if level == LOG_ERROR:
        _errors.append(text.decode(errors="replace"))


class Llama:
    """Load llama.cpp's functions, and collect their errors.

    Raises:
        NotRunnable: xllamacpp is missing here, or its version has another layout.
    """

    def __init__(self) -> None:
        try:
            installed = version("xllamacpp")
        except PackageNotFoundError:
            raise NotRunnable("llama.cpp is not installed here: pip install xllamacpp") from None
        if installed not in VERSIONS:
            raise NotRunnable(
                f"xllamacpp {installed} may have other structs than {VERSIONS[-1]}: pip install xllamacpp=={VERSIONS[-1]}"
            )
        try:
            import xllamacpp
            from xllamacpp import xllamacpp as extension

            library = ctypes.CDLL(extension.__file__)
            for name, (result, arguments) in _SIGNATURES.items():
                function = getattr(library, name)
                function.restype, function.argtypes = result, arguments
        except (ImportError, OSError, AttributeError) as error:
            raise NotRunnable(
                f"xllamacpp {installed} cannot be used here ({error}): pip install --force-reinstall xllamacpp"
            ) from error
        self.version = f"xllamacpp {xllamacpp.__version__}"
        self.functions = library
        self.listen()
        library.llama_backend_init()
        self._check_layout()

    def errors(self) -> str:
        """Return llama.cpp's messages of errors since the last call."""
        text = " ".join("".join(_errors).split())
        _errors.clear()
        return text[:500] or "it says nothing more"

    def listen(self) -> None:
        """Receive llama.cpp's log (again, after a server in this process has taken it over)."""
        self.functions.llama_log_set(note_error, None)

    def _check_layout(self) -> None:
        """Refuse a library whose defaults do not lie where the structs expect them."""
        context, model = self.functions.llama_context_default_params(), self.functions.llama_model_default_params()
        places = {
            "n_batch": (context.n_batch, 2048),
            "yarn_beta_slow": (context.yarn_beta_slow, -1.0),
            "type_k": (context.type_k, F16),
            "type_v": (context.type_v, F16),
            "moe_cache_size": (context.moe_cache_size, 0),
            "offload_kqv": (context.offload_kqv, True),
            "ctx_other": (context.ctx_other, None),
            "n_samplers": (context.n_samplers, 0),
            "use_extra_bufts": (model.use_extra_bufts, True),
            "vocab_only": (model.vocab_only, False),
            "kv_overrides": (model.kv_overrides, None),
        }
        wrong = [f"{name} is {value}" for name, (value, wanted) in places.items() if value != wanted]
        if wrong:
            raise NotRunnable(f"the structs of {self.version} are not those of its header: {', '.join(wrong)}")


class ChatServer:
    """llama.cpp's server in this process, on a local port. It uses the file's vocabulary and, unless another is given, its template."""

    def __init__(self, llama: Llama, file: Path, *, threads: int, template: str = "") -> None:
        import xllamacpp

        self._llama, self._server = llama, None
        params = xllamacpp.CommonParams()
        params.model.path = str(file)
        params.chat_template = template
        params.n_ctx, params.n_parallel, params.warmup, params.verbosity = 256, 1, False, 1
        params.hostnames, params.port, params.ui = ["127.0.0.1"], 0, False
        params.n_gpu_layers, params.endpoint_slots = 0, True
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = max(1, threads)
        try:
            self._server = xllamacpp.Server(params)
        except RuntimeError as error:  # it tries the template out before it begins
            self._llama.listen()
            raise Unusable(f"llama.cpp's server does not begin, which tries its chat template out: {error}") from error
        self._address = urlsplit(self._server.listening_address)

    def end(self) -> None:
        """End the server.

        The server answers some requests before its loop begins. If it were ended then, it would still begin the loop and never leave it.
        So first wait for the answer to a request that only the loop answers.
        """
        if self._server is not None:
            with contextlib.suppress(Unusable):
                self._request("GET", "/slots")
            self._server = None
            self._llama.listen()  # the server had the log

    __del__ = end

    def render(
        self, messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]], options: Mapping[str, Any]
    ) -> str:
        """Return the prompt for a conversation in which the model answers next.

        Raises:
            Unusable: The template cannot be rendered.
        """
        request = {
            "messages": list(messages),
            **({"tools": list(tools)} if tools else {}),
            **({"chat_template_kwargs": dict(options)} if options else {}),
        }
        status, answer = self._request("POST", "/apply-template", json.dumps(request))
        if status != http.client.OK or not isinstance(answer, dict) or not isinstance(answer.get("prompt"), str):
            raise Unusable(f"llama.cpp cannot render its chat template: {str(answer)[:300]}")
        return str(answer["prompt"])

    def _request(self, method: str, path: str, body: str | None = None) -> tuple[int, Any]:
        connection = http.client.HTTPConnection(self._address.hostname or "", self._address.port, timeout=_SECONDS)
        try:
            connection.request(method, path, body, {"Content-Type": "application/json"})
            response = connection.getresponse()
            return response.status, json.loads(response.read(_LARGEST))
        except (OSError, ValueError, http.client.HTTPException) as error:
            raise Unusable(f"llama.cpp's server does not answer: {error}") from error
        finally:
            connection.close()
