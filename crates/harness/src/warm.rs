//! Warms a fresh bundle: one run of a harness in a sandbox, whose compiled code goes into the
//! bundle, so that no rollout compiles the same code again.
//!
//! It happens in a sandbox because compile caches remember the path of each file and the user
//! that made them, and both must be those of rollouts.

use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
    time::Duration,
};

use sandbox::{
    Exec, Exit, Limits, LocalConfig, LocalProvider, Mount, Provider, SandboxError, Spec,
};

use crate::{Profile, template};

/// Folder in the bundle with compiled code.
pub(crate) const CACHE: &str = "compile-cache";
/// Where it grows in the sandbox.
const GROWS: &str = "/home/agent/compile-cache";
const WORKSPACE: &str = "/workspace";
const HOME: &str = "/home/agent";
/// One run.
const RUN_S: u64 = 120;
/// All of it.
const BYTES_MAX: u64 = 256 << 20;

/// Why a bundle stays cold. It works all the same, only slower.
#[derive(Debug, thiserror::Error)]
pub(crate) enum WarmError {
    #[error(transparent)]
    Sandbox(#[from] SandboxError),
    #[error("{0}")]
    Render(String),
    #[error("the run that was to warm it ended with {exit:?}: {tail}")]
    Run { exit: Exit, tail: String },
    #[error("{path}: {source}")]
    Write {
        path: PathBuf,
        source: std::io::Error,
    },
}

/// Runs `warm` of the profile with the bundle in its final place, and keeps what was compiled.
/// Gives the number of files.
pub(crate) async fn warm(
    profile: &Profile,
    folder: &Path,
    bundle: &Path,
    node: &str,
    python: &str,
) -> Result<usize, WarmError> {
    let bundle_text = bundle.to_string_lossy();
    let variables = template::Variables {
        instruction: "",
        base_url: "http://127.0.0.1:9",
        api_key: "none",
        model: "none",
        workspace: WORKSPACE,
        home: HOME,
        bundle: &bundle_text,
        node,
        python,
        guest: sandbox::GUEST_PATH,
        version: &profile.version,
        dialect: crate::word(profile.dialect),
        context_tokens: 1 << 17,
        reply_tokens_max: 4096,
        tool_servers: &[],
    };
    let render = |source: &String| template::render(source, &variables).map_err(WarmError::Render);
    let argv = profile.warm.iter().map(render).collect::<Result<_, _>>()?;
    let mut env = BTreeMap::new();
    for (key, source) in &profile.env {
        env.insert(key.clone(), render(source)?);
    }
    env.insert("NODE_COMPILE_CACHE".to_owned(), GROWS.to_owned());
    let provider = LocalProvider::start(LocalConfig::default()).await?;
    let done = run(&provider, folder, bundle, argv, env).await;
    provider.close().await;
    done
}

async fn run(
    provider: &LocalProvider,
    folder: &Path,
    bundle: &Path,
    argv: Vec<String>,
    env: BTreeMap<String, String>,
) -> Result<usize, WarmError> {
    let sandbox = provider
        .create(Spec {
            name: format!("warm-{}", std::process::id()),
            limits: Limits {
                deadline_s: RUN_S + 60,
                ..Limits::default()
            },
            image: None,
            files: Vec::new(),
            forwards: Vec::new(),
            mounts: vec![Mount {
                source: folder.to_owned(),
                target: bundle.to_owned(),
            }],
            workspace: WORKSPACE.into(),
            home: HOME.into(),
            env: BTreeMap::new(),
            gateway_socket: None,
            gateway_port: 0,
        })
        .await?;
    let output = sandbox
        .exec(Exec {
            argv,
            cwd: None,
            env,
            stdin: Vec::new(),
            timeout: Duration::from_secs(RUN_S),
            output_bytes_max: 4096,
            end_background: true,
            user: None,
        })
        .await?;
    if output.exit != Exit::Code(0) {
        sandbox.destroy().await;
        return Err(WarmError::Run {
            exit: output.exit,
            tail: String::from_utf8_lossy(&output.stderr).trim().to_owned(),
        });
    }
    let files = sandbox.download(GROWS.into(), BYTES_MAX).await?;
    sandbox.destroy().await;
    let count = files.len();
    for file in files {
        let Ok(inside) = file.path.strip_prefix(GROWS) else {
            continue;
        };
        let path = folder.join(CACHE).join(inside);
        let write = || {
            if let Some(parent) = path.parent() {
                fs::create_dir_all(parent)?;
            }
            fs::write(&path, &file.content)
        };
        write().map_err(|source| WarmError::Write {
            path: path.clone(),
            source,
        })?;
    }
    Ok(count)
}
