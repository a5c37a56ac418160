"""Answer prompts of token ids by vLLM, in an environment that has it: ``python vllm_answers.py MODEL DTYPE TOKENS PROMPTS.json ANSWERS.json``.

Writes a JSON list: of each prompt the tokens of the answer, greedy, and their log-probabilities. vLLM logs to standard output.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path


def main() -> None:
    """Answer the prompts of a file."""
    from vllm import LLM, SamplingParams

    model, dtype, tokens, asked, answered = sys.argv[1:]
    prompts = json.loads(Path(asked).read_text())
    # A third of the GPU leaves room for the others; without graphs it starts in a fifth of the time.
    engine = LLM(model=model, dtype=dtype, gpu_memory_utilization=0.3, max_model_len=512, enforce_eager=True, seed=0)
    sampling = SamplingParams(temperature=0.0, max_tokens=int(tokens), logprobs=0, ignore_eos=True)
    found = engine.generate([{"prompt_token_ids": prompt} for prompt in prompts], sampling)
    answers = []
    for one in found:
        answer = one.outputs[0]
        chosen = [step[token].logprob for token, step in zip(answer.token_ids, answer.logprobs, strict=True)]
        answers.append({"tokens": list(answer.token_ids), "logprobs": chosen})
    Path(answered).write_text(json.dumps(answers))


if __name__ == "__main__":
    main()
