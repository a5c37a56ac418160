"""The statement of what was made: an in-toto attestation whose subjects are the files of all outputs.

It follows from the delivered documents alone, so whoever holds them makes the same statement again, and a forged one is found without
a key. Format: in-toto Statement v1, with a predicate of our own.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from slipway.errors import ValidationError
from slipway.files.json_documents import parse_json
from slipway.publishing.publication import LARGEST_DOCUMENT, STATEMENT, Publication, PublishedOutput
from slipway.texts import escaped_json, quoted

STATEMENT_TYPE = "https://in-toto.io/Statement/v1"
PREDICATE_TYPE = "urn:slipway:verdict:1"
MEDIA_TYPE = "application/vnd.in-toto+json"


def make_statement(publication: Publication) -> bytes:
    """Return the statement as JSON; the same folder always gives the same bytes."""
    return to_json(_statement(publication))


def check_statement(data: bytes, publication: Publication, *, where: str) -> None:
    """Compare a statement with the one that follows from the folder's documents.

    Args:
        data: The statement.
        publication: The folder's documents.
        where: Place of the folder, for messages.

    Raises:
        ValidationError: ``STATEMENT_MISMATCH`` with the first place that differs.
    """
    expected = parse_json(make_statement(publication), most_values=LARGEST_DOCUMENT // 16)
    try:
        stated = parse_json(data, most_values=LARGEST_DOCUMENT // 16)
    except ValueError as error:
        raise mismatch_error(where, STATEMENT, str(error)) from error
    difference = first_difference(expected, stated)
    if difference:
        raise mismatch_error(where, STATEMENT, difference)


def mismatch_error(where: str, name: str, what: str) -> ValidationError:
    """Return the error for a document that says something else than the folder's report and files."""
    return ValidationError(
        f"{where}/{name} does not say what the report and the checksums beside it say: {what}",
        reason="STATEMENT_MISMATCH",
        remedy="do not use the folder; get it again from who published it, or publish the delivered folder again",
        about={"folder": where, "file": name},
    )


def first_difference(expected: Any, stated: Any, place: str = "") -> str:
    """Return the first place where two JSON documents differ, with both values; empty if they are equal."""
    if isinstance(expected, dict) and isinstance(stated, dict):
        for key in sorted(expected.keys() | stated.keys()):
            here = f"{place}.{key}" if place else str(key)
            if key not in stated or key not in expected:
                return f"{quoted(here)} is {'missing' if key not in stated else 'added'}"
            if difference := first_difference(expected[key], stated[key], here):
                return difference
        return ""
    if isinstance(expected, list) and isinstance(stated, list) and len(expected) == len(stated):
        parts = (first_difference(*pair, f"{place}[{n}]") for n, pair in enumerate(zip(expected, stated, strict=True)))
        return next(filter(None, parts), "")
    if type(expected) is type(stated) and expected == stated:
        return ""
    return f"{quoted(place)} is {quoted(stated)}, and should be {quoted(expected)}"


def to_json(document: Any) -> bytes:
    """Return a document as JSON that is safe to show, in one form for equal documents."""
    return (escaped_json(json.dumps(document, indent=2, sort_keys=True, ensure_ascii=False)) + "\n").encode()


def _statement(publication: Publication) -> dict[str, Any]:
    subjects = {path: digest for output in publication.outputs for path, digest in output.files.items()}
    return {
        "_type": STATEMENT_TYPE,
        "subject": [{"name": path, "digest": {"sha256": digest}} for path, digest in sorted(subjects.items())],
        "predicateType": PREDICATE_TYPE,
        "predicate": {
            "export": {"id": publication.export_id, "created": publication.created, "model": publication.name},
            "verdict": publication.outcome.value,
            "outputs": [_output(output) for output in publication.outputs],
            "notMade": dict(publication.not_made),
            "baseMatch": publication.base_match,
            "reference": _reference(publication),
            "materials": _materials(publication),
            "labels": dict(publication.labels),
            "tools": dict(publication.tools),
            "documents": [
                {"name": name, "digest": {"sha256": digest}}
                for name, digest in sorted(publication.checksums.items())
                if "/" not in name
            ],
        },
    }


def _output(output: PublishedOutput) -> dict[str, Any]:
    found = output.validation
    figures = found.to_reference if found else None
    return {
        "name": output.name,
        "artifact": output.digest,
        "sizeBytes": output.size_bytes,
        "status": output.status,
        "requested": output.requested,
        "format": found.format if found else output.name.partition("-")[0],
        "level": found.level if found else "",
        "faithful": found.faithful.model_dump(mode="json") if found else None,
        "fit": found.fit.model_dump(mode="json") if found else None,
        "meanKl": figures.mean_kl if figures else None,
        "top1Agreement": figures.top1_agreement if figures else None,
        "kept": found.kept if found else None,
        "limits": found.limits.model_dump(mode="json", exclude_none=True) if found and found.limits else None,
        "failedChecks": sorted(check.name for check in found.checks if not check.passed) if found else [],
    }


def _reference(publication: Publication) -> Mapping[str, Any] | None:
    if publication.validation is None:
        return None
    reference, inputs = publication.validation.reference, publication.validation.inputs
    return {
        "description": reference.description,
        "architecture": reference.architecture,
        "adapterEffectKl": reference.adapter_effect_kl,
        "perplexity": reference.perplexity,
        "basePerplexity": reference.base_perplexity,
        "text": inputs.text_source,
        "heldOut": inputs.held_out,
        "tokens": inputs.tokens,
    }


def _materials(publication: Publication) -> list[dict[str, Any]]:
    return [
        {"name": name, "digest": {"sha256": digest.removeprefix("sha256:")}}
        for name, digest in sorted(publication.sources.items())
    ]
