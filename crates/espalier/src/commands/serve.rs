//! `espalier serve`: the gateway alone, as the capture layer of somebody else's orchestrator.

mod engines;

use std::{
    collections::BTreeMap,
    net::SocketAddr,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use codec::Codec;
use gateway::{Admin, Gateway, Listen, LocalAddr};
use ledger::Ledger;
use record::{Disposition, Fault, GroupId, RolloutId, RolloutSpec, TaskId};

use crate::{display::Display, error::CliError, recipe, telemetry::Telemetry};

/// How long calls in flight may take to end after Ctrl-C.
const DRAIN: Duration = Duration::from_secs(30);
/// The environment variable that may hold the admin token.
const TOKEN_VARIABLE: &str = "ESPALIER_ADMIN_TOKEN";

/// Serve an engine to any harness and capture every call.
///
/// Rollouts are opened through the admin API; each gets a base URL of its own. Ctrl-C lets calls
/// in flight end and closes what is open. Several engines serve as one: a rollout stays with the
/// engine of its first call, and one that does not answer is left out until it does.
///
/// Example: espalier serve --engine embedded:policy --run runs/captured
///
/// To try a harness on a model behind somebody's API (text only, so nothing is trainable):
/// espalier serve --engine openai:https://HOST/v1 --engine-key-env API_KEY --model NAME --open try
#[derive(Debug, clap::Args)]
pub(crate) struct Arguments {
    /// What answers: embedded:DIR (Hugging Face folder), vllm:URL, sglang:URL, openai:URL (text
    /// only; the URL ends before /chat/completions), or scripted:FILE (replies as JSON lines).
    /// May be given several times.
    #[arg(long, value_name = "KIND:WHERE", required = true)]
    engine: Vec<String>,
    /// Environment variable that holds the key of the engines behind a URL.
    #[arg(long, value_name = "VARIABLE")]
    engine_key_env: Option<String>,
    /// PEM file with the certificates that engines behind https are trusted by [default: the
    /// well-known authorities].
    #[arg(long, value_name = "FILE")]
    engine_authorities: Option<PathBuf>,
    /// The model that an openai: engine is asked for [default: the only one that it has].
    #[arg(long, value_name = "NAME")]
    model: Option<String>,
    /// Open a rollout of this name at once, and say its address.
    #[arg(long, value_name = "ROLLOUT")]
    open: Option<String>,
    /// Folder with tokenizer and chat template [default: the folder of the embedded engine; for
    /// openai: engines the built-in one, whose counts of tokens are not the server's].
    #[arg(long, value_name = "DIR")]
    tokenizer: Option<PathBuf>,
    /// How earlier turns of the model are shown to it: as-generated, reasoning included, which
    /// never forks; or as-template, as the chat template shows them in deployment.
    #[arg(long, value_enum, default_value_t = History::AsGenerated)]
    history: History,
    /// What the chat template is told of thinking (its variable enable_thinking) [default: nothing].
    #[arg(long, value_name = "true|false")]
    thinking: Option<bool>,
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
    /// counts when it is lower [default: 131072; for openai: engines the server's own].
    #[arg(long, value_name = "TOKENS")]
    context_tokens: Option<u32>,
    /// Rules for what must not be written down: a TOML file with the keys of a recipe's `redact` table.
    #[arg(long, value_name = "FILE")]
    redact: Option<PathBuf>,
    /// OpenTelemetry collector (OTLP over HTTP) that gets a span per call; without text and keys.
    #[arg(long, value_name = "URL")]
    otlp: Option<String>,
    /// Threads of the embedded engine.
    #[arg(long, default_value_t = 2)]
    threads: usize,
    /// Where the embedded engine makes its products: cpu or cuda.
    #[arg(long, default_value = "cpu", value_name = "DEVICE")]
    device: String,
}

/// How earlier turns are shown. The comments of [`codec::History`] say more.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum History {
    AsGenerated,
    AsTemplate,
}

/// Runs the command until Ctrl-C.
pub(crate) async fn run(arguments: Arguments, json: bool) -> Result<(), CliError> {
    let display = Display::new(json);
    let (cancel, _watcher) = super::interrupts();
    let rules = match &arguments.redact {
        Some(file) => recipe::load_redaction(file)?,
        None => ledger::RedactionSettings::default(),
    };
    let options = recipe::ledger_options(&rules, "--redact")?;
    let (codec, engine) = engines::start(&arguments).await?;
    let ledger = Ledger::create_with(&arguments.run, options)
        .map_err(|error| CliError::failed(format!("run {}", arguments.run.display()), error))?;
    let token = match std::env::var(TOKEN_VARIABLE) {
        Ok(token) => token,
        Err(_) => random_token()?,
    };
    let telemetry = Telemetry::start(arguments.otlp.as_deref())?;
    let config = gateway::Config {
        listen: vec![Listen::Tcp(arguments.listen)],
        admin: Some(Admin {
            listen: arguments.admin,
            token: token.clone().into(),
        }),
        spans: telemetry.on(),
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
    if let Some(name) = &arguments.open {
        open(&display, &gateway, name).await?;
    }
    cancel.cancelled().await;
    display.line("draining: calls in flight may end, new ones are refused");
    gateway.shutdown(DRAIN).await;
    drop(gateway);
    // Its threads wait for the network: not on the runtime.
    let _ = tokio::task::spawn_blocking(move || telemetry.end()).await;
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
    display.line(&format!(
        "harnesses   {base}/r/KEY/v1   (Chat Completions, Responses, Messages; Gemini: {base}/r/KEY)"
    ));
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

/// Opens a rollout as the admin API would, for whoever wants to try a harness by hand.
async fn open(display: &Display, gateway: &Gateway, name: &str) -> Result<(), CliError> {
    let wrong = |what: String| CliError::usage(what, "a name such as --open try-1");
    let id = RolloutId::new(name).map_err(|error| wrong(error.to_string()))?;
    let task = TaskId::new(name).map_err(|error| wrong(error.to_string()))?;
    let group = GroupId::new(name).map_err(|error| wrong(error.to_string()))?;
    let spec = RolloutSpec {
        id,
        task,
        group,
        harness: "unknown".to_owned(),
        labels: BTreeMap::new(),
        seed: 0,
    };
    let access = gateway
        .open_noted(gateway::Open::new(spec))
        .await
        .map_err(|error| CliError::failed("opening a rollout", error))?;
    let base = gateway
        .local_addrs()
        .iter()
        .find_map(|address| match address {
            LocalAddr::Tcp(address) => Some(format!("http://{address}")),
            _ => None,
        });
    let base = format!("{}{}", base.unwrap_or_default(), access.path);
    display.json(
        &serde_json::json!({"rollout": name, "base_url": format!("{base}/v1"), "key": access.key}),
    );
    display.line(&format!("rollout {name}: OPENAI_BASE_URL={base}/v1"));
    display.line(&format!("rollout {name}: ANTHROPIC_BASE_URL={base}"));
    display.line(&format!("rollout {name}: GOOGLE_GEMINI_BASE_URL={base}"));
    display.line(&format!(
        "rollout {name}: any of the API keys = {}",
        access.key
    ));
    Ok(())
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
    fn tokens_are_long_and_differ() {
        let (one, two) = (random_token().unwrap(), random_token().unwrap());
        assert!(one.len() == 32 && one != two);
    }
}
