"""The official Python SDKs against a served gateway: every reply is parsed by them, streamed and
not. Prints one line per thing proven; exits with a traceback at the first that is wrong."""

import json
import sys
import urllib.request

import anthropic
import openai
from google import genai
from google.genai import errors as gemini_errors
from google.genai import types

hello = json.loads(sys.argv[1])
BASE, ADMIN, TOKEN = hello["base_url"], hello["admin_url"], hello["admin_token"]
THOUGHT, TEXT, LAST = "I look first.", "Looking – “now”.", "Two files."
COMMANDS = ["ls -la", 'printf \'%s\\n\' "ü"']
SCHEMA = {
    "type": "object",
    "properties": {"command": {"type": "string"}, "timeout": {"type": "number"}},
    "required": ["command"],
}
LONG = "qzx " * 60_000


def rollout():
    """A fresh rollout: its key and its root."""
    body = json.dumps({"task": "look"}).encode()
    headers = {"authorization": f"Bearer {TOKEN}", "content-type": "application/json"}
    request = urllib.request.Request(f"{ADMIN}/v1/rollouts", body, headers)
    opened = json.load(urllib.request.urlopen(request, timeout=30))
    return opened["key"], BASE + opened["path"]


def same(found, expected):
    assert found == expected, f"found {found!r}, expected {expected!r}"


def proven(what):
    print(f"proven {what}", flush=True)


def refused(kind, code, call):
    try:
        call()
    except kind as error:
        found = getattr(error, "status_code", None) or getattr(error, "code", None)
        same(found, code)
        return error
    raise AssertionError(f"expected {kind.__name__}")


def chat():
    tools = [{"type": "function", "function": {"name": "bash", "parameters": SCHEMA}}]
    for stream in (False, True):
        key, root = rollout()
        client = openai.OpenAI(api_key=key, base_url=f"{root}/v1", max_retries=0)
        messages = [{"role": "user", "content": "look"}]
        asked = dict(model="policy", tools=tools, max_tokens=500)
        for turn in (0, 1):
            if stream:
                with client.chat.completions.stream(
                    messages=messages, stream_options={"include_usage": True}, **asked
                ) as events:
                    reply = events.get_final_completion()
            else:
                reply = client.chat.completions.create(messages=messages, **asked)
            choice, usage = reply.choices[0], reply.usage
            assert usage.prompt_tokens > 10 and usage.completion_tokens > 1, usage
            same(usage.total_tokens, usage.prompt_tokens + usage.completion_tokens)
            if turn == 1:
                same((choice.message.content, choice.finish_reason), (LAST, "stop"))
                break
            same((choice.message.content, choice.finish_reason), (TEXT, "tool_calls"))
            same(choice.message.model_extra["reasoning_content"], THOUGHT)
            calls = choice.message.tool_calls
            same([json.loads(c.function.arguments)["command"] for c in calls], COMMANDS)
            assert len({c.id for c in calls}) == 2
            messages.append(
                {
                    "role": "assistant",
                    "content": choice.message.content,
                    "tool_calls": [
                        {"id": c.id, "type": "function",
                         "function": {"name": c.function.name, "arguments": c.function.arguments}}
                        for c in calls
                    ],
                }
            )
            messages += [{"role": "tool", "tool_call_id": c.id, "content": "ok"} for c in calls]
        proven(f"openai chat stream={stream}")
    same([m.id for m in client.models.list()], ["policy"])
    bad = openai.OpenAI(api_key="wrong", base_url=f"{BASE}/v1", max_retries=0)
    ask = dict(model="m", messages=[{"role": "user", "content": "x"}])
    refused(openai.AuthenticationError, 401, lambda: bad.chat.completions.create(**ask))
    ask["messages"][0]["content"] = LONG
    long = refused(openai.BadRequestError, 400, lambda: client.chat.completions.create(**ask))
    same(long.code, "context_length_exceeded")
    proven("openai chat errors")


def responses():
    tools = [{"type": "function", "name": "bash", "parameters": SCHEMA, "strict": False}]
    for stream in (False, True):
        key, root = rollout()
        client = openai.OpenAI(api_key=key, base_url=f"{root}/v1", max_retries=0)
        items = [{"role": "user", "content": "look"}]
        asked = dict(model="policy", tools=tools, max_output_tokens=500,
                     include=["reasoning.encrypted_content"], store=False)
        for turn in (0, 1):
            if stream:
                with client.responses.stream(input=items, **asked) as events:
                    kinds = [event.type for event in events]
                    reply = events.get_final_response()
                same((kinds[0], kinds[-1]), ("response.created", "response.completed"))
            else:
                reply = client.responses.create(input=items, **asked)
            same(reply.status, "completed")
            assert reply.usage.input_tokens > 10 and reply.usage.output_tokens > 1
            if turn == 1:
                same(reply.output_text, LAST)
                break
            same([o.type for o in reply.output],
                 ["reasoning", "message", "function_call", "function_call"])
            same(reply.output_text, TEXT)
            calls = [o for o in reply.output if o.type == "function_call"]
            same([json.loads(c.arguments)["command"] for c in calls], COMMANDS)
            items += [o.model_dump(exclude_none=True) for o in reply.output]
            items += [{"type": "function_call_output", "call_id": c.call_id, "output": "ok"}
                      for c in calls]
        proven(f"openai responses stream={stream}")
    refused(openai.BadRequestError, 400, lambda: client.responses.create(model="m", input=LONG))
    proven("openai responses errors")


