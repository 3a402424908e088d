//! The scripted policy of the test kit: eight turns with parallel tool calls, a sub-agent, a
//! summary, in the tool grammar of whatever harness asks.
//!
//! It keeps no state of the conversation: every tool call names a file `mark-NN-…`, so the highest
//! mark in a request says how far the task is, also after the history was cut and rewritten.

use std::{
    collections::{BTreeMap, BTreeSet},
    path::PathBuf,
    sync::{Mutex, PoisonError},
};

use engine::{EngineError, Hint, scripted::Script};
use harness::Spawn;
use record::{Conversation, Message, Role, ToolCall};
use serde_json::Value;
use task::{Step, teacher};

/// Where the task lives. Paths are absolute: every file tool takes those, some take no others.
pub(crate) const WORKSPACE: &str = "/workspace";
/// In the instruction of the main conversation, and in its summaries.
pub(crate) const MAIN: &str = "espalier-check-main";
/// In what a sub-agent is told.
pub(crate) const SUB: &str = "espalier-check-sub";
/// In summaries, lower case.
const SUMMARY: &str = "the task goes on; everything up to";
/// What a sub-agent says last; long enough to be recognised where it is quoted.
pub(crate) const SUB_RESULT: &str =
    "The sub-agent has counted the words of the note: 1729 of them.";
/// How every turn begins.
pub(crate) const SAYS: &str = "Turn ";
/// Turns of the usual task.
pub(crate) const TURNS: usize = 8;

/// What is played, and how the engine fails meanwhile.
#[derive(Debug, Default)]
pub(crate) struct Play {
    /// Steps of each turn; those of one turn are made at once.
    pub(crate) turns: Vec<Vec<Step>>,
    /// The command that ends the harness, if words do not.
    pub(crate) ends_with: Option<String>,
    /// How to ask for a sub-agent, in place of this turn.
    pub(crate) spawn: Option<(usize, Spawn)>,
    /// In place of `turns`: a task that goes on until its history was summarised.
    pub(crate) long: Option<Long>,
    /// How the engine fails at the first try of a turn.
    pub(crate) faults: BTreeMap<usize, EngineError>,
    /// Turns whose fault was played.
    pub(crate) played: Mutex<BTreeSet<usize>>,
}

/// The usual task: all kinds of steps, up to three at a time.
pub(crate) fn turns() -> Vec<Vec<Step>> {
    let bash = |text: &str| Step::Bash(text.to_owned());
    let file = |name: &str| PathBuf::from(WORKSPACE).join(name);
    let write = |name: &str, text: &str| Step::Write(file(name), text.to_owned());
    vec![
        vec![
            bash("echo one > mark-01-a.txt"),
            bash("printf '%s\\n' \"it's \\\"1\\\"\" > mark-01-b.txt; cat mark-01-b.txt"),
        ],
        vec![write("mark-02-a.txt", "apple\nüber – 雪\n")],
        vec![
            Step::Read(file("mark-02-a.txt")),
            bash("wc -c < mark-02-a.txt > mark-03-a.txt; cat mark-03-a.txt"),
        ],
        vec![Step::Edit(
            file("mark-02-a.txt"),
            "apple".to_owned(),
            "mark-04 pear".to_owned(),
        )],
        vec![
            bash("echo a > mark-05-a.txt"),
            bash("echo b > mark-05-b.txt"),
            bash("echo c > mark-05-c.txt"),
        ],
        vec![write(
            "mark-06-a.txt",
            "  two spaces  \n\ttab \"q\" \\n {\"k\": [1, 2]}\n",
        )],
        vec![bash("seq 1 300 | tee mark-07-a.txt")],
        vec![bash(
            "cat mark-05-a.txt mark-05-b.txt mark-05-c.txt > mark-08-a.txt",
        )],
    ]
}

/// Proves that every step of [`turns`] did what it should; prints 1 or says what is missing.
pub(crate) const PROOF: &str = r#"set -e
is() { test "$(cat "$1")" = "$2" || { echo "$1 is not as it must be"; echo 0; exit 0; }; }
is mark-01-a.txt one
is mark-01-b.txt "it's \"1\""
is mark-02-a.txt "mark-04 pear
über – 雪"
is mark-03-a.txt 20
# Claude Code takes blanks off the ends of lines.
sed -i 's/ *$//' mark-06-a.txt
is mark-06-a.txt '  two spaces
	tab "q" \n {"k": [1, 2]}'
is mark-07-a.txt "$(seq 1 300)"
is mark-08-a.txt 'a
b
c'
echo 1
"#;

/// Turns of a long task before it is given up: its history was never summarised.
pub(crate) const LONG_TURNS_MAX: usize = 70;
/// Turns of a long task behind the first summary.
const TURNS_AFTER_SUMMARY: usize = 5;
/// What long tasks print.
pub(crate) const LONG_LINE: &str = "the quick brown fox jumps over the lazy dog\n";

