//! A Chat Completions body as a [`Request`].

use record::{Conversation, Message, Part, Role, ToolCall, ToolSpec};
use serde_json::{Map, Value};

use crate::{
    Form, Request, SamplingWishes, WireError,
    field::{count, flag, named, number, present, refuse, strings, text},
    request::{arguments, no_parameters, push},
};

/// Reads a request body.
///
/// # Errors
/// [`WireError`] when a field that we read has another type than the API's, or asks for more
/// than one reply, or for a kind of content that is neither text nor image.
pub fn parse(body: &Value) -> Result<Request, WireError> {
    let object = body
        .as_object()
        .ok_or_else(|| refuse("(body)", "a JSON object", body))?;
    let n = count(object, "n", 1)?.unwrap_or(1);
    if n != 1 {
        return Err(WireError::Unsupported {
            path: "n".into(),
            feature: format!("{n} replies to one request"),
            advice: "send the request once per reply",
        });
    }
    let options = match present(object, "stream_options") {
        None => None,
        Some(Value::Object(options)) => Some(options),
        Some(other) => return Err(refuse("stream_options", "an object", other)),
    };
    let include_usage = match options {
        Some(options) => flag(options, "stream_options.", "include_usage")?.unwrap_or(false),
        None => false,
    };
    Ok(Request {
        conversation: Conversation {
            messages: messages(object)?,
            tools: tools(object)?,
        },
        stream: flag(object, "", "stream")?.unwrap_or(false),
        model: text(object, "", "model")?.unwrap_or_default().to_owned(),
        sampling: sampling(object)?,
        form: Form {
            include_usage,
            ..Form::default()
        },
        previous: None,
        instructed: false,
    })
}

fn sampling(object: &Map<String, Value>) -> Result<SamplingWishes, WireError> {
    let seed = present(object, "seed")
        .map(|value| {
            value
                .as_i64()
                .map(i64::cast_unsigned)
                .or_else(|| value.as_u64())
                .ok_or_else(|| refuse("seed", "a whole number", value))
        })
        .transpose()?;
    Ok(SamplingWishes {
        temperature: number(object, "temperature", "a number from 0 to 100", 0.0, 100.0)?,
        top_p: number(object, "top_p", "a number from 0 to 1", 0.0, 1.0)?,
        // vLLM and SGLang clients say -1 for "all".
        top_k: match present(object, "top_k").and_then(Value::as_i64) {
            Some(-1) => Some(0),
            _ => count(object, "top_k", 0)?,
        },
        tokens_max: match count(object, "max_completion_tokens", 1)? {
            Some(limit) => Some(limit),
            None => count(object, "max_tokens", 1)?,
        },
        stop: strings(object, "stop")?,
        seed,
    })
}

fn messages(object: &Map<String, Value>) -> Result<Vec<Message>, WireError> {
    let list = match object.get("messages") {
        Some(Value::Array(list)) if !list.is_empty() => list,
        Some(other) => return Err(refuse("messages", "at least one message", other)),
        None => return Err(refuse("messages", "at least one message", &Value::Null)),
    };
    let mut messages = Vec::with_capacity(list.len());
    for (index, value) in list.iter().enumerate() {
        push(
            &mut messages,
            message(value, &format!("messages[{index}]"))?,
        );
    }
    Ok(messages)
}

fn message(value: &Value, path: &str) -> Result<Message, WireError> {
    let object = value
        .as_object()
        .ok_or_else(|| refuse(path, "an object", value))?;
    let role_value = object.get("role").unwrap_or(&Value::Null);
    let role = match role_value.as_str() {
        Some("system" | "developer") => Role::System,
        Some("user") => Role::User,
        Some("assistant") => Role::Assistant,
        Some("tool" | "function") => Role::Tool,
        _ => {
            return Err(refuse(
                format!("{path}.role"),
                "system, developer, user, assistant or tool",
                role_value,
            ));
        }
    };
    let mut message = Message::text(role, "");
    content(object, path, &mut message)?;
    if role == Role::Assistant {
        // Two names are in use, and one client sends both.
        for name in ["reasoning_content", "reasoning"] {
            if let Some(Value::String(reasoning)) = object.get(name)
                && !reasoning.is_empty()
                && message.reasoning.is_none()
            {
                message.reasoning = Some(reasoning.clone());
            }
        }
        message.tool_calls = tool_calls(object, path)?;
    }
    if role == Role::Tool {
        message.tool_call_id =
            text(object, &format!("{path}."), "tool_call_id")?.map(str::to_owned);
    }
    Ok(message)
}

fn content(
    object: &Map<String, Value>,
    path: &str,
    message: &mut Message,
) -> Result<(), WireError> {
    match present(object, "content") {
        None => {}
        Some(Value::String(text)) if text.is_empty() => {}
        Some(Value::String(text)) => message.content.push(Part::Text { text: text.clone() }),
        Some(Value::Array(parts)) => {
            for (index, part) in parts.iter().enumerate() {
                content_part(part, &format!("{path}.content[{index}]"), message)?;
            }
        }
        Some(other) => {
            return Err(refuse(
                format!("{path}.content"),
                "a string or content parts",
                other,
            ));
        }
    }
    Ok(())
}

