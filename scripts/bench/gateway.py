#!/usr/bin/env python3
"""Our gateway and gateways of others over the same engine, in the same minutes.

    cargo build --release -p espalier -p gateway --bins --examples
    python3 scripts/bench/gateway.py install            # the others, at fixed versions, once
    python3 scripts/bench/gateway.py run FILE [--only NAME,...] [--seconds S] [--repetitions N] [--cells REGEX]
    python3 scripts/bench/gateway.py table FILE

The engine is a stub that answers at once (crates/gateway/examples/load.rs). Every cell (streamed or not,
size of the body, clients) is measured for every server one after the other before the next cell; what
other programs on the machine take, they take from all. `run` appends to FILE, so that it may be called
again; `table` prints medians over all repetitions. "Added" is against the engine without a gateway, in the
same repetition.

What each does with a call: `espalier serve` renders and encodes the prompt, asks for token ids, parses the
reply, and has it all on the disk before the reply leaves, one rollout per client. agentlightning, rllm and
verifiers pass text on and keep bodies (in memory; rllm in SQLite). vllm-router and smg keep nothing.
"""
import argparse, contextlib, json, os, pathlib, re, shutil, signal, socket, statistics, subprocess, sys, tempfile
import time, urllib.request

ROOT = pathlib.Path(__file__).resolve().parents[2]
RELEASE = pathlib.Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target")) / "release"
ESPALIER = os.environ.get("ESPALIER", str(RELEASE / "espalier"))
LOAD = os.environ.get("LOAD", str(RELEASE / "examples/load"))
CACHE = pathlib.Path(os.environ.get("XDG_CACHE_HOME", pathlib.Path.home() / ".cache")) / "espalier/bench"
PEERS = {  # package, oldest Python, what it is
    "agentlightning": ("agentlightning==1.0.2", (3, 12), "captures, Python"),
    "rllm": ("rllm-model-gateway==0.1.0", (3, 11), "captures, Python"),
    "verifiers": ("verifiers==0.4.0", (3, 12), "captures, Python"),
    "vllm-router": ("vllm-router==0.1.17", (3, 9), "passes through, Rust"),
    "smg": ("smg==1.13.0", (3, 9), "passes through, Rust"),
}
CAPTURING = [name for name, peer in PEERS.items() if peer[2].startswith("captures")]
SERVERS = ["direct", "espalier", *PEERS]
MODES, SIZES, CLIENTS = ["plain", "stream"], [2048, 204800], [1, 32, 256]
QUIET = {**os.environ, "DO_NOT_TRACK": "1", "HF_HUB_OFFLINE": "1", "STUB_KEY": "sk-none"}


def python(oldest):
    """An interpreter that is new enough, or nothing."""
    for name in ["python3", "python3.11", "python3.12", "python3.13", "python3.14"]:
        for found in filter(None, [shutil.which(name)]):
            code = f"import sys; sys.exit(sys.version_info < {oldest!r})"
            if subprocess.run([found, "-c", code], stderr=subprocess.DEVNULL).returncode == 0:
                return found


def install():
    for name, (package, oldest, _) in PEERS.items():
        place = CACHE / package
        if place.exists():
            continue
        interpreter = python(oldest)
        if not interpreter:
            print(f"{name} is left out: it needs Python {'.'.join(map(str, oldest))}")
            continue
        print(f"installing {package}")
        CACHE.mkdir(parents=True, exist_ok=True)
        # Its programs name the folder that it was made in: it cannot be made elsewhere and moved.
        try:
            subprocess.run([interpreter, "-m", "venv", place], check=True)
            subprocess.run([place / "bin/pip", "install", "--quiet", "--disable-pip-version-check", package], check=True)
        except BaseException:
            shutil.rmtree(place, ignore_errors=True)
            raise


def port():
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def ask(method, url, body=None, token=None):
    headers = {"content-type": "application/json"} | ({"authorization": f"Bearer {token}"} if token else {})
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data=data, method=method, headers=headers)
    with urllib.request.urlopen(request, timeout=60) as reply:
        return json.loads(reply.read() or b"null")


def wait(url, process, seconds=120):
    until = time.monotonic() + seconds
    while time.monotonic() < until and process.poll() is None:
        with contextlib.suppress(OSError):
            urllib.request.urlopen(url, timeout=2).close()
            return
        time.sleep(0.2)
    raise SystemExit(f"{url} does not answer; the process {'runs' if process.poll() is None else 'ended'}")


