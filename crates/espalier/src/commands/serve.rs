//! `espalier serve`: the gateway alone, as the capture layer of somebody else's orchestrator.

use std::{
    net::SocketAddr,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use codec::Codec;
use engine::{
    Engine,
    remote::{Endpoint, Facts, sglang::Sglang, vllm},
    scripted::{Replay, Scripted},
};
use gateway::{Admin, Gateway, Listen, LocalAddr};
use ledger::Ledger;
use record::{Disposition, Fault};

use crate::{
    display::Display,
    error::CliError,
    policy,
    recipe::{self, PolicySource},
    teacher,
};

/// How long calls in flight may take to end after Ctrl-C.
const DRAIN: Duration = Duration::from_secs(30);
/// The environment variable that may hold the admin token.
const TOKEN_VARIABLE: &str = "ESPALIER_ADMIN_TOKEN";
/// What exists today, and what the design names for later.
const KINDS: &str = "embedded:DIR, vllm:URL, sglang:URL and scripted:FILE";
const KINDS_LATER: [&str; 2] = ["tinker", "openai"];

/// Serve an engine to any harness and capture every call.
///
/// Rollouts are opened through the admin API; each gets a base URL of its own. Ctrl-C lets calls
/// in flight end and closes what is open.
///
/// Example: espalier serve --engine embedded:policy --run runs/captured
#[derive(Debug, clap::Args)]
pub(crate) struct Arguments {
    /// What answers: embedded:DIR (Hugging Face folder), vllm:URL, sglang:URL, or scripted:FILE
    /// (replies as JSON lines).
    #[arg(long, value_name = "KIND:WHERE")]
    engine: String,
    /// Folder with tokenizer and chat template [default: the folder of the embedded engine].
    #[arg(long, value_name = "DIR")]
    tokenizer: Option<PathBuf>,
    /// Where harnesses connect; port 0 takes a free one.
    #[arg(long, default_value = "127.0.0.1:8300")]
    listen: SocketAddr,
    /// The admin API. Harnesses must not be able to reach it.
    #[arg(long, default_value = "127.0.0.1:8301")]
    admin: SocketAddr,
    /// New run directory for what is captured.
    #[arg(long, value_name = "DIR", default_value = "runs/serve")]
    run: PathBuf,
    /// Prompt and reply of a call together, for engines behind a URL; a vLLM server's own limit
    /// counts when it is lower.
    #[arg(long, value_name = "TOKENS", default_value_t = teacher::CONTEXT_TOKENS_MAX)]
    context_tokens: u32,
    /// Rules for what must not be written down: a TOML file with the keys of a recipe's [redact].
    #[arg(long, value_name = "FILE")]
    redact: Option<PathBuf>,
    /// Threads of the embedded engine.
    #[arg(long, default_value_t = 2)]
    threads: usize,
}

/// What `--engine` says.
#[derive(Debug, PartialEq, Eq)]
enum Kind {
    Embedded(PathBuf),
    Vllm(String),
    Sglang(String),
    Scripted(PathBuf),
}

impl Kind {
    fn parse(text: &str) -> Result<Self, CliError> {
        let wrong = |what: String| Err(CliError::usage(what, format!("today there are {KINDS}")));
        let Some((kind, place)) = text.split_once(':').filter(|(_, place)| !place.is_empty())
        else {
            return wrong(format!("--engine {text:?}: expected KIND:WHERE"));
        };
        match kind {
            "embedded" => Ok(Self::Embedded(place.into())),
            "vllm" => Ok(Self::Vllm(place.into())),
            "sglang" => Ok(Self::Sglang(place.into())),
            "scripted" => Ok(Self::Scripted(place.into())),
            later if KINDS_LATER.contains(&later) => {
                wrong(format!("--engine {text:?}: kind {kind} does not exist yet"))
            }
            _ => wrong(format!("--engine {text:?}: unknown kind {kind:?}")),
        }
    }

    /// The tokenizer's folder when none is named.
    fn tokenizer(&self) -> Result<&Path, CliError> {
        match self {
            Self::Embedded(folder) => Ok(folder),
            Self::Vllm(_) | Self::Sglang(_) => Err(CliError::usage(
                "the tokenizer of a server's model must be here, because prompts are sent as tokens",
                "add --tokenizer DIR, a folder with tokenizer.json and chat template",
            )),
            Self::Scripted(_) => Err(CliError::usage(
                "a scripted engine has no tokenizer of its own",
                "add --tokenizer DIR, a folder with tokenizer.json and chat template",
            )),
        }
    }

    async fn start(
        &self,
        codec: &Arc<Codec>,
        arguments: &Arguments,
    ) -> Result<Arc<dyn Engine>, CliError> {
        let facts = Facts {
            context_tokens_max: arguments.context_tokens,
            vocabulary: codec.vocabulary(),
            policy_version: 0,
        };
        match self {
            Self::Vllm(url) => {
                let api = vllm::Api::default();
                let engine = vllm::Vllm::connect(Endpoint::new(url), facts, api).await;
                let engine = engine.map_err(|error| CliError::failed("the engine", error))?;
                Ok(Arc::new(engine))
            }
            Self::Sglang(url) => {
                let engine = Sglang::connect(Endpoint::new(url), facts).await;
                let engine = engine.map_err(|error| CliError::failed("the engine", error))?;
                Ok(Arc::new(engine))
            }
            Self::Embedded(folder) => {
                let weights = Arc::new(policy::load_weights(folder, codec)?);
                let source = PolicySource {
                    folder: folder.clone(),
                    threads: arguments.threads.max(1),
                };
                Ok(policy::start_engine(&source, codec, weights, 0)?)
            }
            Self::Scripted(file) => {
                let script = Replay::load(file)
                    .map_err(|error| CliError::failed("the scripted engine", error))?;
                Ok(Arc::new(Scripted::new(
                    &file.display().to_string(),
                    Arc::new(script),
                    teacher::voice(codec),
                    teacher::CONTEXT_TOKENS_MAX,
                    codec.vocabulary(),
                )))
            }
        }
    }
}

/// Runs the command until Ctrl-C.
pub(crate) async fn run(arguments: Arguments, json: bool) -> Result<(), CliError> {
    let display = Display::new(json);
    let (cancel, _watcher) = super::interrupts();
    let kind = Kind::parse(&arguments.engine)?;
    let folder = match &arguments.tokenizer {
        Some(folder) => folder,
        None => kind.tokenizer()?,
    };
    let codec = policy::load_codec(folder)?;
    let engine = kind.start(&codec, &arguments).await?;
    let rules = match &arguments.redact {
        Some(file) => recipe::load_redaction(file)?,
        None => ledger::RedactionSettings::default(),
    };
    let options = recipe::ledger_options(&rules, "--redact")?;
    let ledger = Ledger::create_with(&arguments.run, options)
        .map_err(|error| CliError::failed(format!("run {}", arguments.run.display()), error))?;
    let token = match std::env::var(TOKEN_VARIABLE) {
        Ok(token) => token,
        Err(_) => random_token()?,
    };
    let config = gateway::Config {
        listen: vec![Listen::Tcp(arguments.listen)],
        admin: Some(Admin {
            listen: arguments.admin,
            token: token.clone(),
        }),
        ..gateway::Config::default()
    };
    let gateway = match Gateway::start(config, engine, Arc::clone(&codec), ledger.clone()).await {
        Ok(gateway) => gateway,
        Err(error) => {
            remove_empty(ledger, &arguments.run).await;
            return Err(CliError::failed("the gateway could not start", error));
        }
    };
    announce(&display, &gateway, &token, &codec, &arguments.run);
    cancel.cancelled().await;
    display.line("draining: calls in flight may end, new ones are refused");
    gateway.shutdown(DRAIN).await;
    drop(gateway);
    let closed = close_open_rollouts(&ledger).await?;
    ledger
        .close()
        .await
        .map_err(|error| CliError::failed("the ledger could not be closed", error))?;
    let run = arguments.run.display();
    let open = match closed {
        0 => String::new(),
        closed => format!(" ({closed} rollouts were open and are recorded as interrupted)"),
    };
    Err(CliError::Interrupted {
        resume: format!("what was captured is in {run}{open}; see it with: espalier inspect {run}"),
    })
}

fn announce(display: &Display, gateway: &Gateway, token: &str, codec: &Codec, run: &Path) {
    let (mut base, mut admin) = (String::new(), String::new());
    for address in gateway.local_addrs() {
        match address {
            LocalAddr::Tcp(address) => base = format!("http://{address}"),
            LocalAddr::Admin(address) => admin = format!("http://{address}"),
            LocalAddr::Unix(_) => {}
        }
    }
    display.json(&serde_json::json!({
        "base_url": base, "admin_url": admin, "admin_token": token,
        "continuation": codec.mode().name(), "run": run,
    }));
    display.line(&format!("harnesses   {base}/r/KEY/v1   (Chat Completions)"));
    display.line(&format!("admin       {admin}"));
    display.line(&format!("token       {token}"));
    display.line(&format!("captured in {}", run.display()));
    if let codec::Mode::ReEncode { reason } = codec.mode() {
        display.line(&format!(
            "warning     prompts do not continue exactly: {reason}"
        ));
    }
    display.line(&format!(
        "open a rollout: curl -s -X POST -H 'Authorization: Bearer {token}' {admin}/v1/rollouts"
    ));
    display.line("Ctrl-C drains and ends");
}

/// 32 random hexadecimal digits.
fn random_token() -> Result<String, CliError> {
    let mut bytes = [0; 16];
    getrandom::fill(&mut bytes).map_err(|error| {
        CliError::plain(
            format!("no random bytes for the admin token: {error}"),
            format!("set {TOKEN_VARIABLE} to at least 16 characters"),
        )
    })?;
    Ok(bytes.iter().map(|byte| format!("{byte:02x}")).collect())
}

/// Every started rollout ends in exactly one disposition (I9), also those that nobody closed.
async fn close_open_rollouts(ledger: &Ledger) -> Result<usize, CliError> {
    let failed = |error| CliError::failed("closing what was open", error);
    let open: Vec<_> = ledger
        .rollouts(&[])
        .map_err(failed)?
        .into_iter()
        .filter(|rollout| rollout.disposition.is_none())
        .collect();
    let count = open.len();
    for mut rollout in open {
        let calls = ledger.calls(&rollout.spec.id).map_err(failed)?.len();
        rollout.calls = u32::try_from(calls).unwrap_or(u32::MAX);
        rollout.disposition = Some(Disposition::Discard {
            fault: Fault::Interrupted,
            reason: "the gateway was stopped while this was open".to_owned(),
        });
        ledger.put_rollout(rollout).await.map_err(failed)?;
    }
    Ok(count)
}

/// A run that never began leaves no directory behind, so that the same command works once the
/// port is free.
async fn remove_empty(ledger: Ledger, run: &Path) {
    let file = ledger.file().to_owned();
    if ledger.close().await.is_ok() {
        let lock = run.join("ledger.lock");
        let side_files = ["-wal", "-shm"].map(|end| {
            let mut name = file.clone().into_os_string();
            name.push(end);
            PathBuf::from(name)
        });
        for path in [file, lock].iter().chain(&side_files) {
            // What is left is named by the next start: the directory has a ledger already.
            let _ = std::fs::remove_file(path);
        }
        let _ = std::fs::remove_dir(run);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_engine_is_a_kind_and_a_place() {
        let kind = |text| Kind::parse(text).map_err(|error| error.to_string());
        assert_eq!(kind("embedded:a/b:c"), Ok(Kind::Embedded("a/b:c".into())));
        assert_eq!(
            kind("scripted:x.jsonl"),
            Ok(Kind::Scripted("x.jsonl".into()))
        );
        let cases = [
            ("embedded", "expected KIND:WHERE"),
            ("embedded:", "expected KIND:WHERE"),
            ("tinker:http://host", "kind tinker does not exist yet"),
            ("magic:wand", "unknown kind \"magic\""),
        ];
        for (text, expected) in cases {
            let found = kind(text).unwrap_err();
            assert!(found.contains(expected), "{text} gave: {found}");
        }
    }

    #[test]
    fn tokens_are_long_and_differ() {
        let (one, two) = (random_token().unwrap(), random_token().unwrap());
        assert!(one.len() == 32 && one != two);
    }
}