fn content_part(part: &Value, path: &str, message: &mut Message) -> Result<(), WireError> {
    if let Value::String(text) = part {
        message.content.push(Part::Text { text: text.clone() });
        return Ok(());
    }
    let object = part
        .as_object()
        .ok_or_else(|| refuse(path, "a content part", part))?;
    let within = format!("{path}.");
    match object.get("type").and_then(Value::as_str) {
        Some("text" | "input_text" | "output_text") => {
            let text = text(object, &within, "text")?
                .ok_or_else(|| refuse(format!("{path}.text"), "a string", &Value::Null))?;
            if !text.is_empty() {
                message.content.push(Part::Text { text: text.into() });
            }
        }
        Some("refusal") => {
            if let Some(text) = text(object, &within, "refusal")? {
                message.content.push(Part::Text { text: text.into() });
            }
        }
        Some("thinking" | "reasoning") => {
            let name = if object.contains_key("thinking") {
                "thinking"
            } else {
                "text"
            };
            if let Some(thought) = text(object, &within, name)? {
                message.reasoning = Some(thought.to_owned());
            }
        }
        Some("image_url" | "input_image") => {
            let url = match object.get("image_url") {
                Some(Value::String(url)) => url,
                Some(Value::Object(inner)) => match inner.get("url") {
                    Some(Value::String(url)) => url,
                    _ => return Err(refuse(format!("{path}.image_url.url"), "a string", part)),
                },
                _ => return Err(refuse(format!("{path}.image_url"), "an object", part)),
            };
            message.content.push(Part::Image { url: url.clone() });
        }
        Some(other) => {
            return Err(WireError::Unsupported {
                path: path.to_owned(),
                feature: format!("content of type {}", named(other)),
                advice: "send text or images",
            });
        }
        None => return Err(refuse(format!("{path}.type"), "a content type", part)),
    }
    Ok(())
}

fn tool_calls(object: &Map<String, Value>, path: &str) -> Result<Vec<ToolCall>, WireError> {
    let mut calls = Vec::new();
    match present(object, "tool_calls") {
        None => {}
        Some(Value::Array(list)) => {
            for (index, value) in list.iter().enumerate() {
                let path = format!("{path}.tool_calls[{index}]");
                let function = value
                    .get("function")
                    .ok_or_else(|| refuse(format!("{path}.function"), "an object", value))?;
                let id = value.get("id").and_then(Value::as_str).unwrap_or_default();
                calls.push(tool_call(function, id, &path)?);
            }
        }
        Some(other) => return Err(refuse(format!("{path}.tool_calls"), "a list", other)),
    }
    // The form that came before `tool_calls`.
    if let Some(function) = present(object, "function_call")
        && calls.is_empty()
    {
        calls.push(tool_call(function, "", path)?);
    }
    Ok(calls)
}

fn tool_call(function: &Value, id: &str, path: &str) -> Result<ToolCall, WireError> {
    let name = function
        .get("name")
        .and_then(Value::as_str)
        .ok_or_else(|| refuse(format!("{path}.function.name"), "a string", function))?;
    Ok(ToolCall {
        id: id.to_owned(),
        name: name.to_owned(),
        arguments: arguments(function.get("arguments")),
    })
}

fn tools(object: &Map<String, Value>) -> Result<Vec<ToolSpec>, WireError> {
    let mut tools = Vec::new();
    for field in ["tools", "functions"] {
        let list = match present(object, field) {
            None => continue,
            Some(Value::Array(list)) => list,
            Some(other) => return Err(refuse(field, "a list", other)),
        };
        for (index, value) in list.iter().enumerate() {
            let path = format!("{field}[{index}]");
            // Built-in tools of a provider (web search …): the model cannot call what only that
            // provider runs, and harnesses stop on a 400.
            if let Some(kind) = value.get("type").and_then(Value::as_str)
                && kind != "function"
            {
                continue;
            }
            let function = value.get("function").unwrap_or(value);
            tools.push(tool(function, &path)?);
        }
    }
    Ok(tools)
}

fn tool(function: &Value, path: &str) -> Result<ToolSpec, WireError> {
    let object = function
        .as_object()
        .ok_or_else(|| refuse(format!("{path}.function"), "an object", function))?;
    let within = format!("{path}.function.");
    let name = text(object, &within, "name")?
        .ok_or_else(|| refuse(format!("{within}name"), "a string", &Value::Null))?;
    let parameters = match present(object, "parameters") {
        None => no_parameters(),
        Some(value) if value.is_object() => value.clone(),
        Some(other) => return Err(refuse(format!("{within}parameters"), "an object", other)),
    };
    Ok(ToolSpec {
        name: name.to_owned(),
        description: text(object, &within, "description")?
            .unwrap_or_default()
            .to_owned(),
        parameters,
    })
}
