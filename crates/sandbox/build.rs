//! Builds the guest as a static binary, so that every program with this crate carries it.

use std::{
    env, fs,
    path::{Path, PathBuf},
    process::Command,
};

type Failure = Box<dyn std::error::Error>;

fn main() -> Result<(), Failure> {
    let manifest = PathBuf::from(env::var("CARGO_MANIFEST_DIR")?);
    let out = PathBuf::from(env::var("OUT_DIR")?);
    let workspace = manifest.join("../..").canonicalize()?;
    for path in ["crates/guest/src", "crates/guest/Cargo.toml"] {
        println!("cargo::rerun-if-changed={}", workspace.join(path).display());
    }
    println!("cargo::rerun-if-changed=build.rs");

    let target = env::var("TARGET")?;
    // The processor's baseline: the guest does no arithmetic worth more, and must run wherever
    // the sandboxes are.
    let processor = if target.starts_with("x86_64") {
        " -C target-cpu=x86-64"
    } else {
        ""
    };
    let folder = target_folder(&out).join("guest-build");
    let mut cargo = Command::new(env::var("CARGO")?);
    // Cargo describes this crate to us in variables that would confuse it about the other one,
    // and clippy's wrapper would check instead of build. The job server stays.
    for (name, _) in env::vars_os() {
        let text = name.to_string_lossy();
        let ours = text.starts_with("CARGO_") && !KEEP.contains(&text.as_ref());
        if ours || text.starts_with("RUSTC") || text == "RUSTFLAGS" || text == "RUSTDOCFLAGS" {
            cargo.env_remove(&name);
        }
    }
    cargo
        .current_dir(&workspace)
        .args([
            "build",
            "--quiet",
            "--release",
            "--package",
            "guest",
            "--bin",
            "guest",
        ])
        .args(["--target", &target, "--target-dir"])
        .arg(&folder)
        .env(
            "RUSTFLAGS",
            format!("-C target-feature=+crt-static{processor}"),
        )
        .env("CARGO_PROFILE_RELEASE_OPT_LEVEL", "s")
        .env("CARGO_PROFILE_RELEASE_LTO", "true")
        .env("CARGO_PROFILE_RELEASE_CODEGEN_UNITS", "1")
        .env("CARGO_PROFILE_RELEASE_PANIC", "abort")
        .env("CARGO_PROFILE_RELEASE_STRIP", "symbols")
        .env("CARGO_PROFILE_RELEASE_DEBUG", "false")
        .env("CARGO_PROFILE_RELEASE_INCREMENTAL", "false");
    let status = cargo.status()?;
    if !status.success() {
        return Err(format!("building the static guest for {target} failed: {status}").into());
    }
    fs::copy(
        folder.join(&target).join("release/guest"),
        out.join("guest"),
    )?;
    Ok(())
}

/// Variables of cargo that say where and how, not what.
const KEEP: [&str; 5] = [
    "CARGO_HOME",
    "CARGO_MAKEFLAGS",
    "CARGO_NET_OFFLINE",
    "CARGO_HTTP_PROXY",
    "CARGO_TERM_COLOR",
];

/// Cargo's target folder: the one above us that it marks.
fn target_folder(out: &Path) -> &Path {
    out.ancestors()
        .find(|folder| folder.join("CACHEDIR.TAG").exists())
        .unwrap_or(out)
}
