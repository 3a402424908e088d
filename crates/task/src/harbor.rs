//! Harbor task folders, schema 1.4 and older: `task.toml`, `instruction.md`, `environment/`,
//! `tests/`, optional `solution/` and `steps/`.
//!
//! The verifier is `bash /tests/test.sh` in the workspace; it leaves its score in
//! `/logs/verifier/reward.json` or `reward.txt` ([`Contract::RewardFile`]). The reference
//! solution is `bash /solution/solve.sh`, whose files come with the step that runs it. Unknown
//! keys are kept in the metadata, as Harbor ignores them.

mod stages;

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
};

use serde_json::Value;

use crate::{
    Collect, Contract, Environment, Format, Grading, HealthCheck, McpServer, McpTransport, Network,
    Payload, Step, Task, TaskError, TaskFile, Verifier, digest, dockerfile,
    fields::{Fields, id_of, wrong},
    toml_file, tree,
};

/// The file that marks a folder as a task; our own format has it too, with a key `format`.
pub(crate) const FILE: &str = "task.toml";
/// Where Harbor puts things.
pub(crate) const TESTS: &str = "/tests";
/// Where the image's own working folder is not known.
const WORKSPACE: &str = "/app";
const HOME: &str = "/root";
/// Verifier limit of the schema.
const TIMEOUT_S: f64 = 600.0;
const TIMEOUT_S_MAX: f64 = 86_400.0;
/// Limit of a collect hook of the schema.
const COLLECT_TIMEOUT_S: f64 = 60.0;
/// Names of the superuser.
const ROOT: [&str; 3] = ["root", "0", "0:0"];
const VERSIONS: [&str; 5] = ["1.0", "1.1", "1.2", "1.3", "1.4"];

/// Whether a folder with a `task.toml` is one of Harbor's.
pub(crate) fn is_task(folder: &Path) -> bool {
    folder.join("environment").is_dir()
        || folder.join("tests").is_dir()
        || tree::read_text(&folder.join(FILE)).is_ok_and(|text| {
            text.lines()
                .any(|line| line.starts_with("schema_version") || line.starts_with("version"))
        })
}

/// Reads one folder.
pub(crate) fn read_dir(folder: &Path) -> Result<Task, TaskError> {
    let file = folder.join(FILE);
    let text = tree::read_text(&file)?;
    let table: toml::Table = toml_file::parse(&text, &file)?;
    let value = serde_json::to_value(&table)
        .map_err(|error| wrong(&file, None, "the file", "TOML", error.to_string()))?;
    let mut top = Fields::of(value, &file, None)?;
    for key in ["schema_version", "version"] {
        let found = top.maybe_text(key)?;
        if let Some(version) = found.filter(|version| !VERSIONS.contains(&version.as_str())) {
            return Err(top.wrong(
                key,
                &format!("one of {}", VERSIONS.join(", ")),
                &version.into(),
            ));
        }
    }
    let mut metadata: BTreeMap<String, Value> = BTreeMap::new();
    let mut about = top.object("task")?;
    let folder_name = folder
        .file_name()
        .unwrap_or_default()
        .to_string_lossy()
        .into_owned();
    let name = match &mut about {
        Some(task) => task.maybe_text("name")?.unwrap_or(folder_name),
        None => folder_name,
    };
    let id = top.as_id("task.name", &id_of(&name))?;
    let mut notes = top.object("metadata")?;
    let family = match &mut notes {
        Some(notes) => notes.text_or("category", "harbor")?,
        None => "harbor".to_owned(),
    };
    metadata.insert("name".to_owned(), name.into());
    metadata.extend(about.map(Fields::rest).unwrap_or_default());
    metadata.extend(notes.map(Fields::rest).unwrap_or_default());

    let mut place = Environment::default();
    let mut image = environment(folder, &mut top, &mut place)?;
    let workspace = image
        .workdir
        .take()
        .unwrap_or_else(|| PathBuf::from(WORKSPACE));
    agent(&mut top, &mut place)?;
    place.artifacts = artifacts(&mut top, &mut place)?;
    if folder.join("trajectory.json").is_file() {
        place
            .refusals
            .push("it begins within a conversation (trajectory.json)".to_owned());
    }
    let verifier = verifier(folder, &file, &mut top, &mut place)?;
    let instruction = stages::read(folder, &file, &mut top, &verifier, &mut place)?;
    let solution = solution(folder, &mut top)?;
    metadata.extend(top.rest());
    let mut task = Task {
        id,
        family,
        instruction,
        files: image.files,
        workspace,
        home: PathBuf::from(HOME),
        verifier,
        solution,
        metadata,
        format: Format::Harbor,
        grading: Grading::default(),
        environment: place,
        digest: String::new(),
    };
    task.digest = digest::digest(&task);
    Ok(task)
}

