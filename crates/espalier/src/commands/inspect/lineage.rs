//! Where a rollout came from, for a terminal.

use record::{Lineage, PolicyVersion};

/// Digits of a digest that are shown; `--json` has all.
const DIGITS: usize = 12;

/// One line per thing that is known, and one that names what is not.
pub(super) fn text(lineage: &Lineage) -> String {
    let digest = |digest: &str| -> String { digest.chars().take(DIGITS).collect() };
    let mut text = String::new();
    let mut line = |name: &str, parts: &[(&str, String)]| {
        let known: Vec<String> = parts
            .iter()
            .filter(|(_, value)| !value.is_empty())
            .map(|(name, value)| format!("{name} {value}").trim().to_owned())
            .collect();
        if !known.is_empty() {
            text.push_str(&format!("{name:<12} {}\n", known.join("  ")));
        }
    };
    let versions = |versions: &[PolicyVersion]| {
        let names: Vec<String> = versions.iter().map(ToString::to_string).collect();
        names.join(", ")
    };
    let sandbox = match lineage.warm {
        true => format!("{} (warm)", lineage.sandbox),
        false => lineage.sandbox.clone(),
    };
    let end = lineage.policy_end.map(|version| version.to_string());
    line(
        "made by",
        &[
            ("espalier", lineage.espalier.clone()),
            ("gateway", lineage.gateway.clone()),
            ("sandbox", sandbox),
            ("image", digest(&lineage.image_digest)),
        ],
    );
    line(
        "of",
        &[
            ("task", digest(&lineage.task_digest)),
            ("packages", digest(&lineage.harness_digest)),
            ("profile", digest(&lineage.profile_digest)),
            (
                "tools",
                lineage
                    .tools_digests
                    .iter()
                    .map(|tools| digest(tools))
                    .collect::<Vec<_>>()
                    .join(", "),
            ),
            ("template and tokenizer", digest(&lineage.codec_digest)),
        ],
    );
    line(
        "weights",
        &[
            ("drew", versions(&lineage.policies)),
            ("at its end", end.unwrap_or_default()),
        ],
    );
    if let Some(sampling) = &lineage.sampling {
        line(
            "sampling",
            &[
                ("temperature", sampling.temperature.to_string()),
                ("top p", sampling.top_p.to_string()),
                ("top k", sampling.top_k.to_string()),
                ("reply tokens at most", sampling.tokens_max.to_string()),
                ("seed", sampling.seed.to_string()),
            ],
        );
    }
    let retries = match lineage.retries {
        0 => String::new(),
        retries => retries.to_string(),
    };
    line(
        "scored by",
        &[
            ("", lineage.reward_source.clone()),
            ("verifier", digest(&lineage.verifier_digest)),
            ("attempts before", retries),
        ],
    );
    let missing = lineage.missing();
    if !missing.is_empty() {
        text.push_str(&format!("{:<12} {}\n", "not known", missing.join(", ")));
    }
    text
}