/// A task of one command a turn that goes on until the harness had its history summarised, and
/// some turns longer: when that is, is the harness's own matter.
#[derive(Debug, Default)]
pub(crate) struct Long {
    /// What each turn prints, in bytes.
    pub(crate) bytes: usize,
    /// Turns made when the first summary was written.
    summarised: Mutex<Option<usize>>,
}

impl Long {
    pub(crate) fn new(bytes: usize) -> Self {
        Self {
            bytes,
            ..Self::default()
        }
    }

    fn summarise(&self, made: usize) {
        let mut summarised = self
            .summarised
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        summarised.get_or_insert(made);
    }

    /// The step behind so many; `None` when it is enough.
    fn step(&self, made: usize) -> Option<Step> {
        let summarised = *self
            .summarised
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        let turns = summarised.map_or(LONG_TURNS_MAX, |at| at + TURNS_AFTER_SUMMARY);
        let turn = made + 1;
        let line = LONG_LINE.trim_end();
        (turn <= turns).then(|| {
            Step::Bash(format!(
                "echo {turn} > mark-{turn:02}-a.txt; echo {turn} > total.txt; yes '{line}' | head -c {}",
                self.bytes
            ))
        })
    }
}

/// The proof of a long task: no turn was lost, and none made that was not asked for.
pub(crate) const LONG_PROOF: &str = r#"total=$(cat total.txt) || { echo nothing was made; echo 0; exit 0; }
for i in $(seq 1 "$total"); do
  f=$(printf 'mark-%02d-a.txt' "$i")
  test "$(cat "$f")" = "$i" || { echo "$f is missing"; echo 0; exit 0; }
done
made=$(ls mark-*-a.txt | wc -l)
test "$made" -eq "$total" || { echo "$made files, the last turn was $total"; echo 0; exit 0; }
echo 1
"#;

/// The highest mark in a text; 0 without.
pub(crate) fn highest_mark(text: &str) -> usize {
    text.match_indices("mark-")
        .filter_map(|(at, mark)| text.get(at + mark.len()..at + mark.len() + 2)?.parse().ok())
        .max()
        .unwrap_or(0)
}

fn texts(conversation: &Conversation) -> impl Iterator<Item = String> {
    conversation
        .messages
        .iter()
        .filter(|message| message.role != Role::System)
        .map(|message| {
            let calls: Vec<String> = message
                .tool_calls
                .iter()
                .map(|call| call.arguments.to_string())
                .collect();
            format!("{}\n{}", message.text_content(), calls.join("\n"))
        })
}

/// Turns made so far.
fn progress(conversation: &Conversation) -> usize {
    texts(conversation)
        .map(|text| highest_mark(&text))
        .max()
        .unwrap_or(0)
}

/// Whether a request wants a summary of the conversation, not its next turn.
fn wants_summary(conversation: &Conversation) -> bool {
    let last = conversation.messages.last();
    let asks = last.is_some_and(|message| {
        let text = message.text_content().to_lowercase();
        // Where a harness goes on after a summary, its message speaks of summaries too.
        message.role == Role::User
            && !text.contains(SUMMARY)
            && ["summar", "compact", "handoff", "hand off", "checkpoint"]
                .iter()
                .any(|word| text.contains(word))
    });
    progress(conversation) > 0 && (conversation.tools.is_empty() || asks)
}

fn say(text: impl Into<String>) -> Message {
    Message::text(Role::Assistant, text)
}

impl Play {
    /// Faults of the engine that were played.
    pub(crate) fn faults_played(&self) -> u32 {
        let played = self.played.lock().unwrap_or_else(PoisonError::into_inner);
        u32::try_from(played.len()).unwrap_or(u32::MAX)
    }

    fn sub_agent(&self, conversation: &Conversation) -> Result<Message, EngineError> {
        let made = teacher::steps_made(conversation);
        let step = Step::Bash("echo sub > sub.txt; cat sub.txt".to_owned());
        if made == 0
            && let Ok(message) = teacher::turn(&[step], made, conversation)
        {
            return Ok(message);
        }
        let finish = self
            .spawn
            .as_ref()
            .and_then(|(_, spawn)| spawn.finish.clone());
        match finish {
            Some((tool, argument)) if offers(conversation, &tool) && made < 2 => Ok(calling(
                tool,
                [(argument, Value::from(SUB_RESULT))].into_iter().collect(),
            )),
            _ => Ok(say(SUB_RESULT)),
        }
    }

