//! Puts every `harnesses/*.toml` of the repository into the binary, so that adding a
//! harness means adding a file and nothing else.

use std::{env, fmt::Write as _, fs, path::PathBuf};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let here = PathBuf::from(env::var("CARGO_MANIFEST_DIR")?);
    let folder = here.join("../../harnesses");
    println!("cargo::rerun-if-changed={}", folder.display());
    let mut names = Vec::new();
    for entry in fs::read_dir(&folder)? {
        let path = entry?.path();
        if path
            .extension()
            .is_some_and(|extension| extension == "toml")
        {
            let path = path.canonicalize()?;
            println!("cargo::rerun-if-changed={}", path.display());
            names.push(path);
        }
    }
    names.sort();
    let mut code = String::from("pub(crate) const PROFILES: &[(&str, &str)] = &[\n");
    for path in names {
        let stem = path.file_stem().unwrap_or_default().to_string_lossy();
        writeln!(code, "    ({stem:?}, include_str!({path:?})),")?;
    }
    code.push_str("];\n");
    fs::write(
        PathBuf::from(env::var("OUT_DIR")?).join("profiles.rs"),
        code,
    )?;
    Ok(())
}
