//! Launches of profiles, rendered.
#![allow(
    clippy::unwrap_used,
    clippy::panic,
    clippy::print_stdout,
    reason = "helpers of tests"
)]

use std::{fmt::Write, path::PathBuf, time::Duration};

use harness::{Installed, Launch, LaunchContext, Profile, ToolServer};
use sandbox::Mount;

fn installed(name: &str) -> Installed {
    let profile = Profile::load(None, name).unwrap();
    let bundle = PathBuf::from("/opt/harness").join(name);
    Installed {
        digest: "0".repeat(64),
        node: "/usr/bin/node".into(),
        python: "/usr/bin/python3".into(),
        mounts: vec![Mount {
            source: "/cache".into(),
            target: bundle.clone(),
        }],
        bundle,
        profile,
    }
}

fn context(instruction: &str) -> LaunchContext {
    LaunchContext {
        instruction: instruction.into(),
        base_url: "http://127.0.0.1:8080/r/key-1/".into(),
        api_key: "key-1".into(),
        model: "policy".into(),
        workspace: "/workspace".into(),
        home: "/home/agent".into(),
        context_tokens: 4096,
        reply_tokens_max: 512,
        timeout: Duration::from_secs(90),
        tool_servers: Vec::new(),
    }
}

fn show(launch: &Launch) -> String {
    let mut text = String::new();
    let exec = &launch.exec;
    for argument in &exec.argv {
        writeln!(text, "argv {argument}").unwrap();
    }
    writeln!(text, "cwd {}", exec.cwd.as_ref().unwrap().display()).unwrap();
    writeln!(text, "stdin {:?}", String::from_utf8_lossy(&exec.stdin)).unwrap();
    for (key, value) in &exec.env {
        writeln!(text, "env {key}={value}").unwrap();
    }
    writeln!(
        text,
        "timeout {:?}, output {}",
        exec.timeout, exec.output_bytes_max
    )
    .unwrap();
    for file in &launch.files {
        writeln!(text, "file {} {:o}", file.path.display(), file.mode).unwrap();
        text.push_str(&String::from_utf8_lossy(&file.content));
    }
    for mount in &launch.mounts {
        writeln!(
            text,
            "mount {} at {}",
            mount.source.display(),
            mount.target.display()
        )
        .unwrap();
    }
    text
}