    fn main(&self, conversation: &Conversation) -> Result<Message, EngineError> {
        let made = progress(conversation);
        let next = made + 1;
        if let Some(fault) = self.faults.get(&next) {
            let mut played = self.played.lock().unwrap_or_else(PoisonError::into_inner);
            if played.insert(next) {
                return Err(fault.clone());
            }
        }
        if let Some((at, spawn)) = &self.spawn
            && *at == made
            && !texts(conversation).any(|text| text.contains(SUB))
        {
            if !offers(conversation, &spawn.tool) {
                return Err(EngineError::NoScript(format!(
                    "the harness offers no tool `{}` (habits.spawn of its profile)",
                    spawn.tool
                )));
            }
            let mut arguments: serde_json::Map<String, Value> =
                spawn.arguments.clone().into_iter().collect();
            arguments.insert(
                spawn.prompt.clone(),
                Value::from(format!(
                    "{SUB}: make the file sub.txt with a shell command, then say how many words the note has."
                )),
            );
            return Ok(calling(spawn.tool.clone(), arguments));
        }
        let refuse = |error: teacher::TeacherError| EngineError::NoScript(error.to_string());
        let steps = match &self.long {
            Some(long) => long.step(made).map(|step| vec![step]),
            None => self.turns.get(made).cloned(),
        };
        match (steps, &self.ends_with) {
            (Some(steps), _) => {
                let mut message = teacher::turn(&steps, made, conversation).map_err(refuse)?;
                message.content = say(format!("{SAYS}{next}.")).content;
                Ok(message)
            }
            (None, Some(command)) => {
                teacher::turn(&[Step::Bash(command.clone())], made, conversation).map_err(refuse)
            }
            (None, None) => Ok(say("All done.")),
        }
    }
}

/// Whether a tool is offered, under this name or at the end of a longer one (`namespace.name`).
fn offers(conversation: &Conversation, tool: &str) -> bool {
    conversation.tools.iter().any(|one| one.name == tool)
}

fn calling(tool: String, arguments: serde_json::Map<String, Value>) -> Message {
    let mut message = say("");
    message.tool_calls.push(ToolCall {
        id: "call_x".to_owned(),
        name: tool,
        arguments: Value::Object(arguments),
    });
    message
}

impl Script for Play {
    fn reply(&self, hint: &Hint) -> Result<Message, EngineError> {
        let conversation = hint.conversation.as_ref();
        let all: Vec<String> = texts(conversation).collect();
        let contains = |nonce: &str| all.iter().any(|text| text.contains(nonce));
        if let Some(long) = &self.long
            && wants_summary(conversation)
        {
            let made = progress(conversation);
            long.summarise(made);
            return Ok(say(format!("{MAIN}: {SUMMARY} mark-{made:02} is done.")));
        }
        if contains(SUB) && !contains(MAIN) {
            return self.sub_agent(conversation);
        }
        // A title, a memory note: whoever wants a turn offers tools.
        if conversation.tools.is_empty() {
            return Ok(say("A small task"));
        }
        self.main(conversation)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_highest_mark_counts_wherever_it_stands() {
        assert_eq!(highest_mark("mark-03-a.txt, mark-11 and mark-x mark-"), 11);
        assert_eq!(highest_mark("nothing, ümark-0"), 0);
    }

    #[test]
    fn a_summary_carries_the_progress_over() {
        let tools = Vec::new();
        let asked = Conversation {
            messages: vec![
                Message::text(Role::User, MAIN),
                Message::text(Role::User, "bash(echo 4 > mark-04-a.txt)\nSummarise this."),
            ],
            tools,
        };
        let play = Play {
            long: Some(Long::new(10)),
            ..Play::default()
        };
        let hint = |conversation| Hint {
            rollout: None,
            conversation: std::sync::Arc::new(conversation),
        };
        let summary = play.reply(&hint(asked)).unwrap();
        assert!(summary.text_content().contains("mark-04"));
        let shell = record::ToolSpec {
            name: "bash".into(),
            description: String::new(),
            parameters: serde_json::json!({"type": "object",
                "properties": {"command": {"type": "string"}}, "required": ["command"]}),
        };
        let after = Conversation {
            messages: vec![Message::text(
                Role::User,
                format!(
                    "This is a summary of what came before: {}",
                    summary.text_content()
                ),
            )],
            tools: vec![shell],
        };
        let next = play.reply(&hint(after.clone())).unwrap();
        assert!(next.tool_calls[0].arguments.to_string().contains("mark-05"));
        // Some turns later it is enough; without a summary it goes on.
        let mut late = after;
        late.messages
            .push(Message::text(Role::User, "mark-09 was made"));
        let last = play.reply(&hint(late.clone())).unwrap();
        assert!(last.tool_calls.is_empty());
        let unsummarised = Play {
            long: Some(Long::new(10)),
            ..Play::default()
        };
        let next = unsummarised.reply(&hint(late)).unwrap();
        assert!(next.tool_calls[0].arguments.to_string().contains("mark-10"));
    }
}
