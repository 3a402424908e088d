//! A Gemini body as a [`Request`].

use record::{Conversation, Message, Part, Role, ToolCall, ToolSpec};
use serde_json::{Map, Value};

use crate::{
    Form, Request, SamplingWishes, Target, WireError,
    field::{count, named, number, present, refuse, strings, text},
    request::{arguments_of_object, no_parameters, push},
};

/// Reads a request body; model and stream are in the address. Also reads the body of
/// `countTokens`, plain or wrapped.
///
/// # Errors
/// [`WireError`] when a field that we read has another type than the API's, or when a part is of
/// a kind that is not served.
pub fn parse(body: &Value, target: &Target) -> Result<Request, WireError> {
    let body = body.get("generateContentRequest").unwrap_or(body);
    let object = body
        .as_object()
        .ok_or_else(|| refuse("(body)", "a JSON object", body))?;
    let mut messages = Vec::new();
    let system = present(object, "systemInstruction").or(present(object, "system_instruction"));
    if let Some(system) = system {
        let mut message = Message::text(Role::System, "");
        for (part, path) in parts(system, "systemInstruction")? {
            message.content.extend(plain(part, &path)?);
        }
        if !message.content.is_empty() {
            messages.push(message);
        }
    }
    let contents = match object.get("contents") {
        Some(Value::Array(list)) if !list.is_empty() => list.as_slice(),
        // One content without a list around it, or a text.
        Some(one @ (Value::Object(_) | Value::String(_))) => std::slice::from_ref(one),
        Some(other) => return Err(refuse("contents", "at least one content", other)),
        None => return Err(refuse("contents", "at least one content", &Value::Null)),
    };
    for (index, content) in contents.iter().enumerate() {
        turn(content, &format!("contents[{index}]"), &mut messages)?;
    }
    Ok(Request {
        conversation: Conversation {
            messages,
            tools: tools(object)?,
        },
        stream: target.stream,
        model: target.model.clone(),
        sampling: sampling(object)?,
        form: Form {
            json_list: target.json_list,
            ..Form::default()
        },
        previous: None,
        instructed: false,
    })
}

fn sampling(object: &Map<String, Value>) -> Result<SamplingWishes, WireError> {
    let config = match present(object, "generationConfig") {
        None => return Ok(SamplingWishes::default()),
        Some(Value::Object(config)) => config,
        Some(other) => return Err(refuse("generationConfig", "an object", other)),
    };
    Ok(SamplingWishes {
        temperature: number(config, "temperature", "a number from 0 to 100", 0.0, 100.0)?,
        top_p: number(config, "topP", "a number from 0 to 1", 0.0, 1.0)?,
        top_k: count(config, "topK", 0)?,
        tokens_max: count(config, "maxOutputTokens", 1)?,
        stop: strings(config, "stopSequences")?,
        seed: present(config, "seed")
            .map(|value| {
                value
                    .as_i64()
                    .map(i64::cast_unsigned)
                    .ok_or_else(|| refuse("generationConfig.seed", "a whole number", value))
            })
            .transpose()?,
    })
}

/// The parts of a content, each with its path.
fn parts<'a>(content: &'a Value, path: &str) -> Result<Vec<(&'a Value, String)>, WireError> {
    let list = match content {
        Value::String(_) => return Ok(vec![(content, path.to_owned())]),
        Value::Object(object) => object.get("parts").unwrap_or(&Value::Null),
        other => return Err(refuse(path, "a content", other)),
    };
    let path = format!("{path}.parts");
    match list {
        Value::Null => Ok(Vec::new()),
        Value::Array(list) => Ok(list
            .iter()
            .enumerate()
            .map(|(index, part)| (part, format!("{path}[{index}]")))
            .collect()),
        one @ Value::Object(_) => Ok(vec![(one, path)]),
        other => Err(refuse(path, "a list of parts", other)),
    }
}

/// A part of text or an image; `None` for empty text.
fn plain(part: &Value, path: &str) -> Result<Option<Part>, WireError> {
    let text = part.as_str().or_else(|| part["text"].as_str());
    if let Some(text) = text {
        return Ok(Some(text)
            .filter(|text| !text.is_empty())
            .map(|text| Part::Text { text: text.into() }));
    }
    let data = part.get("inlineData").or(part.get("inline_data"));
    if let Some(data) = data {
        let kind = data["mimeType"].as_str().or(data["mime_type"].as_str());
        return match (kind, data["data"].as_str()) {
            (Some(kind), Some(data)) => Ok(Some(Part::Image {
                url: format!("data:{kind};base64,{data}"),
            })),
            _ => Err(refuse(
                format!("{path}.inlineData"),
                "mimeType and data",
                part,
            )),
        };
    }
    if let Some(url) = part["fileData"]["fileUri"].as_str() {
        return Ok(Some(Part::Image {
            url: url.to_owned(),
        }));
    }
    match part.as_object().and_then(|object| object.keys().next()) {
        // A part that carries nothing but a signature.
        Some(name) if name == "thoughtSignature" => Ok(None),
        Some(name) => Err(WireError::Unsupported {
            path: path.to_owned(),
            feature: format!("a part with {}", named(name)),
            advice: "send text, images, function calls or function responses",
        }),
        None => Err(refuse(path, "a part", part)),
    }
}

