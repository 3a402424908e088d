"""Reads an export with veRL's own classes, on the CPU: its RL data set, the output of its agent loops, its
GRPO advantages, its SFT data set. Prints what was found; any failure is an exception.

    espalier export RUN --format verl --out FOLDER/verl.parquet
    espalier export RUN --format sft --parquet --out FOLDER/sft.parquet
    PYTHONPATH=$(sh scripts/python-packages.sh verl) python3 scripts/check-verl.py FOLDER POLICY

POLICY is a Hugging Face folder with tokenizer and chat template.
"""

import sys

import numpy as np
import torch
from omegaconf import OmegaConf
from transformers import AutoTokenizer
from verl.experimental.agent_loop.agent_loop import AgentLoopOutput
from verl.trainer.ppo.core_algos import agg_loss, compute_grpo_outcome_advantage
from verl.utils.dataset.multiturn_sft_dataset import MultiTurnSFTDataset
from verl.utils.dataset.rl_dataset import RLHFDataset, collate_fn

folder, policy = sys.argv[1:]
tokenizer = AutoTokenizer.from_pretrained(policy)
if tokenizer.pad_token is None:
    tokenizer.pad_token = tokenizer.eos_token

# 1. The data set that its trainers iterate over.
config = OmegaConf.create({"max_prompt_length": 1 << 20, "cache_dir": folder, "filter_overlong_prompts_workers": 1})
rows = RLHFDataset(f"{folder}/verl.parquet", tokenizer, config)
assert len(rows) > 0, "every prompt was filtered out"
batch = collate_fn([rows[at] for at in range(len(rows))])
assert all(prompt[-1]["role"] in ("user", "tool") for prompt in batch["raw_prompt"])

# 2. What its agent loops hand to the trainer: one output per row, as tensors.
fields = AgentLoopOutput.model_fields
outputs = [AgentLoopOutput(**{key: row[key] for key in fields if key in row}).as_dict() for row in rows.dataframe]
for output in outputs:
    assert output["responses"].shape == output["response_mask"].shape == output["rollout_log_probs"].shape
    assert output["rm_scores"].sum().item() == output["rm_scores"][-1].item()
    assert (output["rollout_log_probs"][output["response_mask"] == 0] == 0).all()
pad = lambda key: torch.nn.utils.rnn.pad_sequence([output[key] for output in outputs], batch_first=True)
mask, scores = pad("response_mask"), pad("rm_scores")

# 3. GRPO over the last row of each (uid, session), as its trainer does; then one loss over all rows.
sessions = {}
for at, row in enumerate(rows.dataframe):
    sessions[row["uid"], row["session_id"]] = at
last = sorted(sessions.values())
uids = np.array([rows.dataframe[at]["uid"] for at in last], dtype=object)
advantages, _ = compute_grpo_outcome_advantage(scores[last], mask[last], uids)
of_session = dict(zip(last, advantages.amax(1) + advantages.amin(1)))
worst = 0.0
for at in last:
    row = rows.dataframe[at]
    ours, theirs = row["extra_info"]["advantage"], of_session[at].item()
    if ours is not None and mask[at].sum() > 0:
        worst = max(worst, abs(ours - theirs))
assert worst < 1e-4, f"advantages differ by {worst}"
loss = agg_loss(-pad("rollout_log_probs"), mask, "token-mean")
assert torch.isfinite(loss)

# 4. Its data set for supervised training. Schemas of tools are JSON text in Parquet, so not read here.
config = OmegaConf.create({"max_length": 1 << 20, "pad_mode": "no_padding", "tools_key": "none", "ignore_input_ids_mismatch": True})
chats = MultiTurnSFTDataset(f"{folder}/sft.parquet", tokenizer, config)
trained = sum(int(chats[at]["loss_mask"].sum()) for at in range(len(chats)))
assert trained > 0
print(f"verl: {len(rows)} rows of {len(last)} rollouts, {int(mask.sum())} trained tokens, "
      f"advantages within {worst:.1e}, sft: {len(chats)} chats, {trained} trained tokens")
