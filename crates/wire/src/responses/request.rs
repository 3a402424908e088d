//! A Responses body as a [`Request`].

use std::collections::{BTreeMap, BTreeSet};

use record::{Conversation, Message, Part, Role, ToolCall, ToolSpec};
use serde_json::{Map, Value, json};

use crate::{
    Compaction, Form, Request, SamplingWishes, ToolForm, WireError,
    field::{count, flag, named, number, present, refuse, text},
    opaque,
    request::{arguments, no_parameters, push},
};

/// Items of calls that only the provider runs. No reply of ours has them; what another model's
/// history says of them does not reach the model.
const PROVIDER_ITEMS: [&str; 9] = [
    "code_interpreter_call",
    "computer_call",
    "computer_call_output",
    "file_search_call",
    "ghost_snapshot",
    "image_generation_call",
    "mcp_list_tools",
    "mcp_call",
    "web_search_call",
];

/// What the model is asked when a client wants its conversation compacted.
const COMPACT: &str = "Write a summary that takes the place of this conversation. Whoever goes on \
with the task sees the summary and nothing else of what was said, so put into it: the task and its \
constraints in the user's words, what was decided and why, what was done (files, commands, results), \
what was found out, and what remains to be done, the next step first. Reply with the summary alone \
and call no tool.";

/// What stands before a summary when the conversation goes on from it.
const SUMMARY: &str = "Summary of the conversation so far:\n\n";

/// Bytes of the user's own messages that stay beside a summary, the newest first.
const KEPT_BYTES_MAX: usize = 64 << 10;

/// Reads the body of `/responses/compact`: an ordinary request whose reply is a summary. What the
/// user said stays beside it.
///
/// # Errors
/// As [`parse`].
pub fn parse_compact(body: &Value) -> Result<Request, WireError> {
    let mut request = parse(body)?;
    if request.form.compaction.is_none() {
        let message = Message::text(Role::User, COMPACT);
        request.conversation.messages.push(message);
    }
    request.stream = false;
    request.form.compaction = Some(Compaction {
        route: true,
        kept: kept(&body["input"]),
    });
    Ok(request)
}

/// The user's messages, as items, as far as there is room.
fn kept(input: &Value) -> Vec<Value> {
    let one;
    let items = match input {
        Value::String(text) => {
            one = [json!({"type": "message", "role": "user",
                "content": [{"type": "input_text", "text": text}]})];
            one.as_slice()
        }
        Value::Array(items) => items,
        _ => &[],
    };
    let mut bytes = 0;
    let mut kept: Vec<Value> = items
        .iter()
        .rev()
        .filter(|item| item["role"] == "user")
        .take_while(|item| {
            bytes += item.to_string().len();
            bytes <= KEPT_BYTES_MAX
        })
        .cloned()
        .collect();
    kept.reverse();
    kept
}

/// Reads a request body.
///
/// # Errors
/// [`WireError`] when a field that we read has another type than the API's, or when an item or a
/// piece of content is of a kind that is not served.
pub fn parse(body: &Value) -> Result<Request, WireError> {
    let object = body
        .as_object()
        .ok_or_else(|| refuse("(body)", "a JSON object", body))?;
    let (tools, forms) = tools(object)?;
    let mut reader = Reader {
        messages: Vec::new(),
        turn: None,
        forms: &forms,
        compact: false,
    };
    if let Some(instructions) = text(object, "", "instructions")?
        && !instructions.is_empty()
    {
        let message = Message::text(Role::System, instructions);
        reader.messages.push(message);
    }
    let instructed = !reader.messages.is_empty();
    match object.get("input") {
        Some(Value::String(text)) => {
            reader.messages.push(Message::text(Role::User, text));
        }
        Some(Value::Array(items)) => {
            for (index, item) in items.iter().enumerate() {
                reader.item(item, &format!("input[{index}]"))?;
            }
        }
        Some(other) => return Err(refuse("input", "a string or items", other)),
        None => return Err(refuse("input", "a string or items", &Value::Null)),
    }
    reader.end_turn();
    let compaction = reader.compact.then(Compaction::default);
    if compaction.is_some() {
        reader.messages.push(Message::text(Role::User, COMPACT));
    }
    let messages = reader.messages;
    let previous = text(object, "", "previous_response_id")?.map(str::to_owned);
    if messages.is_empty() && previous.is_none() {
        return Err(refuse("input", "at least one item", &Value::Null));
    }
    Ok(Request {
        conversation: Conversation { messages, tools },
        stream: flag(object, "", "stream")?.unwrap_or(false),
        model: text(object, "", "model")?.unwrap_or_default().to_owned(),
        sampling: SamplingWishes {
            temperature: number(object, "temperature", "a number from 0 to 100", 0.0, 100.0)?,
            top_p: number(object, "top_p", "a number from 0 to 1", 0.0, 1.0)?,
            tokens_max: count(object, "max_output_tokens", 1)?,
            ..SamplingWishes::default()
        },
        form: Form {
            tools: forms,
            compaction,
            ..Form::default()
        },
        previous,
        instructed,
    })
}

