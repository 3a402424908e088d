//! A Messages body as a [`Request`].

use record::{Conversation, Message, Part, Role, ToolCall, ToolSpec};
use serde_json::{Map, Value};

use crate::{
    Form, Request, SamplingWishes, WireError,
    field::{count, flag, named, number, present, refuse, strings, text},
    request::{arguments_of_object, no_parameters, push},
};

/// A system block that begins so is an accounting line of Claude Code: version, entry point and
/// three digits that follow the first user text, so that they change after a compaction and in
/// sub-agents. The provider takes it out before the model sees it, and so does [`parse`]; the
/// body as it came is in the record.
pub const BILLING_LINE: &str = "x-anthropic-billing-header";

/// Reads a request body. Also reads the body of `count_tokens`, which is the same without
/// `max_tokens`.
///
/// # Errors
/// [`WireError`] when a field that we read has another type than the API's, or content is
/// neither text nor image nor a tool's.
pub fn parse(body: &Value) -> Result<Request, WireError> {
    let object = body
        .as_object()
        .ok_or_else(|| refuse("(body)", "a JSON object", body))?;
    let mut messages = Vec::new();
    if let Some(system) = present(object, "system") {
        let mut message = Message::text(Role::System, "");
        blocks(system, "system", &mut |block, path| {
            let part = plain(block, path)?;
            let billing = matches!(&part, Some(Part::Text { text }) if is_billing(text));
            message.content.extend(part.filter(|_| !billing));
            Ok(())
        })?;
        if !message.content.is_empty() {
            messages.push(message);
        }
    }
    let list = match object.get("messages") {
        Some(Value::Array(list)) if !list.is_empty() => list,
        Some(other) => return Err(refuse("messages", "at least one message", other)),
        None => return Err(refuse("messages", "at least one message", &Value::Null)),
    };
    for (index, value) in list.iter().enumerate() {
        turn(value, &format!("messages[{index}]"), &mut messages)?;
    }
    Ok(Request {
        conversation: Conversation {
            messages,
            tools: tools(object)?,
        },
        stream: flag(object, "", "stream")?.unwrap_or(false),
        model: text(object, "", "model")?.unwrap_or_default().to_owned(),
        sampling: SamplingWishes {
            temperature: number(object, "temperature", "a number from 0 to 100", 0.0, 100.0)?,
            top_p: number(object, "top_p", "a number from 0 to 1", 0.0, 1.0)?,
            top_k: count(object, "top_k", 0)?,
            tokens_max: count(object, "max_tokens", 1)?,
            stop: strings(object, "stop_sequences")?,
            seed: None,
        },
        form: Form::default(),
        previous: None,
        instructed: false,
    })
}

fn is_billing(text: &str) -> bool {
    text.trim_start().starts_with(BILLING_LINE)
}

/// Calls `each` for every block of a content; a string is one text block.
fn blocks(
    content: &Value,
    path: &str,
    each: &mut dyn FnMut(&Value, &str) -> Result<(), WireError>,
) -> Result<(), WireError> {
    match content {
        Value::Null => Ok(()),
        Value::String(_) => each(content, path),
        Value::Array(list) => {
            for (index, block) in list.iter().enumerate() {
                each(block, &format!("{path}[{index}]"))?;
            }
            Ok(())
        }
        other => Err(refuse(path, "a string or content blocks", other)),
    }
}

/// A block of text or an image; `None` for empty text.
fn plain(block: &Value, path: &str) -> Result<Option<Part>, WireError> {
    let some = |text: &str| {
        Some(text)
            .filter(|text| !text.is_empty())
            .map(|text| Part::Text { text: text.into() })
    };
    if let Value::String(text) = block {
        return Ok(some(text));
    }
    let object = block
        .as_object()
        .ok_or_else(|| refuse(path, "a content block", block))?;
    let source = |name: &str| {
        block["source"][name].as_str().ok_or_else(|| {
            refuse(
                format!("{path}.source.{name}"),
                "a string",
                &block["source"],
            )
        })
    };
    match (
        object.get("type").and_then(Value::as_str),
        block["source"]["type"].as_str(),
    ) {
        (Some("text"), _) => {
            let text = text(object, &format!("{path}."), "text")?
                .ok_or_else(|| refuse(format!("{path}.text"), "a string", &Value::Null))?;
            Ok(some(text))
        }
        (Some("image"), Some("url")) => Ok(Some(Part::Image {
            url: source("url")?.to_owned(),
        })),
        (Some("image"), _) => Ok(Some(Part::Image {
            url: format!("data:{};base64,{}", source("media_type")?, source("data")?),
        })),
        (Some("document"), Some("text")) => Ok(some(source("data")?)),
        (Some(other), _) => Err(WireError::Unsupported {
            path: path.to_owned(),
            feature: format!("content of type {}", named(other)),
            advice: "send text or images",
        }),
        (None, _) => Err(refuse(format!("{path}.type"), "a content type", block)),
    }
}

