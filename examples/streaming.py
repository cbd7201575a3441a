"""Streaming: text of several prompts at once as it is generated, in a loop and with asyncio.

Usage: python examples/streaming.py
"""

import asyncio

from pymllm_interp import LM, SamplingParams

PROMPTS = ["Once upon a time", "The best way to learn is", "In the year 2050"]
PARAMS = SamplingParams(temperature=0.7, top_p=0.9, seed=1, max_tokens=24)


async def follow(lm: LM, prompt: str) -> str:
    text = ""
    async for piece in lm.astream(prompt, PARAMS):
        text += piece
        print(f"[{prompt[:12]}] {piece!r}")
    return text


async def follow_all(lm: LM) -> list[str]:
    return await asyncio.gather(*(follow(lm, prompt) for prompt in PROMPTS))


def main() -> list[str]:
    with LM("demo") as lm:
        for piece in lm.stream("The quick brown fox", PARAMS):  # a plain loop
            print(piece, end="", flush=True)
        print(f"  ({piece.finish_reason})")
        texts = asyncio.run(follow_all(lm))  # one batch, three readers
    for prompt, text in zip(PROMPTS, texts, strict=True):
        print(f"{prompt}{text}")
    return texts


if __name__ == "__main__":
    main()