/// Items one by one. What the model said in one turn comes as several items.
struct Reader<'a> {
    messages: Vec<Message>,
    /// The assistant turn that is being put together.
    turn: Option<Message>,
    forms: &'a BTreeMap<String, ToolForm>,
    /// Whether an item asked for a summary.
    compact: bool,
}

impl Reader<'_> {
    fn end_turn(&mut self) {
        if let Some(turn) = self.turn.take() {
            push(&mut self.messages, turn);
        }
    }

    /// The turn that an item belongs to; a new one when `ended` says that the item cannot stand
    /// behind what the turn has.
    fn turn(&mut self, ended: impl Fn(&Message) -> bool) -> &mut Message {
        if self.turn.as_ref().is_some_and(ended) {
            self.end_turn();
        }
        self.turn
            .get_or_insert_with(|| Message::text(Role::Assistant, ""))
    }

    fn other(&mut self, message: Message) {
        self.end_turn();
        self.messages.push(message);
    }

    fn item(&mut self, item: &Value, path: &str) -> Result<(), WireError> {
        let object = item
            .as_object()
            .ok_or_else(|| refuse(path, "an object", item))?;
        let within = format!("{path}.");
        match text(object, &within, "type")?.unwrap_or("message") {
            "message" => self.message(object, path),
            "reasoning" => {
                if let Some(reasoning) = reasoning(item) {
                    let turn = self.turn(|turn| {
                        !turn.content.is_empty()
                            || !turn.tool_calls.is_empty()
                            || turn.reasoning.is_some()
                    });
                    turn.reasoning = Some(reasoning);
                }
                Ok(())
            }
            kind @ ("function_call" | "custom_tool_call") => {
                let name = text(object, &within, "name")?
                    .ok_or_else(|| refuse(format!("{path}.name"), "a string", item))?;
                let arguments = match kind {
                    "custom_tool_call" => {
                        json!({"input": item["input"].as_str().unwrap_or_default()})
                    }
                    _ => arguments(object.get("arguments")),
                };
                let call = ToolCall {
                    id: text(object, &within, "call_id")?
                        .unwrap_or_default()
                        .to_owned(),
                    name: self.known_as(item["namespace"].as_str(), name),
                    arguments,
                };
                self.turn(|_| false).tool_calls.push(call);
                Ok(())
            }
            "function_call_output" | "custom_tool_call_output" => {
                let mut message = Message::text(Role::Tool, "");
                message.tool_call_id = text(object, &within, "call_id")?.map(str::to_owned);
                let output = object.get("output").unwrap_or(&Value::Null);
                // Some clients wrap the text.
                let output = output.get("content").unwrap_or(output);
                content(output, &format!("{path}.output"), &mut message)?;
                self.other(message);
                Ok(())
            }
            "compaction" | "compaction_summary" => {
                let sealed = item["encrypted_content"].as_str();
                if let Some(summary) = sealed.and_then(opaque::unseal) {
                    self.other(Message::text(Role::User, format!("{SUMMARY}{summary}")));
                }
                Ok(())
            }
            "compaction_trigger" => {
                self.compact = true;
                Ok(())
            }
            kind if PROVIDER_ITEMS.contains(&kind) => Ok(()),
            other => Err(WireError::Unsupported {
                path: path.to_owned(),
                feature: format!("an item of type {}", named(other)),
                advice: "send messages, reasoning, function or custom tool calls and their outputs",
            }),
        }
    }

    fn message(&mut self, object: &Map<String, Value>, path: &str) -> Result<(), WireError> {
        let role_value = object.get("role").unwrap_or(&Value::Null);
        let role = match role_value.as_str() {
            Some("system" | "developer") => Role::System,
            Some("user") => Role::User,
            Some("assistant") => Role::Assistant,
            _ => {
                return Err(refuse(
                    format!("{path}.role"),
                    "system, developer, user or assistant",
                    role_value,
                ));
            }
        };
        let mut message = Message::text(role, "");
        let value = object.get("content").unwrap_or(&Value::Null);
        content(value, &format!("{path}.content"), &mut message)?;
        if role == Role::Assistant {
            let turn = self.turn(|turn| !turn.content.is_empty() || !turn.tool_calls.is_empty());
            turn.content.append(&mut message.content);
        } else {
            self.other(message);
        }
        Ok(())
    }

    /// The name that the model knows a tool under.
    fn known_as(&self, namespace: Option<&str>, name: &str) -> String {
        let Some(namespace) = namespace else {
            return name.to_owned();
        };
        let wanted = ToolForm::Within {
            namespace: namespace.to_owned(),
            name: name.to_owned(),
        };
        self.forms
            .iter()
            .find(|(_, form)| **form == wanted)
            .map_or_else(|| name.to_owned(), |(known, _)| known.clone())
    }
}

