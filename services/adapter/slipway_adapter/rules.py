"""Check an adapter against one table of rules: what servers of adapters accept, each with its source.

A rule *refuses* an adapter that a server rejects, or would silently serve only in part; the merged model has all of it. A rule only
*cautions* if a flag makes the server serve the adapter correctly, or if it depends on the kind of model.

Sources: vLLM's files ``vllm/lora/peft_helper.py`` (settings), ``vllm/config/lora.py`` (ranks) and ``vllm/lora/lora_model.py``
(tensors); SGLang's ``python/sglang/srt/lora/lora.py``, ``lora_config.py`` and ``utils.py``. KServe serves adapters by vLLM
(https://kserve.github.io/website/docs/model-serving/generative-inference/llmisvc/lora-adapters). llama.cpp's ``src/llama-adapter.cpp``
(what a file may hold), ``src/llama-graph.cpp`` (what is computed) and ``convert_lora_to_gguf.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from slipway.errors import AdapterExportError
from slipway.model.adapters.saved import Saved
from slipway.texts import quoted
from slipway_adapter.params import Target

VLLM_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Values that vLLM accepts for ``--max-lora-rank`` (``MaxLoRARanks`` in ``vllm/config/lora.py``)."""
VLLM_DEFAULT_RANK = 16
REMEDY = "deliver the merged model instead, which has all of this adapter, and leave this format out"
_HEADS = ("embed_tokens", "lm_head", "embeddings", "word_embeddings", "wte", "output")
SERVERS: tuple[Target, ...] = ("peft",)
GRAPHS: tuple[Target, ...] = ("onnx",)
LLAMA: tuple[Target, ...] = ("gguf",)
BOTH = (*SERVERS, *GRAPHS)
_LLAMA_READS, _LLAMA_WRITES = "src/llama-adapter.cpp (llama_adapter_lora_init)", "convert_lora_to_gguf.py"


@dataclass(frozen=True, slots=True)
class Rule:
    """One rule.

    Attributes:
        name: Its name in errors and tests.
        found: Function that describes the part of an adapter that the rule is about; it returns an empty text if there is none.
        why: Reason for the rule: what servers do with such an adapter.
        source: Where that is documented.
        targets: Targets that the rule applies to.
        refuses: Whether the rule refuses the adapter; otherwise it only warns.
    """

    name: str
    found: Callable[[Saved], str]
    why: str
    source: str
    targets: tuple[Target, ...] = BOTH
    refuses: bool = True


def _form(saved: Saved) -> str:
    kind = str(saved.raw.get("peft_type"))
    return "" if kind == "LORA" else f"its peft_type is {quoted(kind)}"


def _dora(saved: Saved) -> str:
    tensors = sorted(name for name in saved.others if ".lora_magnitude_vector" in name)
    return "it is DoRA (use_dora)" if saved.raw.get("use_dora") or tensors else ""


def _modules_to_save(saved: Saved) -> str:
    listed = saved.raw.get("modules_to_save")
    tensors = sorted(name for name in saved.others if ".modules_to_save." in name)
    return (
        f"it has modules trained in full (modules_to_save: {quoted(listed or tensors[0])})" if listed or tensors else ""
    )


def _bias(saved: Saved) -> str:
    setting = saved.raw.get("bias")
    tensors = sorted(name for name in saved.others if name.endswith(".bias"))
    if saved.raw.get("lora_bias"):
        return "its factors have biases (lora_bias)"
    return f"it has trained biases (bias: {quoted(setting)})" if setting not in (None, "none") or tensors else ""


def _tokens(saved: Saved) -> str:
    rows = any(".trainable_tokens_delta" in name or ".token_adapter" in name for name in saved.others)
    return (
        "it replaces rows of an embedding (trainable_token_indices)"
        if saved.raw.get("trainable_token_indices") or rows
        else ""
    )