fn agent(top: &mut Fields, place: &mut Environment) -> Result<(), TaskError> {
    let Some(mut agent) = top.object("agent")? else {
        return Ok(());
    };
    place.needs.agent_timeout_s = seconds(&mut agent, "timeout_sec")?;
    refuse_user(&mut agent, "the harness", place);
    if let Some(network) = network(&mut agent)? {
        place.network = network;
        place.network_said = true;
    }
    Ok(())
}

fn value_text(value: &Value) -> String {
    value
        .as_str()
        .map_or_else(|| value.to_string(), str::to_owned)
}

/// A limit in seconds that may be missing.
fn seconds(fields: &mut Fields, key: &str) -> Result<Option<f64>, TaskError> {
    match fields.number(key)? {
        Some(number) if number > 0.0 && number <= TIMEOUT_S_MAX => Ok(Some(number)),
        None => Ok(None),
        Some(number) => {
            let expected = format!("seconds, above 0 and at most {TIMEOUT_S_MAX}");
            Err(fields.wrong(key, &expected, &number.into()))
        }
    }
}

/// The network of a phase, `None` when it says nothing.
fn network(fields: &mut Fields) -> Result<Option<Network>, TaskError> {
    let hosts = fields.texts("allowed_hosts")?;
    let mode = fields.maybe_text("network_mode")?;
    let old = fields.flag("allow_internet")?;
    Ok(match mode.as_deref() {
        Some("public") => Some(Network::Public),
        Some("no-network") => Some(Network::None),
        Some("allowlist") => Some(Network::Allowlist { hosts }),
        Some(other) => {
            let expected = "public, no-network or allowlist";
            return Err(fields.wrong("network_mode", expected, &other.into()));
        }
        None if !hosts.is_empty() => {
            let expected = "network_mode = \"allowlist\" beside it";
            return Err(fields.wrong("allowed_hosts", expected, &hosts.into()));
        }
        None => old.map(|open| if open { Network::Public } else { Network::None }),
    })
}

/// Sizes such as `4G`, in MiB.
fn mebibytes(fields: &mut Fields, new: &str, old: &str) -> Result<Option<u64>, TaskError> {
    if let Some(size) = fields.whole(new, 1..=1 << 30)? {
        return Ok(Some(size));
    }
    let Some(text) = fields.maybe_text(old)? else {
        return Ok(None);
    };
    let expected = "a size such as 4G or 512M";
    let bare = text.trim().trim_end_matches(['b', 'B', 'i']);
    let factor = match bare.chars().last() {
        Some('G' | 'g') => 1024.0,
        Some('M' | 'm') => 1.0,
        Some('K' | 'k') => 1.0 / 1024.0,
        _ => return Err(fields.wrong(old, expected, &text.into())),
    };
    match bare[..bare.len() - 1].trim().parse::<f64>() {
        Ok(number) if number > 0.0 && number < 1e9 => Ok(Some((number * factor).ceil() as u64)),
        _ => Err(fields.wrong(old, expected, &text.into())),
    }
}