def messages():
    tools = [{"name": "bash", "description": "runs", "input_schema": SCHEMA}]
    for stream in (False, True):
        key, root = rollout()
        client = anthropic.Anthropic(api_key=key, base_url=root, max_retries=0)
        turns = [{"role": "user", "content": "look"}]
        asked = dict(model="policy", tools=tools, max_tokens=2000,
                     thinking={"type": "enabled", "budget_tokens": 1024})
        for turn in (0, 1):
            if stream:
                with client.messages.stream(messages=turns, **asked) as events:
                    reply = events.get_final_message()
            else:
                reply = client.messages.create(messages=turns, **asked)
            assert reply.usage.input_tokens > 10 and reply.usage.output_tokens > 1
            if turn == 1:
                same((reply.content[-1].text, reply.stop_reason), (LAST, "end_turn"))
                break
            same([b.type for b in reply.content], ["thinking", "text", "tool_use", "tool_use"])
            same((reply.content[0].thinking, reply.content[1].text), (THOUGHT, TEXT))
            assert reply.content[0].signature
            same([b.input["command"] for b in reply.content[2:]], COMMANDS)
            same(reply.stop_reason, "tool_use")
            turns.append({"role": "assistant", "content": reply.content})
            results = [{"type": "tool_result", "tool_use_id": b.id, "content": "ok"}
                       for b in reply.content[2:]]
            turns.append({"role": "user", "content": results})
        proven(f"anthropic messages stream={stream}")
    counted = client.messages.count_tokens(model="m", messages=turns[:1], tools=tools)
    assert counted.input_tokens > 10
    bad = anthropic.Anthropic(api_key="wrong", base_url=BASE, max_retries=0)
    ask = dict(model="m", max_tokens=10, messages=[{"role": "user", "content": "x"}])
    refused(anthropic.AuthenticationError, 401, lambda: bad.messages.create(**ask))
    ask["messages"][0]["content"] = LONG
    long = refused(anthropic.BadRequestError, 400, lambda: client.messages.create(**ask))
    assert "prompt is too long" in str(long), long
    proven("anthropic messages errors")


def gemini():
    declared = types.FunctionDeclaration(name="bash", parameters_json_schema=SCHEMA)
    config = types.GenerateContentConfig(
        tools=[types.Tool(function_declarations=[declared])],
        automatic_function_calling=types.AutomaticFunctionCallingConfig(disable=True),
        max_output_tokens=500,
    )
    for stream in (False, True):
        key, root = rollout()
        client = genai.Client(api_key=key, http_options=types.HttpOptions(base_url=root))
        contents = [types.Content(role="user", parts=[types.Part(text="look")])]
        for turn in (0, 1):
            asked = dict(model="policy", contents=contents, config=config)
            if stream:
                chunks = list(client.models.generate_content_stream(**asked))
                parts = [p for c in chunks for p in (c.candidates[0].content.parts or [])]
                last = chunks[-1]
            else:
                last = client.models.generate_content(**asked)
                parts = last.candidates[0].content.parts
            same(last.candidates[0].finish_reason, types.FinishReason.STOP)
            assert last.usage_metadata.prompt_token_count > 10
            text = "".join(p.text for p in parts if p.text and not p.thought)
            if turn == 1:
                same(text, LAST)
                break
            same(text, TEXT)
            same("".join(p.text for p in parts if p.text and p.thought), THOUGHT)
            calls = [p.function_call for p in parts if p.function_call]
            same([c.args["command"] for c in calls], COMMANDS)
            contents.append(types.Content(role="model", parts=parts))
            contents.append(types.Content(role="user", parts=[
                types.Part.from_function_response(name="bash", response={"output": "ok"})
                for _ in calls]))
        proven(f"gemini stream={stream}")
    counted = client.models.count_tokens(model="policy", contents="look")
    assert counted.total_tokens > 1
    bad = genai.Client(api_key="wrong", http_options=types.HttpOptions(base_url=BASE))
    refused(gemini_errors.ClientError, 401,
            lambda: bad.models.generate_content(model="m", contents="x"))
    proven("gemini errors")


chat()
responses()
messages()
gemini()
