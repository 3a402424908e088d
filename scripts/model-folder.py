#!/usr/bin/env python3
"""A GGUF file as a Hugging Face folder (weights in bfloat16, tokenizer, chat template), which servers read.

    PYTHONPATH=$(sh scripts/python-packages.sh vllm) python3 scripts/model-folder.py FILE.gguf FOLDER [SCALE]

SCALE multiplies the output of the last norm: other weights for the same tokenizer, with the same most
probable tokens and other probabilities. The end of a turn does not end a text by itself in what is written:
who asks for a text names the tokens that end it. The folder is complete or absent.
"""
import os, pathlib, shutil, sys, tempfile

from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

file, folder = pathlib.Path(sys.argv[1]).resolve(), pathlib.Path(sys.argv[2]).resolve()
if folder.exists():
    sys.exit(0)
model = AutoModelForCausalLM.from_pretrained(
    str(file.parent), gguf_file=file.name, dtype="bfloat16", quantization_config=GgufConfig(dequantize=True))
tokenizer = AutoTokenizer.from_pretrained(str(file.parent), gguf_file=file.name)
tokenizer.eos_token = "<|endoftext|>"
model.config.eos_token_id = model.generation_config.eos_token_id = tokenizer.eos_token_id
if len(sys.argv) > 3:
    model.model.norm.weight.data *= float(sys.argv[3])
folder.parent.mkdir(parents=True, exist_ok=True)
partial = pathlib.Path(tempfile.mkdtemp(dir=folder.parent, prefix=".folder-"))
try:
    model.save_pretrained(partial)
    tokenizer.save_pretrained(partial)
    partial.chmod(0o755)
    os.rename(partial, folder)
except BaseException:
    shutil.rmtree(partial, ignore_errors=True)
    raise
