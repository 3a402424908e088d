//! The document of ATIF v1.8, as far as it is written here. Fields without value are left out: the
//! format forbids unknown ones.

use serde::Serialize;
use serde_json::{Map, Value};

/// The version that is written.
pub const SCHEMA_VERSION: &str = "ATIF-v1.8";

/// A document, or one embedded in it.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Trajectory {
    /// [`SCHEMA_VERSION`].
    pub schema_version: &'static str,
    /// The rollout.
    pub session_id: String,
    /// The rollout; for an embedded one with the number of its first call.
    pub trajectory_id: String,
    /// The harness.
    pub agent: Agent,
    /// What happened, at least one.
    pub steps: Vec<Step>,
    /// Sums.
    pub final_metrics: FinalMetrics,
    /// Task, reward and where everything came from; for an embedded one its class.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub extra: Option<Value>,
    /// Conversations beside the main one.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub subagent_trajectories: Vec<Trajectory>,
}

/// The harness.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Agent {
    /// Name of the profile.
    pub name: String,
    /// Its version.
    pub version: String,
    /// The model that it asked for.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub model_name: Option<String>,
    /// Tools, OpenAI-style.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub tool_definitions: Vec<Value>,
}

/// Who speaks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum SourceOfStep {
    /// Instructions of the harness.
    System,
    /// The person, or the harness in their name.
    User,
    /// The model.
    Agent,
}

/// One thing that was said.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Step {
    /// From 1.
    pub step_id: usize,
    /// ISO 8601.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub timestamp: Option<String>,
    /// Who speaks.
    pub source: SourceOfStep,
    /// What was said.
    pub message: Content,
    /// The model's reasoning.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reasoning_content: Option<String>,
    /// Tools that the model calls.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub tool_calls: Vec<ToolCall>,
    /// What they answered.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub observation: Option<Observation>,
    /// Tokens.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub metrics: Option<Metrics>,
    /// Set for a turn of the model that came with a request.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub is_copied_context: Option<bool>,
    /// 1 for a reply.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub llm_call_count: Option<u32>,
    /// Number of the call, its class, whether it is trained, versions of the policy.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub extra: Option<Value>,
}

impl Step {
    pub(super) fn new(source: SourceOfStep, message: Content, timestamp: Option<String>) -> Self {
        Self {
            step_id: 0,
            timestamp,
            source,
            message,
            reasoning_content: None,
            tool_calls: Vec::new(),
            observation: None,
            metrics: None,
            is_copied_context: None,
            llm_call_count: None,
            extra: None,
        }
    }

    /// The call of which this is the reply.
    pub(super) fn call(&self) -> Option<u32> {
        let call = self.extra.as_ref()?.get("call")?.as_u64()?;
        u32::try_from(call).ok()
    }
}

/// Text, or parts.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(untagged)]
pub enum Content {
    /// Only text.
    Text(String),
    /// With images.
    Parts(Vec<ContentPart>),
}

/// A part of a message.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct ContentPart {
    r#type: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    text: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    source: Option<ImageSource>,
}

impl ContentPart {
    pub(super) fn text(text: String) -> Self {
        Self {
            r#type: "text",
            text: Some(text),
            source: None,
        }
    }

    pub(super) fn image(source: ImageSource) -> Self {
        Self {
            r#type: "image",
            text: None,
            source: Some(source),
        }
    }
}

/// Where an image is.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub(super) struct ImageSource {
    /// Its kind.
    pub media_type: &'static str,
    /// A file beside the document, or an address.
    pub path: String,
}

/// An image that is a file beside the document.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Image {
    /// Path from the document's folder.
    pub path: String,
    /// The file.
    pub bytes: Vec<u8>,
}

/// A tool call.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct ToolCall {
    /// Its id.
    pub tool_call_id: String,
    /// The tool.
    pub function_name: String,
    /// Its arguments.
    pub arguments: Map<String, Value>,
    /// The model's text, when it is no JSON object.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub extra: Option<Value>,
}

/// What tools answered.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct Observation {
    /// In the order in which it came.
    pub results: Vec<ObservationResult>,
}

/// What one tool answered.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct ObservationResult {
    /// The tool call of the same step.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub source_call_id: Option<String>,
    /// The answer.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub content: Option<Content>,
    /// Conversations that the tool call started.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub subagent_trajectory_ref: Vec<SubagentRef>,
}

/// An embedded trajectory by its id.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct SubagentRef {
    /// Its `trajectory_id`.
    pub trajectory_id: String,
}

/// Tokens of a reply.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Metrics {
    /// Tokens of the prompt.
    pub prompt_tokens: usize,
    /// Tokens of the reply.
    pub completion_tokens: usize,
    /// Tokens of the prompt that were in the engine's cache.
    pub cached_tokens: u32,
    /// The prompt's ids, when asked for.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub prompt_token_ids: Option<Vec<u32>>,
    /// The reply's ids.
    pub completion_token_ids: Vec<u32>,
    /// Log-probability of each, under the distribution that was sampled from.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub logprobs: Vec<f32>,
}

/// Sums over the steps.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct FinalMetrics {
    /// Tokens of all prompts.
    pub total_prompt_tokens: usize,
    /// Tokens of all replies.
    pub total_completion_tokens: usize,
    /// Tokens from the engine's cache.
    pub total_cached_tokens: usize,
    /// Steps.
    pub total_steps: usize,
}
