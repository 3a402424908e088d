#!/usr/bin/env python3
"""Makes the reference folders of crates/model/tests/reference with Hugging Face transformers.

    python scripts/reference-models.py crates/model/tests/reference

Needs torch, transformers and peft (any recent CPU build). Each folder is a random model of a shape that
we read, as transformers itself saves it, with `expected.json`: token ids and the log-softmax of
every position in float64-accumulated float32.
"""
import json, pathlib, sys
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config, Qwen3Config

out = pathlib.Path(sys.argv[1])
base = dict(vocab_size=29, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, max_position_embeddings=64, rms_norm_eps=1e-5)
yarn = dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=16, rope_theta=10000.0)
llama3 = dict(rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
              original_max_position_embeddings=16, rope_theta=10000.0)
linear = dict(rope_type="linear", factor=2.0, rope_theta=10000.0)
plain = dict(rope_type="default", rope_theta=50000.0)
MODELS = {
    "llama": (LlamaConfig(**base, rope_parameters=plain, tie_word_embeddings=False), {}),
    "llama-yarn": (LlamaConfig(**base, rope_parameters=yarn, tie_word_embeddings=True), {}),
    "llama-llama3": (LlamaConfig(**base, rope_parameters=llama3, tie_word_embeddings=True), {}),
    "qwen2": (Qwen2Config(**base, rope_parameters=plain, tie_word_embeddings=True), {}),
    "qwen2-sharded-linear": (Qwen2Config(**base, rope_parameters=linear, tie_word_embeddings=False),
                             dict(max_shard_size="6KB")),
    "qwen3": (Qwen3Config(**base, head_dim=8, rope_parameters=plain, tie_word_embeddings=True), {}),
    "qwen3-bf16": (Qwen3Config(**base, head_dim=8, rope_parameters=plain, tie_word_embeddings=False), {}),
}
for name, (config, how) in MODELS.items():
    torch.manual_seed(len(name))
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for key, p in model.named_parameters():  # far from the initialisation: attention must matter
            p.copy_(torch.randn_like(p) * (0.3 if p.dim() > 1 else 0.2) + (0 if p.dim() > 1 or "bias" in key else 1))
        if name.endswith("bf16"):
            for p in model.parameters():
                p.copy_(p.to(torch.bfloat16).float())
        ids = torch.randint(0, 29, (1, 40), generator=torch.Generator().manual_seed(7))
        logits = model(ids).logits[0]
        logs = torch.log_softmax(logits.double(), -1)
    folder = out / name
    (model.to(torch.bfloat16) if name.endswith("bf16") else model).save_pretrained(folder, **how)
    (folder / "generation_config.json").unlink(missing_ok=True)
    (folder / "expected.json").write_text(json.dumps(
        {"ids": ids[0].tolist(), "log_softmax": [[round(v, 7) for v in row] for row in logs.tolist()]}))
    print(name, sorted(p.name for p in folder.iterdir()))

# An adapter as PEFT saves it, on the model `llama`; `expected.json` is of both together.
from peft import LoraConfig, get_peft_model
torch.manual_seed(3)
model = AutoModelForCausalLM.from_pretrained(out / "llama", attn_implementation="eager").eval()
lora = get_peft_model(model, LoraConfig(r=3, lora_alpha=6, target_modules=["q_proj", "v_proj", "down_proj"])).eval()
with torch.no_grad():
    for key, p in lora.named_parameters():
        if "lora_" in key:
            p.copy_(torch.randn_like(p) * 0.2)
    logs = torch.log_softmax(lora(ids).logits[0].double(), -1)
folder = out.parent / "reference-lora"
lora.save_pretrained(folder)
(folder / "README.md").unlink(missing_ok=True)
(folder / "expected.json").write_text(json.dumps(
    {"ids": ids[0].tolist(), "log_softmax": [[round(v, 7) for v in row] for row in logs.tolist()]}))
print(folder, sorted(p.name for p in folder.iterdir()))