/// One message of the list, as one or more messages of ours: results of tools stand in a user's
/// message here, and are messages of their own there.
fn turn(value: &Value, path: &str, messages: &mut Vec<Message>) -> Result<(), WireError> {
    let object = value
        .as_object()
        .ok_or_else(|| refuse(path, "an object", value))?;
    let role_value = object.get("role").unwrap_or(&Value::Null);
    let role = match role_value.as_str() {
        Some("user") => Role::User,
        Some("assistant") => Role::Assistant,
        // Sent by Claude Code in the midst of the list, and kept there.
        Some("system" | "developer") => Role::System,
        _ => {
            return Err(refuse(
                format!("{path}.role"),
                "user, assistant or system",
                role_value,
            ));
        }
    };
    let content = object.get("content").unwrap_or(&Value::Null);
    let within = format!("{path}.content");
    let mut message = Message::text(role, "");
    if role == Role::Assistant {
        blocks(content, &within, &mut |block, path| {
            said(block, path, &mut message)
        })?;
        push(messages, message);
        return Ok(());
    }
    let mut any = false;
    blocks(content, &within, &mut |block, path| {
        any = true;
        if block["type"].as_str() == Some("tool_result") {
            let before = std::mem::replace(&mut message, Message::text(role, ""));
            if !before.content.is_empty() {
                messages.push(before);
            }
            messages.push(result(block, path)?);
        } else {
            message.content.extend(plain(block, path)?);
        }
        Ok(())
    })?;
    let only_results = any
        && message.content.is_empty()
        && messages.last().is_some_and(|last| last.role == Role::Tool);
    if !only_results {
        messages.push(message);
    }
    Ok(())
}

fn result(block: &Value, path: &str) -> Result<Message, WireError> {
    let mut message = Message::text(Role::Tool, "");
    message.tool_call_id = block["tool_use_id"].as_str().map(str::to_owned);
    blocks(
        &block["content"],
        &format!("{path}.content"),
        &mut |block, path| {
            message.content.extend(plain(block, path)?);
            Ok(())
        },
    )?;
    Ok(message)
}

/// A block of an assistant's turn.
fn said(block: &Value, path: &str, message: &mut Message) -> Result<(), WireError> {
    match block["type"].as_str() {
        Some("thinking") => {
            let thought = block["thinking"].as_str().unwrap_or_default();
            if !thought.is_empty() {
                match &mut message.reasoning {
                    Some(reasoning) => reasoning.push_str(&format!("\n{thought}")),
                    None => message.reasoning = Some(thought.to_owned()),
                }
            }
        }
        // Reasoning of another provider that only it can read.
        Some("redacted_thinking") => {}
        Some("tool_use") => {
            let name = block["name"]
                .as_str()
                .ok_or_else(|| refuse(format!("{path}.name"), "a string", block))?;
            message.tool_calls.push(ToolCall {
                id: block["id"].as_str().unwrap_or_default().to_owned(),
                name: name.to_owned(),
                arguments: arguments_of_object(block.get("input")),
            });
        }
        _ => message.content.extend(plain(block, path)?),
    }
    Ok(())
}

fn tools(object: &Map<String, Value>) -> Result<Vec<ToolSpec>, WireError> {
    let list = match present(object, "tools") {
        None => return Ok(Vec::new()),
        Some(Value::Array(list)) => list,
        Some(other) => return Err(refuse("tools", "a list", other)),
    };
    let mut tools = Vec::new();
    for (index, value) in list.iter().enumerate() {
        let path = format!("tools[{index}]");
        let object = value
            .as_object()
            .ok_or_else(|| refuse(path.as_str(), "an object", value))?;
        // Tools that only the provider runs have a dated type and no schema.
        let kind = text(object, &format!("{path}."), "type")?.unwrap_or("custom");
        if kind != "custom" && !object.contains_key("input_schema") {
            continue;
        }
        let within = format!("{path}.");
        let name = text(object, &within, "name")?
            .ok_or_else(|| refuse(format!("{within}name"), "a string", &Value::Null))?;
        let parameters = match present(object, "input_schema") {
            None => no_parameters(),
            Some(schema) if schema.is_object() => schema.clone(),
            Some(other) => return Err(refuse(format!("{within}input_schema"), "an object", other)),
        };
        tools.push(ToolSpec {
            name: name.to_owned(),
            description: text(object, &within, "description")?
                .unwrap_or_default()
                .to_owned(),
            parameters,
        });
    }
    Ok(tools)
}
