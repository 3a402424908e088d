//! ATIF v1.8, the trajectory format of Harbor: one JSON document per rollout, whatever the harness.
//!
//! The document tells the main conversation: what came in (`system` and `user` steps), what the
//! model said (`agent` steps with the tokens and log-probabilities that were recorded), what the
//! tools answered (observations of the step that called them). Conversations beside it (sub-agents,
//! compactions, side calls) are embedded trajectories; a sub-agent is referred to by the step
//! that asked for it.
//!
//! Told is what happened: of each segment the longest chain of delivered replies. Retries and
//! other dead leaves are not told, but counted (`extra.calls_untold`). Whether the rule of the export
//! trains a step stands in its `extra.trained`.
//!
//! A prompt's ids are written when asked for: they make a document grow with the square of
//! the calls. Captures (`captures`) have everything once.

mod document;

use std::collections::BTreeMap;

use base64::{Engine, prelude::BASE64_STANDARD};
use chrono::{DateTime, SecondsFormat};
use record::{Call, Message, Part, Role};
use serde_json::{Map, Value, json};
use tree::{CallClass, Place, Selection, select};

pub use document::{
    Agent, Content, FinalMetrics, Image, Metrics, Observation, ObservationResult, SCHEMA_VERSION,
    SourceOfStep, Step, SubagentRef, ToolCall, Trajectory,
};
use document::{ContentPart, ImageSource};

use crate::{Source, chat};

/// Choices of an ATIF export.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct AtifOptions {
    /// Write the ids of every prompt.
    pub prompt_ids: bool,
}

/// A document and the image files that it names.
#[derive(Debug, Clone, PartialEq)]
pub struct AtifFiles {
    /// The document.
    pub trajectory: Trajectory,
    /// Images, to be written beside it.
    pub images: Vec<Image>,
}

/// The document of a rollout; `None` when it has no reply to tell.
#[must_use]
pub fn trajectory(source: &Source<'_>, options: AtifOptions) -> Option<AtifFiles> {
    let told = select(
        &source.tree,
        &Selection::Clawgym2 {
            leaves_max: usize::MAX,
            classes: vec![
                CallClass::Main,
                CallClass::Subagent,
                CallClass::Compaction,
                CallClass::Side,
            ],
        },
    );
    let mut threads: BTreeMap<(bool, u32, &str), Vec<&Place>> = BTreeMap::new();
    for place in told
        .calls
        .iter()
        .filter_map(|&call| source.tree.place(call))
    {
        // A compaction may be asked for within the main thread; it is a story of its own.
        let main = place.thread == 0 && place.class == CallClass::Main;
        let key = (!main, place.thread, place.class.name());
        threads.entry(key).or_default().push(place);
    }
    let mut teller = Teller {
        source,
        options,
        images: Vec::new(),
    };
    let mut told_threads = Vec::new();
    for ((aside, ..), places) in threads {
        let steps = teller.steps(&places);
        if !steps.is_empty() {
            told_threads.push((aside, places, steps));
        }
    }
    let (mut main, asides): (Vec<_>, Vec<_>) =
        told_threads.into_iter().partition(|(aside, ..)| !aside);
    let (_, places, steps) = main.pop()?;
    let mut trajectory =
        teller.document(source.rollout.spec.id.as_str().to_owned(), &places, steps);
    trajectory.extra = Some(rollout_extra(source, told.calls.len()));
    for (_, places, steps) in asides {
        let Some(first) = places.first() else {
            continue;
        };
        let id = format!("{}#{}", source.rollout.spec.id, first.call);
        refer(&mut trajectory.steps, first, &id);
        let mut embedded = teller.document(id, &places, steps);
        embedded.extra =
            Some(json!({"class": first.class.name(), "because": first.class_evidence}));
        trajectory.subagent_trajectories.push(embedded);
    }
    Some(AtifFiles {
        trajectory,
        images: teller.images,
    })
}

/// Notes at the step that asked for a sub-agent where its trajectory is.
fn refer(steps: &mut [Step], first: &Place, id: &str) {
    let asked = |step: &&mut Step| first.spawned_by.is_some() && step.call() == first.spawned_by;
    let Some(step) = steps.iter_mut().find(asked) else {
        return;
    };
    let observation = step.observation.get_or_insert_default();
    observation.results.push(ObservationResult {
        subagent_trajectory_ref: vec![SubagentRef {
            trajectory_id: id.to_owned(),
        }],
        ..ObservationResult::default()
    });
}

