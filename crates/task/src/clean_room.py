"""Scores a repository by tests that its author never touched.

The difference between the base commit and the agent's working tree (new files included) is
applied to a fresh checkout of the base commit in another folder; then the test patch. Prints an
object of counts and, on the last line, 1.0 or 0.0.
"""
import json, os, re, shutil, subprocess, sys, tempfile
from pathlib import Path

here = Path(__file__).resolve().parent
plan = json.loads((here / "plan.json").read_text(encoding="utf-8"))
space = Path(sys.argv[1])
# Neither hooks nor settings of the agent's repository run here.
GIT = ["git", "-c", "core.hooksPath=/dev/null", "-c", "core.fsmonitor=false", "-c", "safe.directory=*",
       "-c", "diff.external=", "-c", "core.attributesFile=/dev/null"]
ENV = {"PATH": os.environ.get("PATH", "/usr/bin:/bin"), "HOME": "/nonexistent", "GIT_CONFIG_NOSYSTEM": "1"}


def git(folder, *words, data=None):
    done = subprocess.run([*GIT, *words], cwd=folder, input=data, capture_output=True, env=ENV)
    if done.returncode:
        sys.exit(f"git {' '.join(words)}: {done.stderr.decode(errors='replace')}")
    return done.stdout


room = Path(tempfile.mkdtemp(prefix="clean-"))
index = {**ENV, "GIT_INDEX_FILE": str(room / "index")}
subprocess.run([*GIT, "read-tree", plan["base"]], cwd=space, check=True, env=index)
subprocess.run([*GIT, "add", "-A"], cwd=space, check=True, env=index, capture_output=True)
patch = subprocess.run([*GIT, "diff", "--cached", "--binary", "--no-ext-diff", "--no-textconv", plan["base"]],
                       cwd=space, check=True, env=index, capture_output=True).stdout
clean = room / "repo"
git(room, "clone", "--quiet", "--no-checkout", "--no-hardlinks", str(space), str(clean))
git(clean, "checkout", "--quiet", "--detach", plan["base"])
tests = (here / "test.patch").read_bytes()
touched = set(re.findall(rb"^\+\+\+ b/(.+?)\s*$", tests, re.M)) | set(re.findall(rb"^--- a/(.+?)\s*$", tests, re.M))
if patch.strip():
    exclude = [b"--exclude=" + name for name in sorted(touched)]
    git(clean, "apply", "--whitespace=nowarn", *[word.decode() for word in exclude], "-", data=patch)
git(clean, "apply", "--whitespace=nowarn", "-", data=tests)
files = sorted(name.decode() for name in touched if name.endswith(b".py") and (clean / name.decode()).exists())
done = subprocess.run(plan["command"].split() + files, cwd=clean, capture_output=True, text=True)
status = {}
for line in done.stdout.splitlines():
    found = re.match(r"(PASSED|FAILED|ERROR|SKIPPED|XFAIL|XPASS) (\S.*?)(?: - .*)?$", line)
    if found:
        status[found[2].strip()] = found[1]
shutil.rmtree(room, ignore_errors=True)
print(done.stdout[-3000:], file=sys.stderr)
passed = lambda names: sum(status.get(name) in ("PASSED", "XFAIL") for name in names)
fixed, kept = passed(plan["fail_to_pass"]), passed(plan["pass_to_pass"])
print(json.dumps({"fail_to_pass": fixed / len(plan["fail_to_pass"]),
                  "pass_to_pass": kept / len(plan["pass_to_pass"]) if plan["pass_to_pass"] else 1.0}))
print(1.0 if fixed == len(plan["fail_to_pass"]) and kept == len(plan["pass_to_pass"]) else 0.0)