class Server:
    """One server over the stub at `up`; `targets` gives a URL (and key) for each client."""

    def __init__(self, name, up, folder):
        self.name, self.up, self.folder, self.process, self.cell = name, up, folder, None, 0
        self.port = port()
        self.url = f"http://127.0.0.1:{self.port}"
        if name != "direct":
            getattr(self, name.replace("-", "_"))()

    def start(self, argv, health="/health", **more):
        log = open(self.folder / f"{self.name}.log", "wb")
        self.process = subprocess.Popen(argv, stdout=log, stderr=log, stdin=subprocess.DEVNULL, env=QUIET | more,
                                        cwd=self.folder, start_new_session=True)
        if health:
            wait(self.url + health, self.process)

    def program(self, name):
        return str(CACHE / PEERS[self.name][0] / "bin" / name)

    def espalier(self):
        self.admin, self.token = f"http://127.0.0.1:{port()}", "benchmark-of-gateways"
        self.start([ESPALIER, "serve", "--engine", f"vllm:{self.up}", "--tokenizer", str(ROOT / "policy"),
                    "--listen", self.url[7:], "--admin", self.admin[7:], "--run", str(self.folder / "run")],
                   health=None, ESPALIER_ADMIN_TOKEN=self.token)
        wait(self.admin + "/healthz", self.process)

    def agentlightning(self):
        self.start([self.program("python"), "-m", "agentlightning.server", "host=127.0.0.1", f"port={self.port}",
                    "default_proxy.model_name=stub", f"hydra.run.dir={self.folder}"], "/healthz")
        ask("POST", self.url + "/api/models", [{"model": "stub", "endpoint": self.up + "/v1"}])

    def rllm(self):
        self.start([self.program("rllm-model-gateway"), "--host", "127.0.0.1", "--port", str(self.port), "--worker",
                    self.up + "/v1", "--store", "sqlite", "--db-path", str(self.folder / "rllm.db"),
                    "--log-level", "WARNING"])

    def verifiers(self):
        self.start([self.program("python"), str(ROOT / "scripts/bench/verifiers-server.py"), str(self.port), self.up,
                    str(max(CLIENTS))], health=None)
        file = self.folder / "verifiers.log"
        until = time.monotonic() + 120
        while not file.read_text().endswith("ready\n"):
            if time.monotonic() > until or self.process.poll() is not None:
                raise SystemExit(f"verifiers did not start: {file.read_text()[-2000:]}")
            time.sleep(0.2)
        self.lines = [line for line in file.read_text().splitlines() if line.startswith("http")]

    def router(self, program):
        self.start([self.program(program), *(["launch"] if program == "smg" else []), "--host", "127.0.0.1", "--port",
                    str(self.port), "--worker-urls", self.up, "--policy", "round_robin", "--log-level", "warn" if program
                    == "smg" else "warning", "--prometheus-port", str(port())])

    def vllm_router(self):
        self.router("vllm-router")

    def smg(self):
        self.router("smg")

    def targets(self, clients):
        self.cell += 1
        if self.name == "espalier":
            self.open = [f"c{self.cell}.{number}" for number in range(clients)]
            made = [ask("POST", self.admin + "/v1/rollouts", {"id": one}, self.token) for one in self.open]
            return [one["base_url"].rstrip("/") + "/v1/chat/completions" for one in made]
        if self.name == "agentlightning":
            names = [f"c{self.cell}-{number}" for number in range(clients)]
            ask("POST", self.url + "/api/rollouts", [{"input": {}, "rollout_id": one} for one in names])
            return [f"{self.url}/proxy/rollout/{one}/attempt/a1/mode/train/openai/v1/chat/completions" for one in names]
        if self.name == "rllm":
            return [f"{self.url}/sessions/c{self.cell}-{number}/v1/chat/completions" for number in range(clients)]
        if self.name == "verifiers":
            return self.lines[:clients]
        return [(self.up if self.name == "direct" else self.url) + "/v1/chat/completions"]

    def after(self):
        if self.name == "espalier":
            for one in self.open:
                ask("POST", f"{self.admin}/v1/rollouts/{one}/close", {"reward": 0}, self.token)

    def stop(self):
        if self.process:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGTERM)
            try:
                self.process.wait(10)
            except subprocess.TimeoutExpired:
                os.killpg(self.process.pid, signal.SIGKILL)