fn rollout_extra(source: &Source<'_>, calls_told: usize) -> Value {
    let rollout = source.rollout;
    json!({
        "task": rollout.spec.task,
        "group": rollout.spec.group,
        "labels": rollout.spec.labels,
        "seed": rollout.spec.seed,
        "lineage": rollout.lineage,
        "reward": source.reward(),
        "scores": rollout.verdict.as_ref().map(|verdict| &verdict.scores),
        "advantage": source.advantage,
        "disposition": rollout.disposition,
        "selection": source.selection,
        "tokens_trained": source.kept.tokens_trained,
        "calls_untold": source.calls.len().saturating_sub(calls_told),
    })
}

struct Teller<'a, 'b> {
    source: &'b Source<'a>,
    options: AtifOptions,
    images: Vec<Image>,
}

impl Teller<'_, '_> {
    /// The steps of one conversation, in order.
    fn steps(&mut self, places: &[&Place]) -> Vec<Step> {
        let mut steps: Vec<Step> = Vec::new();
        // What was told of the segment so far: the messages before the next reply, and the reply.
        let mut before: Option<&Call> = None;
        let mut segment = None;
        let mut system: Vec<&Message> = Vec::new();
        for place in places {
            let Some(call) = self.source.call(place.call) else {
                continue;
            };
            let messages = &call.conversation.messages;
            let new = match before {
                Some(before) if segment == Some(place.segment) => {
                    &messages[news(messages, before)..]
                }
                _ => &messages[..],
            };
            segment = Some(place.segment);
            for message in new {
                // A context reset repeats the system message.
                if message.role == Role::System {
                    if system.contains(&message) {
                        continue;
                    }
                    system.push(message);
                }
                self.hear(&mut steps, message, call);
            }
            let reply = self.say(call, place);
            steps.extend(reply);
            before = Some(call);
        }
        for (step, number) in steps.iter_mut().zip(1..) {
            step.step_id = number;
        }
        steps
    }

    /// A message that came in.
    fn hear(&mut self, steps: &mut Vec<Step>, message: &Message, call: &Call) {
        let content = self.content(message);
        if message.role == Role::Tool
            && let Some(step) = steps
                .last_mut()
                .filter(|step| step.source == SourceOfStep::Agent)
        {
            let observation = step.observation.get_or_insert_default();
            let answered = observation.results.len();
            // Harnesses rewrite ids: then the place in the order tells.
            let id = message.tool_call_id.as_deref();
            let tool_call = step
                .tool_calls
                .iter()
                .find(|tool_call| Some(tool_call.tool_call_id.as_str()) == id)
                .or_else(|| step.tool_calls.get(answered));
            observation.results.push(ObservationResult {
                source_call_id: tool_call.map(|tool_call| tool_call.tool_call_id.clone()),
                content: Some(content),
                ..ObservationResult::default()
            });
            return;
        }
        let source = match message.role {
            Role::System => SourceOfStep::System,
            Role::User | Role::Tool => SourceOfStep::User,
            Role::Assistant => SourceOfStep::Agent,
        };
        let timestamp = call.attempts.first().map(|first| time(first.started_ms));
        let mut step = Step::new(source, content, timestamp);
        if message.role == Role::Assistant {
            // History that came with a request: nobody here generated it.
            step.is_copied_context = Some(true);
            step.reasoning_content.clone_from(&message.reasoning);
            step.tool_calls = message.tool_calls.iter().map(tool_call).collect();
        }
        steps.push(step);
    }

    /// A reply.
    fn say(&mut self, call: &Call, place: &Place) -> Option<Step> {
        let (reply, generation) = (call.reply.as_ref()?, call.generation.as_ref()?);
        let timestamp = call.attempts.last().map(|last| time(last.finished_ms));
        let mut step = Step::new(SourceOfStep::Agent, self.content(reply), timestamp);
        step.reasoning_content.clone_from(&reply.reasoning);
        step.tool_calls = reply.tool_calls.iter().map(tool_call).collect();
        step.llm_call_count = Some(1);
        step.metrics = Some(Metrics {
            prompt_tokens: call.prompt_ids.len(),
            completion_tokens: generation.token_ids.len(),
            cached_tokens: generation.cached_tokens,
            prompt_token_ids: self.options.prompt_ids.then(|| call.prompt_ids.clone()),
            completion_token_ids: generation.token_ids.clone(),
            logprobs: generation.logprobs_sampled.clone(),
        });
        step.extra = Some(json!({
            "call": call.id.index,
            "class": place.class.name(),
            "segment": place.segment,
            "trained": self.source.kept.calls.binary_search(&call.id.index).is_ok(),
            "policy": chat::versions(self.source, &[call.id.index]),
            "temperature": call.sampling.temperature,
            "finish": generation.finish,
        }));
        Some(step)
    }

