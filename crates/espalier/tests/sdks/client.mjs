// The official TypeScript SDKs against a served gateway: every reply is parsed by them, streamed
// and not. Prints one line per thing proven; exits with a stack at the first that is wrong.

import assert from "node:assert/strict";
import { createRequire } from "node:module";
import { pathToFileURL } from "node:url";

const [, , told, folder] = process.argv;
const { base_url: BASE, admin_url: ADMIN, admin_token: TOKEN } = JSON.parse(told);
// The packages lie in a folder of their own.
const at = createRequire(`${folder}/package.json`);
const load = async (name) => import(pathToFileURL(at.resolve(name)));
const OpenAI = (await load("openai")).default;
const Anthropic = (await load("@anthropic-ai/sdk")).default;
const { GoogleGenAI } = await load("@google/genai");

const [THOUGHT, TEXT, LAST] = ["I look first.", "Looking – “now”.", "Two files."];
const COMMANDS = ["ls -la", "printf '%s\\n' \"ü\""];
const SCHEMA = {
  type: "object",
  properties: { command: { type: "string" }, timeout: { type: "number" } },
  required: ["command"],
};
const LONG = "qzx ".repeat(60_000);
const proven = (what) => console.log(`proven ${what}`);
const user = { role: "user", content: "look" };

async function rollout() {
  const answer = await fetch(`${ADMIN}/v1/rollouts`, {
    method: "POST",
    headers: { authorization: `Bearer ${TOKEN}`, "content-type": "application/json" },
    body: JSON.stringify({ task: "look" }),
  });
  const { key, path } = await answer.json();
  return { key, root: BASE + path };
}

async function chat() {
  const tools = [{ type: "function", function: { name: "bash", parameters: SCHEMA } }];
  let client;
  for (const stream of [false, true]) {
    const { key, root } = await rollout();
    client = new OpenAI({ apiKey: key, baseURL: `${root}/v1`, maxRetries: 0 });
    const messages = [user];
    for (const turn of [0, 1]) {
      const asked = { model: "policy", messages, tools, max_tokens: 500 };
      const reply = stream
        ? await client.chat.completions
            .stream({ ...asked, stream_options: { include_usage: true } })
            .finalChatCompletion()
        : await client.chat.completions.create(asked);
      const { message, finish_reason } = reply.choices[0];
      assert(reply.usage.prompt_tokens > 10 && reply.usage.completion_tokens > 1);
      if (turn === 1) {
        assert.deepEqual([message.content, finish_reason], [LAST, "stop"]);
        break;
      }
      assert.deepEqual([message.content, finish_reason], [TEXT, "tool_calls"]);
      const calls = message.tool_calls;
      assert.deepEqual(calls.map((c) => JSON.parse(c.function.arguments).command), COMMANDS);
      messages.push(message);
      for (const c of calls) messages.push({ role: "tool", tool_call_id: c.id, content: "ok" });
    }
    proven(`openai chat stream=${stream}`);
  }
  const bad = new OpenAI({ apiKey: "wrong", baseURL: `${BASE}/v1`, maxRetries: 0 });
  await assert.rejects(bad.chat.completions.create({ model: "m", messages: [user] }), OpenAI.AuthenticationError);
  await assert.rejects(
    client.chat.completions.create({ model: "m", messages: [{ role: "user", content: LONG }] }),
    (error) => error instanceof OpenAI.BadRequestError && error.code === "context_length_exceeded",
  );
  proven("openai chat errors");
}

async function responses() {
  const tools = [{ type: "function", name: "bash", parameters: SCHEMA, strict: false }];
  for (const stream of [false, true]) {
    const { key, root } = await rollout();
    const client = new OpenAI({ apiKey: key, baseURL: `${root}/v1`, maxRetries: 0 });
    const input = [user];
    for (const turn of [0, 1]) {
      const asked = {
        model: "policy", input, tools, max_output_tokens: 500, store: false,
        include: ["reasoning.encrypted_content"],
      };
      const reply = stream
        ? await client.responses.stream(asked).finalResponse()
        : await client.responses.create(asked);
      assert.equal(reply.status, "completed");
      assert(reply.usage.input_tokens > 10 && reply.usage.output_tokens > 1);
      const text = reply.output
        .filter((o) => o.type === "message")
        .flatMap((o) => o.content.map((part) => part.text))
        .join("");
      if (turn === 1) {
        assert.equal(text, LAST);
        break;
      }
      assert.equal(text, TEXT);
      assert.deepEqual(reply.output.map((o) => o.type), ["reasoning", "message", "function_call", "function_call"]);
      const calls = reply.output.filter((o) => o.type === "function_call");
      assert.deepEqual(calls.map((c) => JSON.parse(c.arguments).command), COMMANDS);
      input.push(...reply.output);
      for (const c of calls) input.push({ type: "function_call_output", call_id: c.call_id, output: "ok" });
    }
    proven(`openai responses stream=${stream}`);
  }
}

