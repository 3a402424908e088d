//! The model's own Jinja template, rendered as Hugging Face renders it.
//!
//! `trim_blocks` and `lstrip_blocks`, loop controls, Python's string and dictionary methods,
//! `tojson` = `json.dumps`, values printed as Python prints them, `raise_exception`,
//! `strftime_now`, the `generation` tag (a mark for trainers, without effect on the text). Variables: `messages`,
//! `tools` and `documents` (`none` when absent), `add_generation_prompt`, `enable_thinking` when
//! set, and the special tokens.

use std::borrow::Cow;

use minijinja::{
    Environment, ErrorKind, Value as Jinja,
    value::{Kwargs, Rest},
};
use record::{Conversation, Message, Part, Role, ToolCall, ToolSpec};
use serde::Serialize;
use serde_json::{Map, Value, json};

use crate::{CodecError, Settings, files::Files, python_json, strftime::strftime, tokens::Tokens};

/// A compiled template.
pub struct Template {
    environment: Environment<'static>,
    has_tool_template: bool,
    variables: Map<String, Value>,
}

impl std::fmt::Debug for Template {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Template")
            .field("has_tool_template", &self.has_tool_template)
            .finish_non_exhaustive()
    }
}

/// The error of the template engine, with the innermost reason and the line.
fn error(error: &minijinja::Error) -> CodecError {
    let reason = match (error.kind(), error.detail()) {
        (ErrorKind::InvalidOperation, Some(detail)) => detail.to_owned(),
        (kind, Some(detail)) => format!("{kind}: {detail}"),
        (kind, None) => kind.to_string(),
    };
    CodecError::Template {
        line: error.line().unwrap_or(0),
        reason,
    }
}

fn to_json(value: &Jinja) -> Result<Value, minijinja::Error> {
    serde_json::to_value(value)
        .map_err(|error| minijinja::Error::new(ErrorKind::BadSerialization, error.to_string()))
}

/// The filter `tojson`.
fn tojson(value: Jinja, _rest: Rest<Jinja>, options: Kwargs) -> Result<Jinja, minijinja::Error> {
    let indent = options.get::<Option<usize>>("indent")?;
    let mut style = python_json::Style::new(indent);
    style.ensure_ascii = options
        .get::<Option<bool>>("ensure_ascii")?
        .unwrap_or(false);
    style.sort_keys = options.get::<Option<bool>>("sort_keys")?.unwrap_or(false);
    if let Some(separators) = options.get::<Option<Vec<String>>>("separators")?
        && let [item, key] = separators.as_slice()
    {
        style.item_separator.clone_from(item);
        style.key_separator.clone_from(key);
    }
    options.assert_all_used()?;
    Ok(Jinja::from_safe_string(python_json::dumps(
        &to_json(&value)?,
        &style,
    )))
}

/// Turns the tags `generation` and `endgeneration` into an `if true`, white-space marks kept.
fn without_generation_tags(source: &str) -> String {
    let mut out = String::with_capacity(source.len());
    let mut rest = source;
    while let Some(open) = rest.find("{%") {
        let Some(length) = rest[open..].find("%}") else {
            break;
        };
        let tag = &rest[open..open + length + 2];
        let inner = tag[2..tag.len() - 2].trim_matches(['-', '+']).trim();
        out.push_str(&rest[..open]);
        match inner {
            "generation" => out.push_str(&tag.replace("generation", "if true")),
            "endgeneration" => out.push_str(&tag.replace("endgeneration", "endif")),
            _ => out.push_str(tag),
        }
        rest = &rest[open + length + 2..];
    }
    out.push_str(rest);
    out
}