fn environment(
    folder: &Path,
    top: &mut Fields,
    place: &mut Environment,
) -> Result<dockerfile::Image, TaskError> {
    let build = folder.join("environment");
    let mut table = top.object("environment")?;
    let named = match &mut table {
        Some(table) => table.maybe_text("docker_image")?,
        None => None,
    };
    let mut image = if let Some(name) = named {
        place.refusals.push(format!(
            "the image {name} has to be pulled, and this kind of sandbox has no images"
        ));
        dockerfile::Image {
            base: Some(name),
            ..Default::default()
        }
    } else if build.join("Dockerfile").is_file() {
        dockerfile::read(&build)?
    } else {
        place
            .refusals
            .push("neither environment/Dockerfile nor environment.docker_image".to_owned());
        dockerfile::Image::default()
    };
    for name in ["docker-compose.yaml", "docker-compose.yml"] {
        if build.join(name).is_file() {
            place
                .refusals
                .push(format!("environment/{name} asks for several containers"));
        }
    }
    place.image = image.base.take();
    if let Some(user) = image
        .user
        .take()
        .filter(|user| !ROOT.contains(&user.as_str()))
    {
        place.refusals.push(format!(
            "its image runs as {user}; a task's folders belong to the sandbox's own user here"
        ));
    }
    place.requires = std::mem::take(&mut image.requires);
    place.refusals.append(&mut image.refusals);
    place.env = std::mem::take(&mut image.env);
    place.network = Network::Public;
    let Some(mut table) = table else {
        return Ok(image);
    };
    if let Some(network) = network(&mut table)? {
        place.network = network;
        place.network_said = true;
    }
    match table.text_or("os", "linux")?.as_str() {
        "linux" => {}
        "windows" => place.refusals.push("it needs Windows".to_owned()),
        other => return Err(table.wrong("os", "linux or windows", &other.into())),
    }
    if let Some(workdir) = table.maybe_text("workdir")? {
        if !workdir.starts_with('/') {
            return Err(table.wrong("workdir", "an absolute path", &workdir.into()));
        }
        image.workdir = Some(workdir.into());
    }
    place.needs.cpus = table.number("cpus")?;
    place.needs.memory_mb = mebibytes(&mut table, "memory_mb", "memory")?;
    place.needs.storage_mb = mebibytes(&mut table, "storage_mb", "storage")?;
    place.needs.gpus = table.whole("gpus", 0..=1024)?.map(|count| count as u32);
    if place.needs.gpus.is_some_and(|count| count > 0) {
        place
            .refusals
            .push("it needs graphics processors".to_owned());
    }
    if table.has("tpu") {
        place.refusals.push("it needs tensor processors".to_owned());
    }
    place.env.extend(table.environment("env")?);
    let env = std::mem::take(&mut place.env);
    place.env = of_the_host(env, "environment variable", place);
    if table.has("skills_dir") {
        place
            .refusals
            .push("it brings skills for the harness, which no profile takes yet".to_owned());
    }
    for server in table.objects("mcp_servers")? {
        let mut server = mcp_server(server)?;
        let env = std::mem::take(&mut server.env);
        server.env = of_the_host(env, "variable of a tool server", place);
        let headers = std::mem::take(&mut server.headers);
        server.headers = of_the_host(headers, "header of a tool server", place);
        place.mcp_servers.push(server);
    }
    if let Some(check) = table.object("healthcheck")? {
        place.healthcheck = Some(healthcheck(check)?);
    }
    Ok(image)
}

fn mcp_server(mut fields: Fields) -> Result<McpServer, TaskError> {
    let name = fields.text("name")?;
    let env = fields.environment("env")?;
    let headers = fields.environment("headers")?;
    let transport = match fields.text_or("transport", "sse")?.as_str() {
        "sse" => McpTransport::Sse {
            url: fields.text("url")?,
        },
        "streamable-http" | "http" => McpTransport::StreamableHttp {
            url: fields.text("url")?,
        },
        "stdio" => McpTransport::Stdio {
            command: fields.text("command")?,
            args: fields.texts("args")?,
        },
        other => {
            return Err(fields.wrong("transport", "sse, streamable-http or stdio", &other.into()));
        }
    };
    Ok(McpServer {
        name,
        transport,
        env,
        headers,
        start: None,
    })
}