/// One content, as one or more messages: responses of functions stand in a user's content here,
/// and are messages of their own there.
fn turn(content: &Value, path: &str, messages: &mut Vec<Message>) -> Result<(), WireError> {
    let role = match content.get("role").and_then(Value::as_str) {
        None | Some("user" | "function" | "tool") => Role::User,
        Some("model" | "assistant") => Role::Assistant,
        Some("system") => Role::System,
        Some(_) => {
            return Err(refuse(
                format!("{path}.role"),
                "user, model or function",
                content,
            ));
        }
    };
    let mut message = Message::text(role, "");
    let parts = parts(content, path)?;
    if role == Role::Assistant {
        for (part, path) in parts {
            said(part, &path, &mut message)?;
        }
        push(messages, message);
        return Ok(());
    }
    let mut results = false;
    for (part, path) in parts {
        let response = part
            .get("functionResponse")
            .or(part.get("function_response"));
        match response {
            Some(response) => {
                let before = std::mem::replace(&mut message, Message::text(role, ""));
                if !before.content.is_empty() {
                    messages.push(before);
                }
                messages.push(result(response));
                results = true;
            }
            None => message.content.extend(plain(part, &path)?),
        }
    }
    if !message.content.is_empty() || !results {
        messages.push(message);
    }
    Ok(())
}

/// The text of a function's response. Clients wrap it into an object, since nothing else is
/// allowed; an object of another shape is given as JSON.
fn result(response: &Value) -> Message {
    let value = response.get("response").unwrap_or(&Value::Null);
    let text = match value {
        Value::Null => String::new(),
        Value::String(text) => text.clone(),
        Value::Object(object) if object.len() == 1 => {
            let wrapped = ["output", "result", "content", "error"]
                .iter()
                .find_map(|name| object.get(*name)?.as_str());
            wrapped.map_or_else(|| value.to_string(), str::to_owned)
        }
        other => other.to_string(),
    };
    let mut message = Message::text(Role::Tool, text);
    message.tool_call_id = response["id"].as_str().map(str::to_owned);
    message
}

/// A part of the model's turn.
fn said(part: &Value, path: &str, message: &mut Message) -> Result<(), WireError> {
    if part["thought"] == true {
        if let Some(thought) = part["text"].as_str().filter(|text| !text.is_empty()) {
            message.reasoning.get_or_insert_default().push_str(thought);
        }
        return Ok(());
    }
    let Some(call) = part.get("functionCall").or(part.get("function_call")) else {
        message.content.extend(plain(part, path)?);
        return Ok(());
    };
    let name = call["name"]
        .as_str()
        .ok_or_else(|| refuse(format!("{path}.functionCall.name"), "a string", call))?;
    message.tool_calls.push(ToolCall {
        id: call["id"].as_str().unwrap_or_default().to_owned(),
        name: name.to_owned(),
        arguments: arguments_of_object(call.get("args")),
    });
    Ok(())
}

fn tools(object: &Map<String, Value>) -> Result<Vec<ToolSpec>, WireError> {
    let list = match present(object, "tools") {
        None => return Ok(Vec::new()),
        Some(Value::Array(list)) => list,
        Some(other) => return Err(refuse("tools", "a list", other)),
    };
    let mut tools = Vec::new();
    for (index, group) in list.iter().enumerate() {
        // Groups without functions (search, code execution) only the provider runs.
        let functions = group
            .get("functionDeclarations")
            .or(group.get("function_declarations"));
        for (inner, value) in functions
            .and_then(Value::as_array)
            .into_iter()
            .flatten()
            .enumerate()
        {
            let within = format!("tools[{index}].functionDeclarations[{inner}].");
            let function = value
                .as_object()
                .ok_or_else(|| refuse(within.as_str(), "an object", value))?;
            let name = text(function, &within, "name")?
                .ok_or_else(|| refuse(format!("{within}name"), "a string", &Value::Null))?;
            let parameters = match present(function, "parametersJsonSchema") {
                Some(schema) => schema.clone(),
                None => present(function, "parameters").map_or_else(no_parameters, json_schema),
            };
            if !parameters.is_object() {
                return Err(refuse(
                    format!("{within}parameters"),
                    "an object",
                    &parameters,
                ));
            }
            tools.push(ToolSpec {
                name: name.to_owned(),
                description: text(function, &within, "description")?
                    .unwrap_or_default()
                    .to_owned(),
                parameters,
            });
        }
    }
    Ok(tools)
}

/// This provider's own schema as JSON schema: it writes types in capitals.
fn json_schema(schema: &Value) -> Value {
    match schema {
        Value::Object(object) => Value::Object(
            object
                .iter()
                .map(|(name, value)| {
                    let value = match (name.as_str(), value) {
                        ("type", Value::String(kind)) => Value::from(kind.to_lowercase()),
                        (_, value) => json_schema(value),
                    };
                    (name.clone(), value)
                })
                .collect(),
        ),
        Value::Array(list) => Value::Array(list.iter().map(json_schema).collect()),
        other => other.clone(),
    }
}
