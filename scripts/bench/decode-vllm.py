#!/usr/bin/env python3
"""Prompts and drawn tokens with vLLM's build for processors, for the shape that `decode` measures.

    PYTHONPATH=$(sh scripts/python-packages.sh vllm) python3 decode-vllm.py MODEL PROMPT DRAWN DTYPE BATCH...

MODEL is a Hugging Face folder; DTYPE float32 or bfloat16. One thread, the engine in this process, no prefix
cache, best of three; tokens per processor second and per second of wall.
"""
import os
import sys
import time

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "0")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

from vllm import LLM, SamplingParams  # noqa: E402
from vllm.inputs import TokensPrompt  # noqa: E402


def main():
    folder, prompt, drawn, dtype = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
    engine = LLM(
        model=folder,
        dtype=dtype,
        max_model_len=2048,
        max_num_seqs=64,
        enable_prefix_caching=False,
        enforce_eager=True,
        skip_tokenizer_init=True,
    )

    def once(batch, count):
        prompts = [
            TokensPrompt(prompt_token_ids=[(7 + 13 * i + 31 * row) % 40000 for i in range(prompt)]) for row in range(batch)
        ]
        settings = SamplingParams(temperature=1.0, max_tokens=count, ignore_eos=True, seed=0, detokenize=False)
        processor, wall = time.process_time(), time.monotonic()
        replies = engine.generate(prompts, settings, use_tqdm=False)
        assert all(len(reply.outputs[0].token_ids) == count for reply in replies)
        return time.process_time() - processor, time.monotonic() - wall

    for batch in map(int, sys.argv[5:]):
        once(batch, 2)
        first = min(once(batch, 1) for _ in range(3))
        whole = min(once(batch, 1 + drawn) for _ in range(3))
        tokens = batch * drawn
        print(
            f"vllm {dtype}, batch {batch}: drawn {tokens / (whole[0] - first[0]):.0f} per processor second, "
            f"{tokens / (whole[1] - first[1]):.0f} per second; "
            f"prompts {batch * prompt / first[0]:.0f} per processor second",
            flush=True,
        )


main()