    fn document(&self, id: String, places: &[&Place], steps: Vec<Step>) -> Trajectory {
        let rollout = self.source.rollout;
        let last = places.last().and_then(|place| self.source.call(place.call));
        let model = last
            .and_then(|call| call.request.get("model"))
            .and_then(Value::as_str);
        let version = &rollout.lineage.harness_version;
        let sum = |count: fn(&Metrics) -> usize| -> usize {
            let metrics = steps.iter().filter_map(|step| step.metrics.as_ref());
            metrics.map(count).sum()
        };
        Trajectory {
            schema_version: SCHEMA_VERSION,
            session_id: rollout.spec.id.as_str().to_owned(),
            trajectory_id: id,
            agent: Agent {
                name: rollout.spec.harness.clone(),
                version: match version.is_empty() {
                    true => "unknown".to_owned(),
                    false => version.clone(),
                },
                model_name: model.map(str::to_owned),
                tool_definitions: last.map_or_else(Vec::new, |call| {
                    call.conversation.tools.iter().map(chat::tool).collect()
                }),
            },
            final_metrics: FinalMetrics {
                total_prompt_tokens: sum(|metrics| metrics.prompt_tokens),
                total_completion_tokens: sum(|metrics| metrics.completion_tokens),
                total_cached_tokens: sum(|metrics| metrics.cached_tokens as usize),
                total_steps: steps.len(),
            },
            steps,
            extra: None,
            subagent_trajectories: Vec::new(),
        }
    }

    fn content(&mut self, message: &Message) -> Content {
        let is_text = |part: &Part| matches!(part, Part::Text { .. });
        if message.content.iter().all(is_text) {
            return Content::Text(message.text_content());
        }
        Content::Parts(message.content.iter().map(|part| self.part(part)).collect())
    }

    /// Images in the request become files beside the document; addresses stay addresses.
    fn part(&mut self, part: &Part) -> ContentPart {
        let url = match part {
            Part::Text { text } => return ContentPart::text(text.clone()),
            Part::Image { url } => url,
        };
        if let Some((media_type, bytes)) = inline(url) {
            // A history that is sent again brings its images again.
            let known = self.images.iter().find(|image| image.bytes == bytes);
            let name = known.map(|image| image.path.clone()).unwrap_or_else(|| {
                let extension = media_type.trim_start_matches("image/");
                let path = format!(
                    "{}.images/{}.{extension}",
                    self.source.rollout.spec.id,
                    self.images.len()
                );
                self.images.push(Image {
                    path: path.clone(),
                    bytes,
                });
                path
            });
            return ContentPart::image(ImageSource {
                media_type,
                path: name,
            });
        }
        let extension = url.rsplit('.').next().unwrap_or_default();
        match media_type(&format!("image/{}", extension.to_ascii_lowercase())) {
            Some(media_type) if url.contains("://") => ContentPart::image(ImageSource {
                media_type,
                path: url.clone(),
            }),
            // The format names four kinds of image; of others the address is told.
            _ => ContentPart::text(format!(
                "[image {}]",
                url.chars().take(200).collect::<String>()
            )),
        }
    }
}

/// The first message that came in after the reply of the call before.
fn news(messages: &[Message], before: &Call) -> usize {
    let reply = before.conversation.messages.len();
    if messages
        .get(reply)
        .is_some_and(|turn| turn.role == Role::Assistant)
    {
        return reply + 1;
    }
    // The history was edited: what came after the last turn of the model.
    let last = messages
        .iter()
        .rposition(|turn| turn.role == Role::Assistant);
    last.map_or(0, |last| last + 1)
}

fn tool_call(call: &record::ToolCall) -> ToolCall {
    let (arguments, extra) = match &call.arguments {
        Value::Object(arguments) => (arguments.clone(), None),
        // The format wants an object.
        other => (Map::new(), Some(json!({"arguments": other}))),
    };
    ToolCall {
        tool_call_id: call.id.clone(),
        function_name: call.name.clone(),
        arguments,
        extra,
    }
}

/// Milliseconds since the Unix epoch in ISO 8601.
fn time(at_ms: u64) -> String {
    i64::try_from(at_ms)
        .ok()
        .and_then(DateTime::from_timestamp_millis)
        .unwrap_or_default()
        .to_rfc3339_opts(SecondsFormat::Millis, true)
}

fn media_type(name: &str) -> Option<&'static str> {
    match name {
        "image/png" => Some("image/png"),
        "image/jpeg" | "image/jpg" => Some("image/jpeg"),
        "image/gif" => Some("image/gif"),
        "image/webp" => Some("image/webp"),
        _ => None,
    }
}

/// Kind and bytes of a `data:` URL with an image that the format knows.
fn inline(url: &str) -> Option<(&'static str, Vec<u8>)> {
    let (head, data) = url.strip_prefix("data:")?.split_once(',')?;
    let kind = media_type(head.strip_suffix(";base64")?)?;
    Some((kind, BASE64_STANDARD.decode(data).ok()?))
}