/// The reasoning of an item: what we sealed, else its text, else its summary.
fn reasoning(item: &Value) -> Option<String> {
    let texts = |list: &Value| {
        let texts = list.as_array()?.iter();
        let texts: Vec<&str> = texts.filter_map(|part| part["text"].as_str()).collect();
        Some(texts.join("\n")).filter(|text| !text.is_empty())
    };
    item["encrypted_content"]
        .as_str()
        .and_then(opaque::unseal)
        .or_else(|| texts(&item["content"]))
        .or_else(|| texts(&item["summary"]))
        .filter(|text| !text.is_empty())
}

fn content(value: &Value, path: &str, message: &mut Message) -> Result<(), WireError> {
    let parts = match value {
        Value::Null => return Ok(()),
        Value::String(text) => {
            if !text.is_empty() {
                message.content.push(Part::Text { text: text.clone() });
            }
            return Ok(());
        }
        Value::Array(parts) => parts,
        other => return Err(refuse(path, "a string or content parts", other)),
    };
    for (index, part) in parts.iter().enumerate() {
        let path = format!("{path}[{index}]");
        let field = match part["type"].as_str() {
            Some("input_text" | "output_text" | "text" | "summary_text" | "reasoning_text") => {
                "text"
            }
            Some("refusal") => "refusal",
            Some("input_image") => "image_url",
            Some(other) => {
                return Err(WireError::Unsupported {
                    path,
                    feature: format!("content of type {}", named(other)),
                    advice: "send text or images",
                });
            }
            None => return Err(refuse(format!("{path}.type"), "a content type", part)),
        };
        let text = part[field]
            .as_str()
            .ok_or_else(|| refuse(format!("{path}.{field}"), "a string", part))?
            .to_owned();
        if field == "image_url" {
            message.content.push(Part::Image { url: text });
        } else if !text.is_empty() {
            message.content.push(Part::Text { text });
        }
    }
    Ok(())
}

type Tools = (Vec<ToolSpec>, BTreeMap<String, ToolForm>);

fn tools(object: &Map<String, Value>) -> Result<Tools, WireError> {
    let list = match present(object, "tools") {
        None => return Ok(Tools::default()),
        Some(Value::Array(list)) => list,
        Some(other) => return Err(refuse("tools", "a list", other)),
    };
    // Namespace, path and value of everything that the model may call.
    let mut found: Vec<(Option<&str>, String, &Value)> = Vec::new();
    for (index, value) in list.iter().enumerate() {
        let path = format!("tools[{index}]");
        match value["type"].as_str() {
            Some("function" | "custom") => found.push((None, path, value)),
            Some("namespace") => {
                let namespace = value["name"]
                    .as_str()
                    .ok_or_else(|| refuse(format!("{path}.name"), "a string", value))?;
                for (index, inner) in value["tools"].as_array().into_iter().flatten().enumerate() {
                    found.push((Some(namespace), format!("{path}.tools[{index}]"), inner));
                }
            }
            // Tools that only the provider runs: the model cannot call them here, and harnesses
            // stop on a 400.
            Some(_) => {}
            None => return Err(refuse(format!("{path}.type"), "a type of tool", value)),
        }
    }
    let (mut specs, mut forms) = Tools::default();
    let mut names = BTreeSet::new();
    for (namespace, path, value) in found {
        let object = value
            .as_object()
            .ok_or_else(|| refuse(path.as_str(), "an object", value))?;
        let within = format!("{path}.");
        let name = text(object, &within, "name")?
            .ok_or_else(|| refuse(format!("{within}name"), "a string", &Value::Null))?;
        let mut known = name.to_owned();
        if let Some(namespace) = namespace {
            // The short name, unless two tools have it.
            if names.contains(&known) {
                known = format!("{namespace}__{name}");
            }
            let form = ToolForm::Within {
                namespace: namespace.to_owned(),
                name: name.to_owned(),
            };
            forms.insert(known.clone(), form);
        }
        names.insert(known.clone());
        let mut description = text(object, &within, "description")?
            .unwrap_or_default()
            .to_owned();
        let parameters = if value["type"] == "custom" {
            forms.insert(known.clone(), ToolForm::Custom);
            if let Some(grammar) = value["format"]["definition"].as_str() {
                description.push_str(&format!("\n\nThe input follows this grammar:\n{grammar}"));
            }
            json!({"type": "object", "required": ["input"], "properties": {"input": {
                "type": "string", "description": "The whole input of the tool, as plain text."}}})
        } else {
            match present(object, "parameters") {
                None => no_parameters(),
                Some(schema) if schema.is_object() => schema.clone(),
                Some(other) => {
                    return Err(refuse(format!("{within}parameters"), "an object", other));
                }
            }
        };
        specs.push(ToolSpec {
            name: known,
            description,
            parameters,
        });
    }
    Ok((specs, forms))
}
