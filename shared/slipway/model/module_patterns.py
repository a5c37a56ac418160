"""Test the regular expressions of a configuration before anything relies on them.

peft matches an adapter's with :mod:`re`, and so does the merge, which must find the same modules; compressed-tensors does the same
with those of a quantized base. A short expression can take years to match and cannot be interrupted. So a separate process with a
time limit first matches each one against the same names: if it ends there, it ends everywhere.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from slipway.errors import CheckpointValidationError, StageError
from slipway.machine.bounded.process import BoundedProcess, Bounds, SilentWorkError, UnboundedWorkError
from slipway.machine.shortages import MEMORY_REMEDY

SECONDS = 0.5
"""Base limit of processor time for all expressions of an adapter."""
SECONDS_PER_MATCH = 20e-6
"""Additional time for each expression and name; usual ones take a tenth of it."""
MOST_SECONDS = 60.0
"""Upper limit, however many expressions and names there are."""
LONGEST = 1 << 14
"""Most characters of an expression."""
MOST_MATCHES = 50_000_000
"""Most expressions (each in all its forms) times names; they take about a minute."""
KEPT_COMPILED = 512
"""Expressions that :mod:`re` keeps; of more, peft compiles each anew for every name."""
MOST_COMPILED = 200_000
"""More expressions than those, times names: half a minute's work."""
_WAIT_SECONDS = 600.0
"""Limit of elapsed time."""
_CAN_REPEAT = frozenset("*+?{(|")
#: Text without these is valid in every form and quick to match; dots do not count, because names are full of them.
_HAS_MEANING = _CAN_REPEAT | frozenset("^$)[]}\\")
_TRIAL = "slipway.model.module_patterns:trial"
#: The ways in which peft matches the texts of an option: as a whole, or within an expression of peft's own. Source: peft 0.21,
#: ``match_target_against_key``, ``check_target_module_exists`` and ``get_pattern_key``.
_WHOLE = ("fullmatch", "{}")
_END = ("match", r"(.*\.)?({})$")
_PATTERN = ("match", r".*\.{}$")
_PART = ("match", r"(^|.*\.){}($|\..*)")
_LAYER = ("match", r"(?:^|.*?\.){}\.(?P<idx>\d+)\.")
_ANYWHERE = ("search", "{}")
_START = ("match", "{}")
GROUP_TARGETS = "config_groups.targets"
IGNORED = "quantization_config.ignore"
#: Options that must be valid expressions; others are tested in case a later peft uses them as such.
_FORMS: Mapping[str, tuple[tuple[str, str], ...]] = {
    "target_modules": (_WHOLE, _PART),
    "exclude_modules": (_WHOLE,),
    "feedforward_modules": (_WHOLE,),
    "modules_to_save": (_PART,),
    "layers_pattern": (_LAYER,),
    "rank_pattern": (_END,),
    "alpha_pattern": (_END,),
    # Of a quantized base. Source: compressed-tensors 0.20, ``utils/match.py``.
    GROUP_TARGETS: (_START,),
    IGNORED: (_START,),
}
_ANY_FORM = (_WHOLE, _END, _PATTERN, _PART, _LAYER, _ANYWHERE)


def adapter_refusal(what: str, key: str) -> Exception:
    """Return the error for wrong expressions of an adapter."""
    return CheckpointValidationError(
        f"the adapter's patterns cannot be used: {what}",
        reason="ADAPTER_CONFIG_INVALID",
        remedy="copy adapter_config.json from the training run again, or name the modules in it as a list",
        about={"key": key},
    )