fn healthcheck(mut fields: Fields) -> Result<HealthCheck, TaskError> {
    Ok(HealthCheck {
        command: fields.text("command")?,
        interval_s: seconds(&mut fields, "interval_sec")?.unwrap_or(5.0),
        timeout_s: seconds(&mut fields, "timeout_sec")?.unwrap_or(30.0),
        start_period_s: fields.number("start_period_sec")?.unwrap_or(0.0),
        retries: fields.whole("retries", 1..=1000)?.unwrap_or(3) as u32,
    })
}

/// Paths to keep: texts, or objects with a `source`.
fn artifacts(top: &mut Fields, place: &mut Environment) -> Result<Vec<String>, TaskError> {
    let mut found = Vec::new();
    for (index, item) in top.list("artifacts")?.into_iter().enumerate() {
        let source = match &item {
            Value::String(text) => Some(text.clone()),
            Value::Object(item) => {
                let named = |key: &str| item.get(key).and_then(Value::as_str);
                if named("service").is_some_and(|service| service != "main") {
                    place
                        .refusals
                        .push("an artifact lies in another container".to_owned());
                }
                let exclude = item.get("exclude").and_then(Value::as_array);
                if exclude.is_some_and(|patterns| !patterns.is_empty()) {
                    place
                        .refusals
                        .push("an artifact excludes some of its files".to_owned());
                }
                named("source").map(str::to_owned)
            }
            _ => None,
        };
        match source.filter(|text| !text.is_empty()) {
            Some(text) => found.push(text),
            None => {
                let expected = "a path, or a table with a source";
                return Err(top.wrong(&format!("artifacts[{index}]"), expected, &item));
            }
        }
    }
    Ok(found)
}

fn verifier(
    folder: &Path,
    file: &Path,
    top: &mut Fields,
    place: &mut Environment,
) -> Result<Verifier, TaskError> {
    let mut timeout_s = TIMEOUT_S;
    let mut env = BTreeMap::new();
    if let Some(mut table) = top.object("verifier")? {
        timeout_s = seconds(&mut table, "timeout_sec")?.unwrap_or(TIMEOUT_S);
        env = of_the_host(table.environment("env")?, "verifier variable", place);
        refuse_user(&mut table, "the verifier", place);
        let own = table.object("environment")?;
        let mode = table.text_or(
            "environment_mode",
            if own.is_some() { "separate" } else { "shared" },
        )?;
        match mode.as_str() {
            "shared" => {}
            "separate" => place.verifier_apart = true,
            other => {
                return Err(table.wrong("environment_mode", "shared or separate", &other.into()));
            }
        }
        if let Some(mut own) = own.filter(|_| place.verifier_apart) {
            env.extend(verifier_place(folder, &mut own, place)?);
        }
        if let Some(network) = network(&mut table)?
            && network != Network::None
        {
            place
                .refusals
                .push("the verifier wants the network; it has none here".to_owned());
        }
        for mut hook in table.objects("collect")? {
            let service = hook.text_or("service", "main")?;
            if service != "main" {
                place
                    .refusals
                    .push(format!("a collect hook runs in the container {service}"));
            }
            refuse_user(&mut hook, "a collect hook", place);
            place.collect.push(Collect {
                command: hook.text("command")?,
                timeout_s: seconds(&mut hook, "timeout_sec")?.unwrap_or(COLLECT_TIMEOUT_S),
            });
        }
    }
    let files = tree::read(&folder.join("tests"))?;
    let steps = folder.join("steps").is_dir();
    if !steps && !files.iter().any(|file| file.path == Path::new("test.sh")) {
        return Err(TaskError::MissingVerifier {
            folder: file.parent().unwrap_or(folder).to_path_buf(),
            expected: "tests/test.sh".to_owned(),
        });
    }
    Ok(Verifier {
        files,
        folder: PathBuf::from(TESTS),
        argv: ["bash", "/tests/test.sh"].map(str::to_owned).to_vec(),
        cwd: None,
        timeout_s: timeout_s.ceil() as u64,
        contract: Contract::RewardFile,
        payload: Payload::None,
        env,
    })
}

