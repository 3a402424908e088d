"""The interception server of the package verifiers with some rollouts, for scripts/bench/gateway.py.

    python verifiers-server.py PORT UPSTREAM ROLLOUTS

Prints `URL KEY` for each rollout, then `ready`. The package itself opens a port of its own choice, and its
records of a rollout want a task: an empty one is given.
"""
import asyncio, sys

from aiohttp import web
from verifiers.v1.clients.client import ModelContext
from verifiers.v1.configs.client import EvalClientConfig
from verifiers.v1.interception.server import InterceptionServer
from verifiers.v1.session import RolloutSession
from verifiers.v1.trace import AgentInfo, Trace, TraceTask

port, upstream, rollouts = int(sys.argv[1]), sys.argv[2], int(sys.argv[3])
listen = web.TCPSite.__init__
web.TCPSite.__init__ = lambda site, runner, host=None, _port=None, **more: listen(site, runner, host, port, **more)


def trace():
    task = TraceTask.model_construct(type="Bench", data=None)
    agent = AgentInfo.model_construct(config=None, name="agent", trainable=True)
    return Trace.model_construct(task=task, agent=agent)


async def main():
    server = InterceptionServer()
    await server.start()
    context = ModelContext(model="stub", client=EvalClientConfig(base_url=upstream + "/v1", api_key_var="STUB_KEY"))
    for _ in range(rollouts):
        key, _ = server.register(RolloutSession(ctx=context, trace=trace()))
        print(f"{server.base_url}/v1/chat/completions {key}")
    print("ready", flush=True)
    await asyncio.Event().wait()


asyncio.run(main())