def load(targets, clients, size, mode, seconds, calls):
    with tempfile.NamedTemporaryFile("w", suffix=".targets") as file:
        file.write("\n".join(targets))
        file.flush()
        words = [LOAD, "run", file.name, clients, size, mode, seconds, calls]
        done = subprocess.run(list(map(str, words)), stdout=subprocess.PIPE, check=True)
    return json.loads(done.stdout)


def run(options):
    names = [name for name in (options.only.split(",") if options.only else SERVERS)
             if name not in PEERS or (CACHE / PEERS[name][0]).exists()]
    out = open(options.file, "a")
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        stub = subprocess.Popen([LOAD, "stub", "64"], stdout=subprocess.PIPE, text=True)
        stack.callback(stub.wait)
        stack.callback(stub.kill)
        up = stub.stdout.readline().strip()
        servers = []
        for name in names:
            place = pathlib.Path(folder) / name
            place.mkdir()
            servers.append(Server(name, up, place))
            stack.callback(servers[-1].stop)
        run_id = f"{time.time():.0f}"
        for repetition in range(options.repetitions):
            for mode in MODES:
                for size in SIZES:
                    for clients in CLIENTS:
                        cell = f"{mode}/{size}/{clients}"
                        if not re.search(options.cells, cell):
                            continue
                        for server in servers:
                            if server.name == "agentlightning" and mode == "stream":
                                continue  # It answers 400: it does not stream.
                            targets = server.targets(clients)
                            # What keeps whole bodies in memory must not fill the machine.
                            calls = 20000 if size < 100_000 else 2000
                            row = load(targets, clients, size, mode, options.seconds, calls)
                            server.after()
                            row |= {"server": server.name, "cell": cell, "repetition": f"{run_id}.{repetition}"}
                            print(json.dumps(row), file=out, flush=True)
                            print(f"{cell} {server.name}: {row['per_s']:.0f} calls/s, {row['failed']} failed", flush=True)


def table(file):
    rows = [json.loads(line) for line in open(file)]
    by = {}
    for row in rows:
        by.setdefault((row["cell"], row["server"]), {})[row["repetition"]] = row
    median = lambda numbers: statistics.median(numbers) if numbers else float("nan")

    def rate(cell, server):
        return median([row["per_s"] for row in by.get((cell, server), {}).values()])

    def added(cell, server, which):
        base = by.get((cell, "direct"), {})
        return median([row[which] - base[at][which] for at, row in by.get((cell, server), {}).items()
                       if at in base and row[which] is not None])

    repetitions = len({row["repetition"] for row in rows})
    print(f"Medians of {repetitions} repetitions: calls/s (added ms: median / 99 %).")
    failed = sum(row["failed"] for row in rows)
    print(f"Calls that failed, of all servers: {failed}.")
    for mode in MODES:
        heads = [f"{size // 1024} KB, {clients}" for size in SIZES for clients in CLIENTS]
        print(f"\n| {mode} | " + " | ".join(heads) + " |\n|---" * 1 + "|---" * len(heads) + "|")
        cells = [f"{mode}/{size}/{clients}" for size in SIZES for clients in CLIENTS]
        for server in SERVERS:
            shown = []
            for cell in cells:
                if (cell, server) not in by:
                    shown.append("–")
                elif server == "direct":
                    shown.append(f"{rate(cell, server):.0f}")
                else:
                    shown.append(f"{rate(cell, server):.0f} ({added(cell, server, 'p50_ms'):.1f} / "
                                 f"{added(cell, server, 'p99_ms'):.1f})")
            print(f"| {server} | " + " | ".join(shown) + " |")
        def ratios(others, best):
            shown = []
            for cell in cells:
                rates = [rate(cell, other) for other in others if (cell, other) in by]
                shown.append(f"{rate(cell, 'espalier') / best(rates):.2f}" if rates else "–")
            return " | ".join(shown)
        print(f"| espalier : fastest that captures | {ratios(CAPTURING, max)} |")
        print(f"| espalier : slowest that captures | {ratios(CAPTURING, min)} |")
        print(f"| espalier : vllm-router | {ratios(['vllm-router'], max)} |")


parser = argparse.ArgumentParser(usage=__doc__)
parser.add_argument("what", choices=["install", "run", "table"])
parser.add_argument("file", nargs="?", default="gateway-bench.jsonl")
parser.add_argument("--only", default="")
parser.add_argument("--seconds", type=float, default=1.0)
parser.add_argument("--repetitions", type=int, default=1)
parser.add_argument("--cells", default="")
options = parser.parse_args()
{"install": install, "run": lambda: run(options), "table": lambda: table(options.file)}[options.what]()
