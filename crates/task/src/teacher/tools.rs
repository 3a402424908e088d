//! Finds the tool for a step among the tools of a request, by names and parameter names.

use std::path::Path;

use record::ToolSpec;
use serde_json::{Map, Value, json};

type Arguments = Map<String, Value>;
/// Tool name and arguments.
type Filled = Option<(String, Arguments)>;

const BASH: &[&str] = &[
    "bash",
    "shell",
    "exec",
    "exec_command",
    "shell_command",
    "run",
    "run_command",
    "run_shell_command",
    "execute",
    "execute_command",
    "execute_bash",
    "terminal",
    "local_shell",
];
const READ: &[&str] = &["read", "read_file", "cat", "view", "view_file", "open_file"];
const WRITE: &[&str] = &["write", "write_file", "create", "create_file", "save_file"];
const EDIT: &[&str] = &[
    "edit",
    "edit_file",
    "replace",
    "str_replace",
    "replace_in_file",
    "search_replace",
];

// Parameter names, lower case without underscores.
const COMMAND: &[&str] = &["command", "cmd", "script", "code"];
const PATH: &[&str] = &["path", "filepath", "file", "filename", "absolutepath"];
const CONTENT: &[&str] = &["content", "contents", "text", "filetext"];
const OLD: &[&str] = &["old", "oldtext", "oldstring", "oldstr", "search"];
const NEW: &[&str] = &[
    "new",
    "newtext",
    "newstring",
    "newstr",
    "replace",
    "replacement",
];
const EDITS: &[&str] = &["edits", "changes", "replacements"];

/// The tools of a request.
#[derive(Debug)]
pub(super) struct Toolbox<'a> {
    tools: &'a [ToolSpec],
}

impl<'a> Toolbox<'a> {
    pub(super) fn of(tools: &'a [ToolSpec]) -> Self {
        Self { tools }
    }

    /// The first tool, in order of `names`, for which `fill` works out.
    fn find(&self, names: &[&str], fill: impl Fn(&ToolSpec) -> Option<Arguments>) -> Filled {
        names
            .iter()
            .flat_map(|name| {
                self.tools
                    .iter()
                    .filter(|tool| plain(&tool.name) == plain(name))
            })
            .find_map(|tool| Some((tool.name.clone(), complete(tool, fill(tool)?)?)))
    }

    pub(super) fn bash(&self, command: &str) -> Filled {
        self.find(BASH, |tool| {
            let key = parameter(tool, COMMAND)?;
            // Some harnesses take a program and its arguments instead of a line.
            let value = match property(tool, &key).get("type").and_then(Value::as_str) {
                Some("array") => json!(["bash", "-lc", command]),
                _ => json!(command),
            };
            Some(Map::from_iter([(key, value)]))
        })
    }

    pub(super) fn read(&self, path: &Path) -> Filled {
        self.find(READ, |tool| Some(Map::from_iter([place(tool, path)?])))
    }

    pub(super) fn write(&self, path: &Path, text: &str) -> Filled {
        self.find(WRITE, |tool| {
            let content = parameter(tool, CONTENT)?;
            Some(Map::from_iter([place(tool, path)?, (content, json!(text))]))
        })
    }

    pub(super) fn edit(&self, path: &Path, old: &str, new: &str) -> Filled {
        self.find(EDIT, |tool| {
            let mut arguments = Map::from_iter([place(tool, path)?]);
            if let (Some(before), Some(after)) = (parameter(tool, OLD), parameter(tool, NEW)) {
                arguments.insert(before, json!(old));
                arguments.insert(after, json!(new));
            } else {
                let list = parameter(tool, EDITS)?;
                let item = property(tool, &list).get("items")?;
                let before = key_of(item.get("properties")?, OLD)?;
                let after = key_of(item.get("properties")?, NEW)?;
                arguments.insert(list, json!([{ before: old, after: new }]));
            }
            Some(arguments)
        })
    }
}

/// A name for comparison: lower case, letters and digits only.
fn plain(name: &str) -> String {
    name.chars()
        .filter(char::is_ascii_alphanumeric)
        .map(|letter| letter.to_ascii_lowercase())
        .collect()
}

/// The schema of a parameter.
fn property<'a>(tool: &'a ToolSpec, key: &str) -> &'a Value {
    &tool.parameters["properties"][key]
}

/// The tool's name for a parameter: the first of `names` that it has.
fn parameter(tool: &ToolSpec, names: &[&str]) -> Option<String> {
    key_of(tool.parameters.get("properties")?, names)
}

fn key_of(properties: &Value, names: &[&str]) -> Option<String> {
    let properties = properties.as_object()?;
    names
        .iter()
        .find_map(|name| properties.keys().find(|key| plain(key) == *name))
        .cloned()
}

/// The path parameter, unless it wants an absolute path and ours is relative.
fn place(tool: &ToolSpec, path: &Path) -> Option<(String, Value)> {
    let key = parameter(tool, PATH)?;
    let description = property(tool, &key)["description"]
        .as_str()
        .unwrap_or("")
        .to_lowercase();
    let wants_absolute = plain(&key) == "absolutepath"
        || ["relative paths are not", "not relative"]
            .iter()
            .any(|words| description.contains(words))
        || description.contains("absolute") && !description.contains("relative");
    if wants_absolute && path.is_relative() {
        return None;
    }
    Some((key, json!(path.to_string_lossy())))
}

/// Adds harmless values for required parameters that the step does not know; `None` when one
/// has a type that cannot be guessed. The result has the order of the schema.
fn complete(tool: &ToolSpec, mut arguments: Arguments) -> Option<Arguments> {
    for key in tool.parameters["required"].as_array().into_iter().flatten() {
        let key = key.as_str()?;
        if arguments.contains_key(key) {
            continue;
        }
        let schema = property(tool, key);
        let value = match (schema["enum"].get(0), schema["type"].as_str()) {
            (Some(first), _) => first.clone(),
            (None, Some("string")) => json!("chore"),
            (None, Some("boolean")) => json!(false),
            (None, Some("array")) => json!([]),
            (None, Some("integer" | "number")) => {
                schema.get("default").or(schema.get("minimum")).cloned()?
            }
            _ => return None,
        };
        arguments.insert(key.to_owned(), value);
    }
    let order: Vec<&String> = tool.parameters["properties"]
        .as_object()
        .into_iter()
        .flat_map(Map::keys)
        .collect();
    let mut sorted = Map::new();
    for key in order {
        if let Some(value) = arguments.remove(key) {
            sorted.insert(key.clone(), value);
        }
    }
    sorted.extend(arguments);
    Some(sorted)
}
