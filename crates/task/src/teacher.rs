//! The scripted teacher: plays a reference solution, one step a turn, in the grammar of
//! whatever tools the harness offers.
//!
//! Pure and deterministic. It knows no harness: from the tool schemas of the captured request it
//! finds a tool by name and by what its parameters are called, and fills it in. When the tool
//! for a step is missing (or wants absolute paths, which a step does not have), the step becomes
//! a shell command. The number of assistant turns with tool calls in the conversation says which
//! step is next, so the teacher needs no memory and survives retries.

mod shell;
mod tools;

use record::{Conversation, Message, Role, ToolCall};
use serde_json::Value;

use crate::{Step, Task};
use tools::Toolbox;

/// What is said when a solution ends without words of its own.
const LAST_WORDS: &str = "Done.";

/// Why the teacher has no next message. Not retryable: another task or another harness is needed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum TeacherError {
    /// No tool offered can carry the step.
    #[error(
        "step {step} of the solution is to {wanted}: expected a shell tool with a parameter like `command`, or a tool for that; the harness offers [{offered}]; enable one of them in the harness profile"
    )]
    NoTool {
        /// The step, from 1.
        step: usize,
        /// What it does: `run a command`, `read a file` …
        wanted: &'static str,
        /// Names of the tools in the request.
        offered: String,
    },
    /// The task has no reference solution.
    #[error("task {task} has no reference solution; add solution.toml or use a model as teacher")]
    NoSolution {
        /// The task.
        task: String,
    },
}

/// The reference solution of a task, always ending with something said.
///
/// # Errors
/// [`TeacherError::NoSolution`].
pub fn reference(task: &Task) -> Result<Vec<Step>, TeacherError> {
    if task.solution.is_empty() {
        return Err(TeacherError::NoSolution {
            task: task.id.to_string(),
        });
    }
    let mut steps = task.solution.clone();
    if !matches!(steps.last(), Some(Step::Say(_))) {
        steps.push(Step::Say(LAST_WORDS.to_owned()));
    }
    Ok(steps)
}

/// How many steps were already made: assistant turns with tool calls.
#[must_use]
pub fn steps_made(conversation: &Conversation) -> usize {
    conversation
        .messages
        .iter()
        .filter(|message| message.role == Role::Assistant && !message.tool_calls.is_empty())
        .count()
}

/// The teacher's reply to a request: the next step as one tool call, or the last words.
///
/// # Errors
/// [`TeacherError::NoTool`].
pub fn next_message(steps: &[Step], conversation: &Conversation) -> Result<Message, TeacherError> {
    next_message_ending(steps, None, conversation)
}

/// As [`next_message`], for a harness that ends when a command is run (`ends_with`) and not when
/// there are words without a tool call: the command takes the place of the last words.
///
/// # Errors
/// [`TeacherError::NoTool`].
pub fn next_message_ending(
    steps: &[Step],
    ends_with: Option<&str>,
    conversation: &Conversation,
) -> Result<Message, TeacherError> {
    if conversation.tools.is_empty() {
        // A side call: a title, a summary. Whoever wants a step offers a tool for it.
        return Ok(Message::text(Role::Assistant, last_words(steps)));
    }
    let made = steps_made(conversation);
    let words = match steps.get(made) {
        Some(Step::Say(text)) => text,
        Some(step) => return turn(std::slice::from_ref(step), made, conversation),
        // More turns than steps: the harness nudged a teacher that was already done.
        None => last_words(steps),
    };
    match ends_with {
        Some(command) => turn(&[Step::Bash(command.to_owned())], made, conversation),
        None => Ok(Message::text(Role::Assistant, words)),
    }
}

/// One assistant turn that makes all of these steps at once, with a tool call for each. `made`
/// is how many turns came before it, for ids and messages.
///
/// # Errors
/// [`TeacherError::NoTool`], also for a [`Step::Say`], which is no tool call.
pub fn turn(
    steps: &[Step],
    made: usize,
    conversation: &Conversation,
) -> Result<Message, TeacherError> {
    let toolbox = Toolbox::of(&conversation.tools);
    let mut message = Message::text(Role::Assistant, "");
    for (index, step) in steps.iter().enumerate() {
        let (name, arguments) = match step {
            Step::Bash(command) => toolbox.bash(command),
            Step::Read(path) => toolbox
                .read(path)
                .or_else(|| toolbox.bash(&shell::read(path))),
            Step::Write(path, text) => toolbox
                .write(path, text)
                .or_else(|| toolbox.bash(&shell::write(path, text))),
            Step::Edit(path, old, new) => toolbox
                .edit(path, old, new)
                .or_else(|| toolbox.bash(&shell::edit(path, old, new))),
            Step::Say(_) => None,
        }
        .ok_or_else(|| TeacherError::NoTool {
            step: made + 1,
            wanted: wanted(step),
            offered: conversation
                .tools
                .iter()
                .map(|tool| tool.name.as_str())
                .collect::<Vec<_>>()
                .join(", "),
        })?;
        let id = match index {
            0 => format!("call_{made}"),
            _ => format!("call_{made}_{index}"),
        };
        message.tool_calls.push(ToolCall {
            id,
            name,
            arguments: Value::Object(arguments),
        });
    }
    Ok(message)
}

fn last_words(steps: &[Step]) -> &str {
    match steps.last() {
        Some(Step::Say(text)) => text,
        _ => LAST_WORDS,
    }
}

fn wanted(step: &Step) -> &'static str {
    match step {
        Step::Bash(_) => "run a command",
        Step::Read(_) => "read a file",
        Step::Write(..) => "write a file",
        Step::Edit(..) => "edit a file",
        Step::Say(_) => "say something",
    }
}

#[cfg(test)]
mod tests;