def _experts(saved: Saved) -> str:
    if saved.raw.get("target_parameters"):
        return f"it changes stacked parameters (target_parameters: {quoted(saved.raw['target_parameters'])})"
    modules = [module for module, _ in saved.halves if ".experts." in f".{module}." or ".base_layer" in module]
    return f"it changes experts, first {quoted(min(modules))}" if modules else ""


def _replication(saved: Saved) -> str:
    return "it repeats layers (layer_replication)" if saved.raw.get("layer_replication") else ""


def _convolution(saved: Saved) -> str:
    names = [module for (module, _), slot in saved.halves.items() if any(len(info.shape) > 2 for info in slot.values())]
    return f"it changes convolutions, first {quoted(min(names))}" if names else ""


def _variant(saved: Saved) -> str:
    """Return the option that makes a LoRA more than the product of two factors."""
    if not saved.config.through_peft:
        return ""
    init = saved.raw.get("init_lora_weights", True)
    return (
        f"it is a variant of LoRA (init_lora_weights: {quoted(init)})"
        if isinstance(init, str)
        else "it is a variant of LoRA"
    )


def _strangers(saved: Saved) -> str:
    names = [name for name in saved.others if not _is_saved_along(name)]
    return f"it has more than pairs of factors: {quoted(min(names))}" if names else ""


def _is_saved_along(name: str) -> bool:
    """Return whether a tensor may be a base weight that peft saved beside a targeted embedding; the stage compares it with the base's."""
    return name.endswith(".weight") and ".lora_" not in name


def _nothing(saved: Saved) -> str:
    return "" if saved.halves else "it has no pair of factors"


def _rank_beyond(saved: Saved) -> str:
    rank = max(saved.ranks, default=0)
    return (
        f"its rank is {rank}, and the largest that a server can be set to is {VLLM_RANKS[-1]}"
        if rank > VLLM_RANKS[-1]
        else ""
    )


def _rank_to_set(saved: Saved) -> str:
    rank = max(saved.ranks, default=0)
    if not VLLM_DEFAULT_RANK < rank <= VLLM_RANKS[-1]:
        return ""
    return f"its rank is {rank}: start vLLM with --max-lora-rank {flag_for(rank)}, SGLang with --max-lora-rank {rank}"


def _embedding(saved: Saved) -> str:
    modules = [module for module, embedding in saved.halves if embedding or module.rpartition(".")[2] in _HEADS]
    return f"it changes {quoted(min(modules))}" if modules else ""


def _lookup(saved: Saved) -> str:
    modules = [module for module, embedding in saved.halves if embedding]
    return f"it changes the embedding {quoted(min(modules))}" if modules else ""


