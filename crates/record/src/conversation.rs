//! The neutral form of a chat request. `wire` turns each dialect into it, `codec` renders it
//! with the model's chat template, scripted policies read it.

use serde::{Deserialize, Serialize};
use serde_json::Value;

/// Who speaks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Role {
    /// Instructions of the harness (`system` and `developer` on the wire).
    System,
    /// The person, or the harness in the person's name.
    User,
    /// The model.
    Assistant,
    /// The result of a tool call.
    Tool,
}

/// A piece of content.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum Part {
    /// Plain text.
    Text {
        /// The text, byte for byte as it came.
        text: String,
    },
    /// An image. Kept for the record; a text-only model refuses it.
    Image {
        /// A `data:` URL or an address.
        url: String,
    },
}

/// A tool call of the model.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ToolCall {
    /// The id on the wire. Harnesses rewrite it: never match on it alone.
    pub id: String,
    /// The tool.
    pub name: String,
    /// Parsed arguments, key order kept. A string when the model's text was not JSON.
    pub arguments: Value,
}

/// A tool that the model may call.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ToolSpec {
    /// The tool's name.
    pub name: String,
    /// What it does, for the model.
    #[serde(default)]
    pub description: String,
    /// JSON schema of the arguments, key order kept.
    #[serde(default)]
    pub parameters: Value,
}

/// One message.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Message {
    /// Who speaks.
    pub role: Role,
    /// Content in order. Empty when the turn only calls tools.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub content: Vec<Part>,
    /// The model's reasoning, when it was echoed or parsed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reasoning: Option<String>,
    /// Tool calls of an assistant turn, in order.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub tool_calls: Vec<ToolCall>,
    /// For `Role::Tool`: the call that this answers.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tool_call_id: Option<String>,
}

impl Message {
    /// A message of one text part (none when `text` is empty).
    #[must_use]
    pub fn text(role: Role, text: impl Into<String>) -> Self {
        let text = text.into();
        let content = if text.is_empty() {
            Vec::new()
        } else {
            vec![Part::Text { text }]
        };
        Self {
            role,
            content,
            reasoning: None,
            tool_calls: Vec::new(),
            tool_call_id: None,
        }
    }

    /// All text parts joined, without separators.
    #[must_use]
    pub fn text_content(&self) -> String {
        self.content
            .iter()
            .filter_map(|part| match part {
                Part::Text { text } => Some(text.as_str()),
                Part::Image { .. } => None,
            })
            .collect()
    }
}

/// A whole request: history and tools.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub struct Conversation {
    /// Messages in order, system messages at the place where they came.
    pub messages: Vec<Message>,
    /// Tools in order.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub tools: Vec<ToolSpec>,
}