impl Template {
    pub(crate) fn new(files: &Files, settings: &Settings) -> Result<Self, CodecError> {
        let mut environment = Environment::new();
        environment.set_trim_blocks(true);
        environment.set_lstrip_blocks(true);
        environment.set_auto_escape_callback(|_| minijinja::AutoEscape::None);
        environment
            .set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
        environment.set_formatter(|out, _, value| {
            if value.is_undefined() {
                return Ok(());
            }
            match value.as_str() {
                Some(text) => out.write_str(text)?,
                None => out.write_str(&python_json::display(&to_json(value)?))?,
            }
            Ok(())
        });
        environment.add_filter("tojson", tojson);
        environment.add_function(
            "raise_exception",
            |message: String| -> Result<Jinja, minijinja::Error> {
                Err(minijinja::Error::new(ErrorKind::InvalidOperation, message))
            },
        );
        let now_s = settings.now_s;
        environment.add_function("strftime_now", move |format: String| {
            strftime(&format, now_s)
        });
        let mut add = |name: &'static str, source: &str| {
            environment
                .add_template_owned(name, without_generation_tags(source))
                .map_err(|problem| error(&problem))
        };
        add("default", &files.template)?;
        if let Some(source) = &files.tool_template {
            add("tool_use", source)?;
        }
        let mut variables = files.specials.clone();
        variables.insert("documents".into(), Value::Null);
        if let Some(enable) = settings.enable_thinking {
            variables.insert("enable_thinking".into(), json!(enable));
        }
        Ok(Self {
            environment,
            has_tool_template: files.tool_template.is_some(),
            variables,
        })
    }

    /// The conversation as text.
    ///
    /// # Errors
    /// [`CodecError::Template`] with the template's line.
    pub fn render(
        &self,
        conversation: &Conversation,
        add_generation_prompt: bool,
    ) -> Result<String, CodecError> {
        self.render_turns(
            &mut conversation.messages.iter(),
            &conversation.tools,
            add_generation_prompt,
        )
    }

    /// [`Template::render`] of messages that are not in one conversation.
    pub(crate) fn render_turns(
        &self,
        messages: &mut dyn Iterator<Item = &Message>,
        tools: &[ToolSpec],
        add_generation_prompt: bool,
    ) -> Result<String, CodecError> {
        let variables = Variables {
            fixed: &self.variables,
            messages: messages.map(Shown::of).collect(),
            tools: (!tools.is_empty()).then(|| tools.iter().map(ShownTool::of).collect()),
            add_generation_prompt,
        };
        let name = if self.has_tool_template && !tools.is_empty() {
            "tool_use"
        } else {
            "default"
        };
        self.environment
            .get_template(name)
            .and_then(|template| template.render(Jinja::from_serialize(&variables)))
            .map_err(|problem| error(&problem))
    }
}

/// What a text-only model is shown in place of an image. A refusal would be worse: the image stays
/// in the history, so that every later call of the harness would be refused too, its compaction
/// included.
pub const IMAGE_NOTICE: &str = "[An image stood here, which this model cannot see.]";

/// What a template sees. Histories are long: nothing is copied before the template engine does it.
#[derive(Serialize)]
struct Variables<'a> {
    #[serde(flatten)]
    fixed: &'a Map<String, Value>,
    messages: Vec<Shown<'a>>,
    tools: Option<Vec<ShownTool<'a>>>,
    add_generation_prompt: bool,
}

/// A message as templates want it: content one text (blocks joined by a line break, as serving
/// engines do), arguments of tool calls as objects.
#[derive(Serialize)]
struct Shown<'a> {
    role: &'static str,
    content: Cow<'a, str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    reasoning_content: Option<&'a str>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    tool_calls: Vec<ShownCall<'a>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    tool_call_id: Option<&'a str>,
}

#[derive(Serialize)]
struct ShownCall<'a> {
    id: &'a str,
    r#type: &'static str,
    function: ShownFunction<'a>,
}

#[derive(Serialize)]
struct ShownFunction<'a> {
    name: &'a str,
    arguments: &'a Value,
}

#[derive(Serialize)]
struct ShownTool<'a> {
    r#type: &'static str,
    function: &'a ToolSpec,
}