/// The place of a verifier that is apart: the sandbox's plain system stands in for a known image;
/// what only an image could bring is a refusal.
fn verifier_place(
    folder: &Path,
    own: &mut Fields,
    place: &mut Environment,
) -> Result<BTreeMap<String, String>, TaskError> {
    if let Some(name) = own.maybe_text("docker_image")? {
        place.refusals.push(format!(
            "the verifier's image {name} has to be pulled, and this kind of sandbox has no images"
        ));
    }
    let build = folder.join("tests");
    if build.join("Dockerfile").is_file() {
        let image = dockerfile::read(&build)?;
        place.requires.extend(image.requires);
        place.refusals.extend(image.refusals);
        if !image.files.is_empty() {
            place
                .refusals
                .push("the verifier's image brings files of its own".to_owned());
        }
    }
    if own.has("mcp_servers") || own.has("healthcheck") {
        place
            .refusals
            .push("the verifier's own place has servers or a health check".to_owned());
    }
    let env = own.environment("env")?;
    Ok(of_the_host(env, "verifier variable", place))
}

/// Variables with their defaults; those that want a value of the host are refused, because the
/// host's variables are not the task's to read.
fn of_the_host(
    mut env: BTreeMap<String, String>,
    what: &str,
    place: &mut Environment,
) -> BTreeMap<String, String> {
    for (name, value) in &mut env {
        let said = dockerfile::expand(value, |_| None);
        if *value != said && said.is_empty() {
            place
                .refusals
                .push(format!("{what} {name} wants {value} of the host"));
        }
        *value = said;
    }
    env
}

/// Everything of a task runs as the sandbox's own user, who may write what the task may write: being
/// root changes nothing there. Anybody else could not write the task's folders (reward and logs
/// included), which belong to that user: refused.
fn refuse_user(fields: &mut Fields, who: &str, place: &mut Environment) {
    let user = fields.any("user").map(|user| value_text(&user));
    if let Some(user) = user.filter(|user| !ROOT.contains(&user.as_str())) {
        place.refusals.push(format!(
            "{who} is to run as {user}; a task's folders belong to the sandbox's own user here"
        ));
    }
}

/// The reference solution as steps: its files, then the script.
fn solution(folder: &Path, top: &mut Fields) -> Result<Vec<Step>, TaskError> {
    let env = match top.object("solution")? {
        Some(mut table) => table.environment("env")?,
        None => BTreeMap::new(),
    };
    Ok(script_steps(
        tree::read(&folder.join("solution"))?,
        "solve.sh",
        &env,
    ))
}

/// Steps that put a solution's files into `/solution` and run its script in the workspace. Empty
/// without the script, or with a file that is no text (a step writes text).
pub(crate) fn script_steps(
    files: Vec<TaskFile>,
    script: &str,
    env: &BTreeMap<String, String>,
) -> Vec<Step> {
    if !files.iter().any(|file| file.path == Path::new(script)) {
        return Vec::new();
    }
    let mut steps = Vec::new();
    for file in files {
        let Ok(text) = String::from_utf8(file.content) else {
            return Vec::new();
        };
        steps.push(Step::Write(Path::new("/solution").join(file.path), text));
    }
    let quoted = |text: &str| format!("'{}'", text.replace('\'', "'\\''"));
    let env: String = env
        .iter()
        .map(|(name, value)| format!("{name}={} ", quoted(value)))
        .collect();
    steps.push(Step::Bash(format!("{env}bash /solution/{script}")));
    steps
}
