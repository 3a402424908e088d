"""Trains a recipe on several seeds and writes what came out: docs/results/RUN/seedK/summary.json, and the
tables of docs/results/README.md from all summaries that are there. See scripts/results.sh.

A summary is the run's own summary.json with one more key, `cost`: processor seconds of everything that the run
started (the kernel's count of waited-for children), cores, and the recipe's digest. A run that is complete is not
made again; one that was interrupted is resumed. When the recipe's policy is the product of the mixed cold start and
is not there yet, that is made first.
"""

import argparse
import hashlib
import json
import math
import os
import subprocess
import sys
import tomllib
from pathlib import Path

COLD_START = "cold-start-mixed"
Z95 = 1.96


def say(text):
    print(f"results: {text}", flush=True)


def run_measured(command, log):
    """Runs a command; returns exit code and processor seconds of it and all its descendants."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with open(log, "ab") as out:
        child = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL)
        try:
            _, status, used = os.wait4(child.pid, 0)
        except KeyboardInterrupt:
            _, status, used = os.wait4(child.pid, 0)
    return os.waitstatus_to_exitcode(status), used.ru_utime + used.ru_stime


def policy_ready(recipe, program, runs):
    folder = Path(recipe["policy"]["folder"])
    if (folder / "model.safetensors").is_file():
        return
    cold = Path(f"recipes/{COLD_START}.toml")
    if Path(tomllib.loads(cold.read_text())["sft"]["out"]) != folder:
        sys.exit(f"results: {folder} has no model.safetensors; make the policy first")
    out = runs / COLD_START
    say(f"{folder} is not there yet: espalier sft {cold} --out {out}")
    code, cpu_s = run_measured([program, "sft", str(cold), "--out", str(out)], runs / f"{COLD_START}.log")
    if code != 0:
        sys.exit(f"results: the cold start ended with {code}; see {runs / COLD_START}.log")
    say(f"cold start: {cpu_s:.0f} processor seconds")


def train(name, seed, steps, program, runs, docs):
    recipe_path = Path(f"recipes/{name}.toml")
    text = recipe_path.read_bytes()
    recipe = tomllib.loads(text.decode())
    digest = hashlib.sha256(text).hexdigest()
    target = docs / name / f"seed{seed}" / "summary.json"
    if target.is_file():
        if json.loads(target.read_text())["cost"]["recipe_sha256"] == digest and steps is None:
            say(f"{name}, seed {seed}: done already ({target})")
            return
        say(f"{name}, seed {seed}: the recipe or its steps changed, so it is run again")
    policy_ready(recipe, program, runs)
    out = runs / name / f"seed{seed}"
    spent = out.parent / f"seed{seed}.cpu_s.json"
    if (out / "summary.json").is_file():
        sys.exit(f"results: {out} holds a finished run without a result in {docs}; remove the folder, then try again")
    if out.exists():
        command = [program, "train", "--resume", str(out)]
    else:
        spent.unlink(missing_ok=True)
        command = [program, "train", str(recipe_path), "--seed", str(seed), "--out", str(out)]
    if steps is not None:
        command += ["--steps", str(steps)]
    log = out.parent / f"seed{seed}.log"
    say(f"{name}, seed {seed}: {' '.join(command[1:])}, output in {log}")
    code, cpu_s = run_measured(command, log)
    # What earlier, interrupted parts of this run cost is not forgotten.
    cpu_s += json.loads(spent.read_text()) if spent.is_file() else 0.0
    spent.write_text(json.dumps(cpu_s))
    if code != 0:
        sys.exit(f"results: {name}, seed {seed} ended with {code}; see {log}; the same command goes on with it")
    summary = json.loads((out / "summary.json").read_text())
    summary["cost"] = {
        "cpu_s": round(cpu_s, 1),
        "cores": os.cpu_count(),
        "recipe": str(recipe_path),
        "recipe_sha256": digest,
        "trained_through": trained_through(recipe),
        "rollouts_per_step": rollouts_per_step(recipe),
    }
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(json.dumps(summary, indent=2, sort_keys=True) + "\n")
    say(f"{name}, seed {seed}: {target}")


def trained_through(recipe):
    mix = recipe["train"].get("mix")
    names = recipe.get("harnesses", ["react"])
    return [name for name in names if mix is None or mix[name] > 0]


def rollouts_per_step(recipe):
    """At most: a step draws no task twice."""
    each = recipe["train"]["tasks_per_step"] * recipe["train"]["samples"]
    return each if "mix" in recipe["train"] else each * len(recipe.get("harnesses", ["react"]))


def points(share):
    return f"{100 * share:.1f}"


def deviation(passed):
    """Standard error, from the width of the interval that the run computed (clustered by task)."""
    low, high = passed["ci95"]
    return (high - low) / (2 * Z95)


def gain(before, after):
    """Difference and standard error. Both sides have the same tasks, so taking them for independent is too wide,
    never too narrow, when what a task does before and after goes together."""
    error = math.hypot(deviation(before), deviation(after))
    return after["pass_at_1"] - before["pass_at_1"], error


def with_interval(value, error):
    low, high = value - Z95 * error, value + Z95 * error
    return f"{100 * value:+.1f} [{100 * low:+.1f}, {100 * high:+.1f}]"


def side(passed):
    low, high = passed["ci95"]
    lost = f", {passed['lost']} lost" if passed["lost"] else ""
    return f"{points(passed['pass_at_1'])} [{100 * low:.0f}, {100 * high:.0f}]{lost}"


def summaries(docs):
    found = {}
    for path in sorted(docs.glob("*/seed*/summary.json")):
        seed = path.parent.name.removeprefix("seed")
        found.setdefault(path.parent.parent.name, {})[int(seed)] = json.loads(path.read_text())
    return {name: dict(sorted(seeds.items())) for name, seeds in sorted(found.items())}


def table_of(name, seeds):
    first = next(iter(seeds.values()))
    trained = first["cost"]["trained_through"]
    harnesses = first["harnesses"]
    lines = [
        f"## {name}",
        "",
        f"`{first['cost']['recipe']}`: trained through {' and '.join(trained)}; {first['steps']} steps of at most "
        f"{first['cost']['rollouts_per_step']} rollouts; seeds {', '.join(map(str, seeds))}.",
        "",
        "| seed | harness | before, % | after, % | change, points | rollouts a side |",
        "|---|---|---|---|---|---|",
    ]
    changes = {harness: [] for harness in harnesses}
    for seed, summary in seeds.items():
        for harness in harnesses:
            before = summary["eval"]["before"]["harnesses"][harness]
            after = summary["eval"]["after"]["harnesses"][harness]
            change = gain(before, after)
            changes[harness].append(change)
            kind = "" if harness in trained else " (not trained)"
            lines.append(
                f"| {seed} | {harness}{kind} | {side(before)} | {side(after)} | {with_interval(*change)} | {after['n']} |"
            )
    for harness, own in changes.items():
        if len(own) > 1:
            mean = sum(value for value, _ in own) / len(own)
            error = math.sqrt(sum(error**2 for _, error in own)) / len(own)
            kind = "" if harness in trained else " (not trained)"
            lines.append(f"| all | {harness}{kind} | | | **{with_interval(mean, error)}** | |")
    lines += [
        "",
        "| seed | CPU-hours | per point | wall, min: rollouts, learner, evaluation | transfer | tokens captured, unique, trained "
        "| forks | discarded rollouts |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for at, (seed, summary) in enumerate(seeds.items()):
        own = sum(changes[harness][at][0] for harness in trained) / len(trained)
        others = [changes[harness][at][0] for harness in harnesses if harness not in trained]
        hours = summary["cost"]["cpu_s"] / 3600
        per_point = f"{hours / (100 * own):.4f}" if own > 0 else "no gain"
        transfer = f"{sum(others) / len(others) / own:.2f}" if others and own > 0 else "–"
        kinds = summary["dispositions"]
        whole = sum(kinds.values())
        dropped = whole - kinds.get("train", 0) - kinds.get("truncate", 0)
        spent = [summary["seconds"][part] for part in ("rollout", "train", "eval")]
        minutes = ", ".join(f"{seconds / 60:.1f}" for seconds in spent)
        counts = ", ".join(f"{summary['tokens'][kind] / 1000:.0f}k" for kind in ("captured", "unique", "trained"))
        forks = ", ".join(f"{count} {cause}" for cause, count in sorted(summary["forks"].items()))
        lines.append(
            f"| {seed} | {hours:.2f} | {per_point} | {minutes} | {transfer} | {counts} | {forks or 'none'} "
            f"| {dropped} of {whole} |"
        )
    during = [
        f"| {seed} | {at['step']} | "
        + " | ".join(side(at["harnesses"][harness]) for harness in harnesses)
        + " |"
        for seed, summary in seeds.items()
        for at in summary["eval"].get("during", [])
    ]
    if during:
        lines += ["", "| seed | after step | " + " | ".join(harnesses) + " |", "|---|---|" + "---|" * len(harnesses)]
        lines += during
    return lines + [""]


HEAD = """# Results

