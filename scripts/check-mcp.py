"""The official client of the Model Context Protocol against our tool servers.

    PYTHONPATH=$(sh scripts/python-packages.sh mcp) python3 scripts/check-mcp.py stdio PROGRAM [ARGUMENT ...]
    PYTHONPATH=$(sh scripts/python-packages.sh mcp) python3 scripts/check-mcp.py http URL

Lists the tools, calls `write_file`, `search_files`, `shell`, `todo_write` and `todo_read` when they are
there, asks for a tool that is not, and prints what it found as JSON. Connects twice: as a client of
today does by itself (it looks for the newest protocol first), and with the handshake alone.
"""

import asyncio
import json
import sys

from mcp import Client, ClientSession, StdioServerParameters
from mcp.client.stdio import stdio_client
from mcp.client.streamable_http import streamable_http_client


def text(result):
    return [("error" if getattr(result, "is_error", getattr(result, "isError", False)) else "ok"), result.content[0].text]


async def calls(client):
    names = [tool.name for tool in (await client.list_tools()).tools]
    found = {"tools": names}
    if "write_file" in names:
        found["write"] = text(await client.call_tool("write_file", {"path": "by-client.txt", "content": "one\ntwo\n"}))
        found["search"] = text(await client.call_tool("search_files", {"text": "two"}))
        found["shell"] = text(await client.call_tool("shell", {"command": "wc -l < by-client.txt; exit 4"}))
        await client.call_tool("todo_write", {"items": [{"text": "rest"}]})
        found["todo"] = text(await client.call_tool("todo_read", {}))
        found["missing"] = text(await client.call_tool("read_file", {"path": "none.txt"}))
    else:
        found["first"] = text(await client.call_tool(names[0], {}))
    try:
        await client.call_tool("fly", {})
        found["unknown"] = "no error"
    except Exception as error:  # noqa: BLE001 - any kind of refusal will do
        found["unknown"] = type(error).__name__
    return found


async def main(kind, rest):
    def transport():
        if kind == "http":
            return streamable_http_client(rest[0])
        return stdio_client(StdioServerParameters(command=rest[0], args=rest[1:]))

    async with Client(rest[0] if kind == "http" else StdioServerParameters(command=rest[0], args=rest[1:])) as client:
        by_itself = await calls(client)
    async with transport() as streams:
        async with ClientSession(streams[0], streams[1]) as session:
            hello = await session.initialize()
            version = getattr(hello, "protocol_version", None) or hello.protocolVersion
            by_handshake = await calls(session)
    print(json.dumps({"version": version, "by_itself": by_itself, "by_handshake": by_handshake}))


asyncio.run(main(sys.argv[1], sys.argv[2:]))