def check_patterns(
    config: Mapping[str, Any], names: Iterable[str], *, refusal: Callable[[str, str], Exception] = adapter_refusal
) -> None:
    """Check that the expressions of ``adapter_config.json`` are valid and quick to match against these names.

    Args:
        config: The configuration, or the expressions of another file by option.
        names: Names of modules or parameters.
        refusal: Makes the error from the fault and the name of its option.

    Raises:
        CheckpointValidationError: ``ADAPTER_CONFIG_INVALID``, or what ``refusal`` gives.
    """
    tried = [
        (key, text)
        for key, text in _texts(config)
        if not (_HAS_MEANING if key in _FORMS else _CAN_REPEAT).isdisjoint(text)
    ]
    if not tried:
        return
    modules = sorted(set(names))
    matches = sum(len(_FORMS.get(key, _ANY_FORM)) for key, _ in tried) * len(modules)
    if matches > MOST_MATCHES or (len(tried) > KEPT_COMPILED and len(tried) * len(modules) > MOST_COMPILED):
        raise refusal(f"{len(tried)} expressions for {len(modules)} modules are too many to match", "")
    for key, text in tried:
        if len(text) > LONGEST:
            raise refusal(f"{key} has an expression of {len(text)} characters, at most {LONGEST} are matched", key)
    _test_expressions(tried, modules, refusal)


def names_in(model: Any) -> Iterator[str]:
    """Yield names in a torch model that peft matches expressions against."""
    yield from (name for name, _ in model.named_modules())
    yield from (name for name, _ in model.named_parameters())


def _texts(config: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield every text of the configuration that could be matched, with its option; skip lists of plain names."""
    for key, option in sorted(config.items()):
        if key == "target_modules" and isinstance(option, list) and not config.get("ensure_weight_tying"):
            continue  # compared as they are
        for text in _all_texts(option):
            yield key, text


def _all_texts(value: Any) -> Iterator[str]:
    match value:
        case str():
            yield value
        case dict():
            for name, part in value.items():
                yield str(name)
                yield from _all_texts(part)
        case list() | tuple() | set() | frozenset():
            for part in value:
                yield from _all_texts(part)


def _test_expressions(texts: list[tuple[str, str]], names: list[str], refusal: Callable[[str, str], Exception]) -> None:
    expressions = [
        [place, method, form.replace("{}", text), key in _FORMS]
        for place, (key, text) in enumerate(texts)
        for method, form in _FORMS.get(key, _ANY_FORM)
    ]
    seconds = min(MOST_SECONDS, SECONDS + SECONDS_PER_MATCH * len(expressions) * len(names))
    reached, fault = -1, ""
    try:
        with BoundedProcess(_TRIAL, Bounds(seconds, wait_seconds=_WAIT_SECONDS)) as process:
            for reached, fault in process.items(expressions, names):  # noqa: B007 - the last one counts
                pass
    except SilentWorkError as error:  # not retryable: it may take as long again
        raise refusal(f"to match them against {len(names)} names {error}", "") from error
    except UnboundedWorkError as error:
        if reached < 0:  # not even the first expression
            raise StageError(
                f"patterns could not be tried out: it {error}", reason="OUT_OF_MEMORY", remedy=MEMORY_REMEDY
            ) from error
        why = f": to match it against {len(names)} names {error}"
    else:
        if not fault:
            return
        why = f", which is not a regular expression ({fault})"
    key, text = texts[reached]
    shown = repr(text[:100]) + ("…" if len(text) > 100 else "")
    raise refusal(f"{key} has {shown}{why}", key)


def trial(expressions: list[tuple[int, str, str, bool]], names: list[str]) -> Iterator[tuple[int, str]]:
    """Match every expression against every name, in the process with limits; yield each one's place before it is matched, and a fault."""
    warnings.simplefilter("ignore")  # about expressions that a later Python will read differently
    for place, method, expression, required in expressions:
        yield place, ""
        try:
            match = getattr(re.compile(expression), method)
        except (re.error, RecursionError, OverflowError, ValueError) as error:
            if required:
                yield (
                    place,
                    " ".join(str(error).split())[:200] or type(error).__name__,
                )  # its message may have line ends
                return
            continue
        for name in names:
            match(name)
