"""Judge how an output's runtime reads text and conversations, beside what transformers reads.

Transformers reads the hard texts once for all outputs whose runtime reads text itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from slipway.stage import Context
from slipway.validation.comparisons import Check
from slipway.validation.texts import TextComparison
from slipway_validate.folders import runtime_for
from slipway_validate.protocol import process
from slipway_validate.protocol.messages import Spec, TextSpec

TOKENS, TEMPLATE = "tokens", "chat_template"
CHECKS = (TOKENS, TEMPLATE)


@dataclass(frozen=True, slots=True)
class Texts:
    """What transformers reads.

    Attributes:
        file: File of :class:`slipway_validate.runner.texts.ReadTexts`; None if no output needs it, or it could not be made.
        missing: Why it could not be made.
    """

    file: Path | None = None
    missing: str = ""


def read_texts(
    outputs: Mapping[str, Path],
    tokenizer: Path,
    base: Path,
    ctx: Context,
    *,
    folder: Path,
    timeout_seconds: float,
) -> Texts:
    """Read the texts if the runtime of any output reads text itself.

    Raises:
        StageError: ``CANCELLED``.
    """
    runtimes = [runtime_for(name, folder) for name, folder in outputs.items()]
    if not any(runtime is not None and runtime.reads_text for runtime in runtimes):
        return Texts()
    file = folder.with_suffix(".json")
    spec = Spec(texts=TextSpec(tokenizer=tokenizer.absolute(), base=base.absolute(), file=file.absolute()))
    result = process.run(spec, folder, ctx, label="texts", timeout_seconds=timeout_seconds)
    return Texts(file) if result.status == "done" else Texts(missing=result.message)


def checks(found: TextComparison | None) -> list[Check]:
    """Return the checks: no text may have other tokens, and no conversation another prompt."""
    if found is None or found.not_compared:
        return []
    counts = [(TOKENS, found.different)]
    if found.conversations:
        counts.append((TEMPLATE, found.rendered_otherwise))
    return [
        Check(name=name, value=float(count), limit=0.0, comparison="<=", passed=not count, unit="count")
        for name, count in counts
    ]


def notes(found: TextComparison | None) -> tuple[str, ...]:
    """Return remarks on what was not judged."""
    if found is None:
        return ()
    if found.not_compared:
        return (f"its tokens and chat template were not compared with transformers': {found.not_compared}",)
    remarks = []
    if found.excused:
        kinds = ", ".join(found.excused_kinds)
        remarks.append(
            f"its runtime splits {found.excused} of {found.texts} texts otherwise than transformers, which is known of it: {kinds}"
        )
    if found.further_otherwise and not found.template_missing:
        remarks.append(
            f"its runtime writes {found.further_otherwise} of {found.further} conversations with calls of tools, or with thinking "
            f"switched, otherwise than transformers; the shortest is {found.first_further}"
        )
    return tuple(remarks)


def explain(found: TextComparison) -> tuple[str, str]:
    """Return explanation and remedy of failed checks."""
    causes, remedies = [], []
    if found.different:
        causes.append(
            f"{found.different} of {found.texts} texts get other tokens than by transformers, first {found.first_difference}"
        )
        remedies.append("check its tokenizer's pre-tokenizer and added tokens")
    if found.template_missing:
        causes.append(
            "it has no chat template, so that its runtime writes prompts in a format of its own without a word"
        )
        remedies.append("give the model its chat template, and export again")
    elif found.rendered_otherwise:
        causes.append(
            f"{found.rendered_otherwise} of {found.conversations} conversations become another prompt than by transformers, the shortest is "
            f"{found.first_rendered}"
        )
        remedies.append("give its runtime the chat template in another spelling, or the prompts as text")
    return "; ".join(causes), "; ".join(remedies)