Made by `sh scripts/results.sh` from the `summary.json` of each run in this folder; do not edit by hand. What they say:
[reading.md](reading.md).

Held-out pass@1, sampled at the training temperature, before and after training. In brackets: 95 % intervals. Those of
one side are clustered by task, as the run computed them; those of a change take both sides for independent, though they
share tasks; those of all seeds are of the mean of the seeds' changes: they say how well it was measured on these tasks
and seeds, not how other tasks or seeds would turn out. "Transfer" is the mean change through harnesses
that were measured and not trained, as a part of the mean change through the trained ones. CPU-hours are those of all
processes of the run, its two measurements included; "per point" divides them by the mean change through the trained
harnesses. Forks are continuations that did not carry on token by token, by cause; tokens are those of the training
rollouts. `espalier inspect RUN` has the rest: calls, continuation, stages, what each fork cost.

"""


def tables(docs):
    found = summaries(docs)
    text = HEAD
    if not found:
        text += "There are none yet.\n"
    for name, seeds in found.items():
        text += "\n".join(table_of(name, seeds)) + "\n"
    docs.mkdir(parents=True, exist_ok=True)
    (docs / "README.md").write_text(text.rstrip() + "\n")
    say(f"{docs / 'README.md'}: {sum(map(len, found.values()))} runs")


def main():
    parser = argparse.ArgumentParser(prog="results.sh")
    parser.add_argument("run", nargs="?", help="name of a recipe in recipes/")
    parser.add_argument("--seeds", default="0", help="comma-separated")
    parser.add_argument("--steps", type=int, help="instead of the recipe's, to try it")
    parser.add_argument("--tables", action="store_true", help="only make the tables")
    parser.add_argument("--program", default="target/release/espalier")
    parser.add_argument("--runs", type=Path, default=Path("runs/results"), help="run directories")
    parser.add_argument("--docs", type=Path, default=Path("docs/results"), help="summaries and tables")
    arguments = parser.parse_args()
    if arguments.tables == (arguments.run is not None):
        parser.error("expected a RUN or --tables")
    if arguments.run is not None:
        if not Path(f"recipes/{arguments.run}.toml").is_file():
            parser.error(f"there is no recipes/{arguments.run}.toml")
        for seed in arguments.seeds.split(","):
            train(arguments.run, int(seed), arguments.steps, arguments.program, arguments.runs, arguments.docs)
            tables(arguments.docs)
    else:
        tables(arguments.docs)


if __name__ == "__main__":
    main()
