"""Variants of one recipe, each on the same seeds, and what came of them.

    python3 scripts/ablations.py [--seeds 0,1,2] [--only NAME,...]

A variant is recipes/ablation.toml with some lines added (VARIANTS below). Runs go to runs/ablations; a run that has its
summary is not made again. Which branches are selected is no variant: with exact continuation no call of this harness
forks, so all policies select the same. docs/results/ablations.md gets the table, of all variants that were run.
"""

import argparse
import json
import math
import os
import subprocess
import sys
from pathlib import Path

BASE = Path("recipes/ablation.toml")
# Section and lines that are added to it. A section that the recipe lacks is appended.
VARIANTS = {
    "GRPO": {},
    "one pass over a batch": {"[train.grpo]": ["passes = 1"]},
    "no importance correction": {"[train.grpo]": ["correction.apply = false"]},
    "advantages below 0 in full": {"[train]": ["negative_weight = 1.0"]},
    "no curriculum": {"-": ["[train.curriculum]"]},
    "RLOO": {"[train]": ['baseline = "leave_one_out"', 'scale = "none"']},
    "PPO": {"[train.ppo]": ['critic = "shared"', "value_weight = 0.05", "rate_factor = 10.0"]},
}


def recipe(changes):
    """The recipe's text with the lines of each section in place of those of the same key."""
    lines = BASE.read_text().splitlines()
    for section, new in changes.items():
        if section == "-":
            lines = [line for line in lines if line not in new]
            continue
        if section not in lines:
            lines += ["", section]
        keys = {line.split(" =")[0] for line in new}
        at = lines.index(section) + 1
        end = next((i for i in range(at, len(lines)) if lines[i].startswith("[")), len(lines))
        kept = [line for line in lines[at:end] if line.split(" =")[0] not in keys]
        lines[at:end] = new + kept
    return "\n".join(lines) + "\n"


def run(name, seed, program, runs):
    out = runs / name.replace(" ", "-") / f"seed{seed}"
    if not (out / "summary.json").is_file():
        text = out.with_suffix(".toml")
        text.parent.mkdir(parents=True, exist_ok=True)
        text.write_text(recipe(VARIANTS[name]))
        command = [program, "train", "--resume", str(out)] if out.exists() else [
            program, "train", str(text), "--seed", str(seed), "--out", str(out)]
        with open(out.with_suffix(".log"), "ab") as log:
            code = subprocess.run(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL).returncode
        if code != 0:
            sys.exit(f"ablations: {name}, seed {seed} ended with {code}; see {out.with_suffix('.log')}")
    return json.loads((out / "summary.json").read_text())


def table(found):
    lines = [
        "# Ablations",
        "",
        "Made by `python3 scripts/ablations.py`; do not edit by hand. `recipes/ablation.toml`: the setting of the mixed",
        "recipe through our own harness, 10 steps of at most 64 rollouts. Held-out pass@1 in per cent, sampled at the training",
        "temperature, 288 rollouts a side and seed; the last column is the mean of the seeds' changes and the standard",
        "deviation between them.",
        "",
        "| variant | " + " | ".join(f"seed {seed}" for seed in sorted({seed for _, seed in found})) + " | change, points |",
        "|---|" + "---|" * (len({seed for _, seed in found}) + 1),
    ]
    for name in VARIANTS:
        seeds = sorted(seed for other, seed in found if other == name)
        if not seeds:
            continue
        sides = [[100 * found[name, seed]["eval"][side]["pass_at_1"] for side in ("before", "after")] for seed in seeds]
        changes = [after - before for before, after in sides]
        mean = sum(changes) / len(changes)
        spread = math.sqrt(sum((one - mean) ** 2 for one in changes) / max(1, len(changes) - 1))
        cells = [f"{before:.1f} → {after:.1f}" for before, after in sides]
        lines.append(f"| {name} | " + " | ".join(cells) + f" | {mean:+.1f} ± {spread:.1f} |")
    return "\n".join(lines) + "\n"


def main():
    parser = argparse.ArgumentParser(prog="ablations.py")
    parser.add_argument("--seeds", default="0,1,2", help="comma-separated")
    parser.add_argument("--only", help="comma-separated variants")
    parser.add_argument("--program", default="target/release/espalier")
    parser.add_argument("--runs", type=Path, default=Path("runs/ablations"))
    parser.add_argument("--docs", type=Path, default=Path("docs/results"))
    arguments = parser.parse_args()
    program = os.path.abspath(arguments.program)
    os.chdir(Path(__file__).resolve().parent.parent)
    names = arguments.only.split(",") if arguments.only else list(VARIANTS)
    for name in names:
        if name not in VARIANTS:
            parser.error(f"there is no variant {name!r}: {', '.join(VARIANTS)}")
    found = {}
    for seed in map(int, arguments.seeds.split(",")):
        for name in names:
            found[name, seed] = run(name, seed, program, arguments.runs)
            passed = found[name, seed]["eval"]
            print(f"ablations: {name}, seed {seed}: {passed['before']['pass_at_1']:.3f} -> {passed['after']['pass_at_1']:.3f}", flush=True)
    arguments.docs.mkdir(parents=True, exist_ok=True)
    (arguments.docs / "ablations.md").write_text(table(found))


if __name__ == "__main__":
    main()
