"""How much of one text is in another, without what a template adds to every passage."""

from __future__ import annotations

import numpy as np

from slipway.documents.separation import frame, overlap_share, remove_hashes, shingles

SYSTEM = (
    "<|im_start|>system\nYou are a helpful assistant that was trained by people who wrote this long prompt.<|im_end|>\n"
)


def conversation(number: int) -> str:
    words = np.random.default_rng(number).integers(1000, 9999, 80)
    return (
        f"{SYSTEM}<|im_start|>user\nExplain.<|im_end|>\n<|im_start|>assistant\n{' '.join(map(str, words))}<|im_end|>\n"
    )


def test_a_trainers_own_split_shares_only_its_template() -> None:
    training = [shingles(conversation(number)) for number in range(40)]
    heldout = shingles("".join(conversation(number) for number in range(100, 110)))
    common = frame(training)
    assert min(overlap_share(each, heldout) for each in training) > 0.1
    assert max(overlap_share(remove_hashes(each, common), heldout) for each in training) < 0.02


def test_a_document_that_leaked_is_still_seen() -> None:
    training = [shingles(conversation(number)) for number in (*range(40), 100)]
    heldout = shingles("".join(conversation(number) for number in range(100, 110)))
    common = frame(training)
    assert overlap_share(remove_hashes(training[-1], common), heldout) == 1.0


def test_few_passages_have_no_frame() -> None:
    assert not len(frame([shingles(conversation(0)), shingles(conversation(0))]))
    assert not len(frame([]))