#[test]
fn react() {
    let launch = installed("react")
        .launch(&context("count \"lines\"\nof a.txt"))
        .unwrap();
    insta::assert_snapshot!(show(&launch), @r##"
argv /run/espalier/guest
argv react
argv --base-url
argv http://127.0.0.1:8080/r/key-1/v1
argv --api-key
argv key-1
argv --model
argv policy
argv --turns-max
argv 200
argv --
argv count "lines"
of a.txt
cwd /workspace
stdin ""
timeout 90s, output 65536
mount /cache at /opt/harness/react
"##);
}

#[test]
fn pi() {
    let launch = installed("pi")
        .launch(&context("@notes --help \"x\""))
        .unwrap();
    insta::assert_snapshot!(show(&launch), @r##"
argv /usr/bin/node
argv /opt/harness/pi/node_modules/@mariozechner/pi-coding-agent/dist/cli.js
argv -p
argv --mode
argv json
argv --no-session
argv --provider
argv espalier
argv --model
argv policy
cwd /workspace
stdin "@notes --help \"x\""
env CI=1
env NODE_COMPILE_CACHE=/opt/harness/pi/compile-cache
env NO_COLOR=1
env NO_PROXY=127.0.0.1,localhost
env PI_OFFLINE=1
env PI_SKIP_VERSION_CHECK=1
env PI_TELEMETRY=0
env TERM=dumb
timeout 90s, output 65536
file /home/agent/.pi/agent/models.json 600
{
  "providers": {
    "espalier": {
      "baseUrl": "http://127.0.0.1:8080/r/key-1/v1",
      "api": "openai-completions",
      "apiKey": "key-1",
      "models": [
        {
          "id": "policy",
          "name": "policy",
          "reasoning": false,
          "input": ["text"],
          "contextWindow": 4096,
          "maxTokens": 512,
          "cost": {"input": 0, "output": 0, "cacheRead": 0, "cacheWrite": 0}
        }
      ]
    }
  }
}
file /home/agent/.pi/agent/settings.json 600
{
  "compaction": {
    "enabled": true,
    "reserveTokens": 512,
    "keepRecentTokens": 1024
  }
}
mount /cache at /opt/harness/pi
"##);
}

/// Every profile in every dialect, with values that break careless quoting: a file that ends in
/// `.json` is JSON, one in `.toml` is TOML, and the address of the gateway is in the launch.
#[test]
fn every_profile_renders_in_every_dialect_whatever_the_values() {
    for name in harness::names(None) {
        let mut profile = Profile::load(None, &name).unwrap();
        for dialect in profile.dialects.clone() {
            profile.speak(dialect);
            let mut installed = installed(&name);
            installed.profile = profile.clone();
            let mut context = context("x");
            context.model = "a\"b\\c{{ d }}".into();
            let launch = installed.launch(&context).unwrap();
            for file in &launch.files {
                let text = std::str::from_utf8(&file.content).unwrap();
                match file.path.extension().and_then(|end| end.to_str()) {
                    Some("json") => drop(serde_json::from_str::<serde_json::Value>(text).unwrap()),
                    Some("toml") => drop(text.parse::<toml::Table>().unwrap()),
                    _ => {}
                }
            }
            let shown = show(&launch);
            assert!(
                shown.contains("http://127.0.0.1:8080/r/key-1"),
                "{name} does not learn where the gateway is:\n{shown}"
            );
        }
    }
}

#[test]
fn what_cannot_be_launched_is_refused_with_the_place() {
    let mut react = installed("react");
    react.profile.stdin = String::new();
    react.profile.argv = vec!["x".into(), "{{ instruction }}".into()];
    let refused = |instruction: &str| react.launch(&context(instruction)).unwrap_err().to_string();
    insta::assert_snapshot!(
        [refused("a\0b"), refused(&"x".repeat(131_072))].join("\n"),
        @r##"
harness react: launch.argv[1]: has a NUL byte, which no argument can carry; give it on stdin
harness react: launch.argv[1]: 131072 bytes; the kernel takes at most 131071 in one argument; give it on stdin
"##
    );
    assert!(react.launch(&context(&"x".repeat(131_071))).is_ok());

    let mut pi = installed("pi");
    pi.profile
        .files
        .insert("a.json".into(), "{{ model }}".into());
    let text = pi.launch(&context("x")).unwrap_err().to_string();
    assert!(
        text.contains("launch.files.\"a.json\": the rendered text is not JSON"),
        "{text}"
    );
}

#[test]
fn the_smaller_time_limit_wins() {
    let mut react = installed("react");
    react.profile.run_s = 7;
    let launch = react.launch(&context("x")).unwrap();
    assert_eq!(launch.exec.timeout, Duration::from_secs(7));
}

fn servers() -> Vec<ToolServer> {
    let env = [("KEY".to_owned(), "a \"b\"".to_owned())];
    vec![
        ToolServer {
            name: "near".into(),
            kind: "stdio".into(),
            command: "/bin/serve".into(),
            args: vec!["--x".into(), "y z".into()],
            env: env.clone().into(),
            ..ToolServer::default()
        },
        ToolServer {
            name: "far-away".into(),
            kind: "http".into(),
            url: "http://127.0.0.1:9/mcp".into(),
            headers: env.into(),
            ..ToolServer::default()
        },
    ]
}

/// Every profile that says how its harness is told of tool servers makes files that can be read,
/// with everything in them; the others refuse.
#[test]
fn harnesses_are_told_of_tool_servers_or_refuse() {
    let mut told = Vec::new();
    for name in harness::names(None) {
        let installed = installed(&name);
        let can = installed.profile.tool_servers.is_some();
        let plain = installed.launch(&context("do it")).unwrap();
        let mut context = context("do it");
        context.tool_servers = servers();
        let launch = match installed.launch(&context) {
            Ok(launch) => launch,
            Err(error) => {
                assert!(!can, "{name}: {error}");
                let error = error.to_string();
                assert!(
                    error.contains("cannot be told of the tool server `near`"),
                    "{error}"
                );
                continue;
            }
        };
        assert!(can, "{name}");
        assert!(show(&plain).len() < show(&launch).len(), "{name}");
        let changed = launch
            .files
            .iter()
            .find(|file| !plain.files.contains(file))
            .unwrap_or_else(|| panic!("{name}: no file says it"));
        let text = String::from_utf8(changed.content.clone()).unwrap();
        let is_toml = changed.path.extension().is_some_and(|end| end == "toml");
        let value: serde_json::Value = if is_toml {
            toml::from_str(&text).unwrap_or_else(|error| panic!("{name}: {error}\n{text}"))
        } else {
            serde_json::from_str(&text).unwrap()
        };
        let found = value.to_string();
        for word in [
            "\"near\"",
            "\"far-away\"",
            "\"/bin/serve\"",
            "\"y z\"",
            "http://127.0.0.1:9/mcp",
            "\"KEY\":\"a \\\"b\\\"\"",
        ] {
            assert!(found.contains(word), "{name} lacks {word}: {found}");
        }
        told.push(name.clone());
        context.tool_servers[0].name = "two words".into();
        assert!(installed.launch(&context).is_err(), "{name}");
    }
    assert_eq!(
        told,
        [
            "claude-code",
            "codex",
            "gemini-cli",
            "openclaw",
            "opencode",
            "qwen-code",
            "react"
        ]
    );
}