RULES = (
    Rule("form", _form, "only pairs of LoRA factors are read", "vllm/lora/peft_helper.py; sglang/srt/lora/lora.py"),
    Rule("dora", _dora, "vLLM refuses DoRA", "vllm/lora/peft_helper.py, vllm-project/vllm#6983"),
    Rule("modules_to_save", _modules_to_save, "vLLM refuses them", "vllm/lora/peft_helper.py, vllm-project/vllm#9280"),
    Rule("bias", _bias, "vLLM refuses trained biases", "vllm/lora/peft_helper.py, vllm/lora/utils.py"),
    Rule("tokens", _tokens, "servers have no rows of embeddings for one adapter", "vllm/lora/lora_model.py"),
    Rule(
        "experts",
        _experts,
        "the form in which servers read factors of experts depends on the server, its version and the model",
        "vllm/lora/lora_model.py (.experts, base_layer); sglang/srt/lora/utils.py",
    ),
    Rule("replication", _replication, "servers build the base with its own layers only", "vllm/lora/peft_helper.py"),
    Rule(
        "convolution", _convolution, "only linear layers are wrapped", "vllm/lora/utils.py (get_supported_lora_modules)"
    ),
    Rule(
        "variant", _variant, "a server would ignore it, and serve another model", "vllm/lora/peft_helper.py (from_dict)"
    ),
    Rule(
        "strangers",
        _strangers,
        "servers refuse or skip such tensors",
        "vllm/lora/utils.py (parse_fine_tuned_lora_name)",
    ),
    Rule("nothing", _nothing, "there is nothing to serve", "vllm/lora/lora_model.py"),
    Rule("rank", _rank_beyond, "vLLM refuses it", "vllm/config/lora.py (MaxLoRARanks)", SERVERS),
    Rule(
        "max_lora_rank",
        _rank_to_set,
        f"vLLM's default is {VLLM_DEFAULT_RANK}",
        "vllm/config/lora.py",
        SERVERS,
        refuses=False,
    ),
    Rule(
        "embedding",
        _embedding,
        "vLLM takes that for models whose class lists it in embedding_modules, and refuses it for others; SGLang needs it in --lora-target-modules",
        "vllm/lora/utils.py; sglang/srt/lora/utils.py",
        SERVERS,
        refuses=False,
    ),
    Rule("lookup", _lookup, "a graph has factors beside products, and none beside a lookup", "README", GRAPHS),
    Rule("form", _form, "llama.cpp reads pairs of LoRA factors alone", f"{_LLAMA_READS}, adapter.type", LLAMA),
    Rule("dora", _dora, "llama.cpp has no magnitudes, and refuses their tensors", _LLAMA_READS, LLAMA),
    Rule(
        "modules_to_save",
        _modules_to_save,
        "llama.cpp adds factors to the base's weights, and replaces none",
        f"{_LLAMA_READS}; {_LLAMA_WRITES}",
        LLAMA,
    ),
    Rule("bias", _bias, "llama.cpp changes no bias, and refuses such tensors", _LLAMA_READS, LLAMA),
    Rule(
        "tokens",
        _tokens,
        "llama.cpp has no rows of embeddings for one adapter",
        f"{_LLAMA_WRITES}, ggml-org/llama.cpp#9948",
        LLAMA,
    ),
    Rule(
        "experts",
        _experts,
        "the experts of a layer are one weight of the base's file, and a pair of one expert changes a part of it",
        "src/llama-graph.cpp (build_lora_mm_id)",
        LLAMA,
    ),
    Rule("replication", _replication, "the base's file has its own layers only", _LLAMA_READS, LLAMA),
    Rule("convolution", _convolution, "llama.cpp multiplies pairs of matrices", "src/llama-graph.cpp", LLAMA),
    Rule(
        "variant",
        _variant,
        "llama.cpp would ignore it, and compute another model",
        "src/llama-graph.cpp (build_lora_mm)",
        LLAMA,
    ),
    Rule("strangers", _strangers, "llama.cpp refuses or skips such tensors", _LLAMA_READS, LLAMA),
    Rule("nothing", _nothing, "there is nothing to load", _LLAMA_READS, LLAMA),
)


def flag_for(rank: int) -> int:
    """Return the smallest value of vLLM's ``--max-lora-rank`` that accepts a rank."""
    return next(value for value in VLLM_RANKS if value >= rank)


def check_rules(saved: Saved, target: Target) -> tuple[str, ...]:
    """Check an adapter against the rules of a target; return the cautions.

    Raises:
        AdapterExportError: ``ADAPTER_NOT_SERVABLE``, with the rule's name.
        ModelMergeError: ``ADAPTER_CONFIG_INVALID``, ``ADAPTER_UNSUPPORTED``.
    """
    cautions = []
    for rule in RULES:
        finding = rule.found(saved) if target in rule.targets else ""
        if finding and rule.refuses:
            raise refusal_error(rule.name, f"{finding}: {rule.why} ({rule.source})")
        if finding:
            cautions.append(f"the adapter is delivered, and {finding}; {rule.why}")
    return tuple(cautions)


def refusal_error(rule: str, what: str, **about: object) -> AdapterExportError:
    """Return the error for an adapter that a rule refuses."""
    return AdapterExportError(
        f"the adapter cannot be served beside its base: {what}", remedy=REMEDY, about={"rule": rule, **about}
    )
