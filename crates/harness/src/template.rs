//! Templates of a profile: minijinja, strict, no escaping.

use minijinja::{Environment, UndefinedBehavior};
use serde::Serialize;

/// Everything a template may use. The field names are the variable names.
#[derive(Debug, Clone, Serialize)]
pub struct Variables<'a> {
    /// What the harness is told to do.
    pub instruction: &'a str,
    /// Root of the gateway for this rollout, no trailing slash, without `/v1`.
    pub base_url: &'a str,
    /// The rollout's secret.
    pub api_key: &'a str,
    /// Name of the model to ask for.
    pub model: &'a str,
    /// The task's workspace in the sandbox.
    pub workspace: &'a str,
    /// HOME in the sandbox.
    pub home: &'a str,
    /// The installed bundle in the sandbox.
    pub bundle: &'a str,
    /// The Node.js program in the sandbox (installs of kind `npm`), else empty.
    pub node: &'a str,
    /// The Python program in the sandbox (installs of kind `pip`), else empty.
    pub python: &'a str,
    /// Espalier's own guest program in the sandbox.
    pub guest: &'a str,
    /// Version of the harness, as in the profile.
    pub version: &'a str,
    /// The API to speak: `chat`, `responses`, `messages` or `gemini`.
    pub dialect: &'a str,
    /// Tokens that prompt and reply may have together.
    pub context_tokens: u32,
    /// Tokens that one reply may have.
    pub reply_tokens_max: u32,
    /// Tool servers to tell the harness of.
    pub tool_servers: &'a [crate::ToolServer],
}

/// The names of [`Variables`], for messages and checks.
pub const NAMES: [&str; 15] = [
    "instruction",
    "base_url",
    "api_key",
    "model",
    "workspace",
    "home",
    "bundle",
    "node",
    "python",
    "guest",
    "version",
    "dialect",
    "context_tokens",
    "reply_tokens_max",
    "tool_servers",
];

fn environment() -> Environment<'static> {
    let mut environment = Environment::new();
    environment.set_undefined_behavior(UndefinedBehavior::Strict);
    environment.set_keep_trailing_newline(true);
    environment.set_auto_escape_callback(|_| minijinja::AutoEscape::None);
    environment
}

/// Checks syntax and variable names.
///
/// # Errors
/// A sentence that says what is wrong.
pub fn check(source: &str) -> Result<(), String> {
    let environment = environment();
    let template = environment
        .template_from_str(source)
        .map_err(|error| sentence(&error))?;
    let mut unknown: Vec<String> = template
        .undeclared_variables(false)
        .into_iter()
        .filter(|name| !NAMES.contains(&name.as_str()))
        .collect();
    unknown.sort();
    match unknown.first() {
        None => Ok(()),
        Some(name) => Err(format!(
            "unknown template variable `{name}`; expected one of {}",
            NAMES.join(", ")
        )),
    }
}

/// Renders a template.
///
/// # Errors
/// A sentence that says what is wrong.
pub fn render(source: &str, variables: &Variables<'_>) -> Result<String, String> {
    environment()
        .render_str(source, variables)
        .map_err(|error| sentence(&error))
}

fn sentence(error: &minijinja::Error) -> String {
    match (error.detail(), error.line()) {
        (Some(detail), Some(line)) => format!("{} (line {line} of the template)", detail),
        (Some(detail), None) => detail.to_owned(),
        (None, _) => error.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn variables() -> Variables<'static> {
        Variables {
            instruction: "say \"hi\"\nnow",
            base_url: "http://127.0.0.1:9/r/k",
            api_key: "k",
            model: "policy",
            workspace: "/workspace",
            home: "/home/agent",
            bundle: "",
            node: "",
            python: "",
            guest: "",
            version: "1",
            dialect: "chat",
            context_tokens: 10,
            reply_tokens_max: 5,
            tool_servers: &[],
        }
    }

    #[test]
    fn every_variable_has_its_name_in_the_list() {
        let value = serde_json::to_value(variables()).unwrap();
        let names: Vec<&String> = value.as_object().unwrap().keys().collect();
        assert_eq!(names, NAMES.to_vec());
    }

    #[test]
    fn nothing_is_escaped_unless_asked() {
        assert_eq!(
            render("{{ instruction }}\n", &variables()).unwrap(),
            "say \"hi\"\nnow\n"
        );
        assert_eq!(
            render("{{ instruction | tojson }}", &variables()).unwrap(),
            "\"say \\\"hi\\\"\\nnow\""
        );
        assert_eq!(
            render("{{ context_tokens // 4 }}", &variables()).unwrap(),
            "2"
        );
    }

    #[test]
    fn an_unknown_variable_is_named_with_the_known_ones() {
        let problem = check("{{ modle }}").unwrap_err();
        assert!(
            problem.starts_with("unknown template variable `modle`; expected one of instruction")
        );
        assert!(check("{{ instruction").is_err());
        assert!(check("{% for x in [1, 2] %}{{ x }}{{ model }}{% endfor %}").is_ok());
    }
}