async function messages() {
  const tools = [{ name: "bash", description: "runs", input_schema: SCHEMA }];
  let client;
  for (const stream of [false, true]) {
    const { key, root } = await rollout();
    client = new Anthropic({ apiKey: key, baseURL: root, maxRetries: 0 });
    const turns = [user];
    for (const turn of [0, 1]) {
      const asked = {
        model: "policy", messages: turns, tools, max_tokens: 2000,
        thinking: { type: "enabled", budget_tokens: 1024 },
      };
      const reply = stream
        ? await client.messages.stream(asked).finalMessage()
        : await client.messages.create(asked);
      assert(reply.usage.input_tokens > 10 && reply.usage.output_tokens > 1);
      if (turn === 1) {
        assert.deepEqual([reply.content.at(-1).text, reply.stop_reason], [LAST, "end_turn"]);
        break;
      }
      assert.deepEqual(reply.content.map((b) => b.type), ["thinking", "text", "tool_use", "tool_use"]);
      assert.deepEqual([reply.content[0].thinking, reply.content[1].text], [THOUGHT, TEXT]);
      const calls = reply.content.slice(2);
      assert.deepEqual(calls.map((b) => b.input.command), COMMANDS);
      turns.push({ role: "assistant", content: reply.content });
      turns.push({
        role: "user",
        content: calls.map((b) => ({ type: "tool_result", tool_use_id: b.id, content: "ok" })),
      });
    }
    proven(`anthropic messages stream=${stream}`);
  }
  const bad = new Anthropic({ apiKey: "wrong", baseURL: BASE, maxRetries: 0 });
  const ask = { model: "m", max_tokens: 10, messages: [user] };
  await assert.rejects(bad.messages.create(ask), Anthropic.AuthenticationError);
  await assert.rejects(
    client.messages.create({ ...ask, messages: [{ role: "user", content: LONG }] }),
    (error) => error instanceof Anthropic.BadRequestError && /prompt is too long/.test(error.message),
  );
  proven("anthropic messages errors");
}

async function gemini() {
  const config = {
    tools: [{ functionDeclarations: [{ name: "bash", parametersJsonSchema: SCHEMA }] }],
    automaticFunctionCalling: { disable: true },
    maxOutputTokens: 500,
  };
  for (const stream of [false, true]) {
    const { key, root } = await rollout();
    const client = new GoogleGenAI({ apiKey: key, httpOptions: { baseUrl: root } });
    const contents = [{ role: "user", parts: [{ text: "look" }] }];
    for (const turn of [0, 1]) {
      const asked = { model: "policy", contents, config };
      const replies = [];
      if (stream) {
        for await (const chunk of await client.models.generateContentStream(asked)) replies.push(chunk);
      } else {
        replies.push(await client.models.generateContent(asked));
      }
      const parts = replies.flatMap((r) => r.candidates?.[0]?.content?.parts ?? []);
      assert.equal(replies.at(-1).candidates[0].finishReason, "STOP");
      const text = parts.filter((p) => p.text && !p.thought).map((p) => p.text).join("");
      if (turn === 1) {
        assert.equal(text, LAST);
        break;
      }
      assert.equal(text, TEXT);
      const calls = parts.filter((p) => p.functionCall).map((p) => p.functionCall);
      assert.deepEqual(calls.map((c) => c.args.command), COMMANDS);
      contents.push({ role: "model", parts });
      contents.push({
        role: "user",
        parts: calls.map((c) => ({ functionResponse: { name: c.name, response: { output: "ok" } } })),
      });
    }
    proven(`gemini stream=${stream}`);
  }
}

await chat();
await responses();
await messages();
await gemini();