impl<'a> Shown<'a> {
    fn of(message: &'a Message) -> Self {
        let text = |part: &'a Part| match part {
            Part::Text { text } => text.as_str(),
            Part::Image { .. } => IMAGE_NOTICE,
        };
        let content = match message.content.as_slice() {
            [] => Cow::Borrowed(""),
            [part] => Cow::Borrowed(text(part)),
            parts => Cow::Owned(parts.iter().map(text).collect::<Vec<_>>().join("\n")),
        };
        Self {
            role: match message.role {
                Role::System => "system",
                Role::User => "user",
                Role::Assistant => "assistant",
                Role::Tool => "tool",
            },
            content,
            reasoning_content: message.reasoning.as_deref(),
            tool_calls: message.tool_calls.iter().map(ShownCall::of).collect(),
            tool_call_id: message.tool_call_id.as_deref(),
        }
    }
}

impl<'a> ShownCall<'a> {
    fn of(call: &'a ToolCall) -> Self {
        Self {
            id: &call.id,
            r#type: "function",
            function: ShownFunction {
                name: &call.name,
                arguments: &call.arguments,
            },
        }
    }
}

impl<'a> ShownTool<'a> {
    fn of(tool: &'a ToolSpec) -> Self {
        Self {
            r#type: "function",
            function: tool,
        }
    }
}

/// What a template puts around a placeholder that stands for a turn of ours.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Frame {
    /// Between the generation prompt and the placeholder.
    pub opening: String,
    /// Behind the placeholder, up to and including the end-of-turn token; empty when the template
    /// has no such token.
    pub tail: String,
}

/// What a template puts around an assistant turn.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Turn {
    /// What a reply is generated behind, e.g. `<|im_start|>assistant\n`.
    pub generation_prompt: String,
    /// Around a placeholder that is the content of the turn.
    pub said: Frame,
    /// Around a placeholder that is the name of the only tool called; `None` when the template
    /// does not tell where such a turn begins or ends.
    pub called: Option<Frame>,
    /// The end-of-turn token; empty when there is none.
    pub end_text: String,
    /// Its id.
    pub end_id: Option<u32>,
}

/// An assistant turn that says only `word`.
#[must_use]
pub fn saying(word: &str) -> Message {
    Message::text(Role::Assistant, word)
}

/// An assistant turn that only calls a tool named `word`, without arguments.
#[must_use]
pub fn calling(word: &str) -> Message {
    let mut message = Message::text(Role::Assistant, "");
    message.tool_calls.push(ToolCall {
        id: "callturn0".into(),
        name: word.to_owned(),
        arguments: json!({}),
    });
    message
}

impl Turn {
    /// Finds out by rendering a few tiny conversations.
    ///
    /// # Errors
    /// [`CodecError::Template`] when the template refuses the plainest of them.
    pub fn probe(template: &Template, tokens: &Tokens) -> Result<Self, CodecError> {
        const PROBE: &str = "zqprobeqz";
        let mut conversation = Conversation {
            messages: vec![Message::text(Role::User, "a")],
            tools: Vec::new(),
        };
        let without = template.render(&conversation, false)?;
        let with = template.render(&conversation, true)?;
        let mut turn = Self {
            generation_prompt: with.strip_prefix(&without).unwrap_or_default().to_owned(),
            ..Self::default()
        };
        conversation.messages.push(saying(PROBE));
        let rendered = template.render(&conversation, false)?;
        if let Some((_, after)) = rendered.split_once(PROBE)
            && let Some((at, text, id)) = tokens.first_added(after)
        {
            turn.said.tail = after[..at + text.len()].to_owned();
            turn.end_text = text.to_owned();
            turn.end_id = Some(id);
        }
        conversation.messages[1] = calling(PROBE);
        if let Ok(rendered) = template.render(&conversation, false)
            && let Some(behind) = rendered.strip_prefix(&with)
            && let Some((opening, after)) = behind.split_once(PROBE)
            && !turn.end_text.is_empty()
            && let Some(at) = after.find(&turn.end_text)
        {
            turn.called = Some(Frame {
                opening: opening.to_owned(),
                tail: after[..at + turn.end_text.len()].to_owned(),
            });
        }
        Ok(turn)
    }
}
