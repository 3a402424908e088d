//! Where a rollout came from.

use serde::{Deserialize, Serialize};

use crate::{Call, PolicyVersion, Sampling};

/// Where a rollout's inputs and its reward came from: enough to run it again, and to tell two
/// rollouts apart that should have been alike. Digests are SHA-256, hexadecimal. Records of older
/// versions lack some of it; [`Lineage::missing`] names what.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Lineage {
    /// Version of Espalier that ran it.
    pub espalier: String,
    /// Version of the gateway that captured it.
    pub gateway: String,
    /// Of the task as loaded.
    pub task_digest: String,
    /// Name and version of the harness, for people.
    pub harness_version: String,
    /// Over every package that was installed for the harness, with versions and checksums.
    pub harness_digest: String,
    /// Over the harness's profile.
    pub profile_digest: String,
    /// Over the tools that calls offered to the model: each set once, in order of appearance.
    /// Filled when the rollout ends.
    pub tools_digests: Vec<String>,
    /// Over the chat template, the tokenizer and the ids that end a reply.
    pub codec_digest: String,
    /// Weights in force when it started.
    pub policy: PolicyVersion,
    /// Weights that drew its tokens, sorted. Filled when the rollout ends.
    pub policies: Vec<PolicyVersion>,
    /// Weights in force when it ended; what its tokens are stale against.
    pub policy_end: Option<PolicyVersion>,
    /// How replies were drawn, seed included. What single calls asked for beyond it is in the
    /// calls.
    pub sampling: Option<Sampling>,
    /// Kind of the sandbox.
    pub sandbox: String,
    /// Over what the sandbox was made of.
    pub image_digest: String,
    /// Whether the sandbox stood ready before the rollout came.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub warm: bool,
    /// Attempts of the same rollout before this one.
    pub retries: u32,
    /// Who scored it: `code`, `judge`, `code+judge`, `orchestrator`.
    pub reward_source: String,
    /// Over everything that scores the task: the verifier's files, command and contract, and the
    /// judge's rubric.
    pub verifier_digest: String,
}

impl Lineage {
    /// Fields that say nothing. Of a rollout that ended with a reward after at least one call
    /// there should be none.
    #[must_use]
    pub fn missing(&self) -> Vec<&'static str> {
        // Field by field, so that a new one cannot be forgotten here.
        let Self {
            espalier,
            gateway,
            task_digest,
            harness_version,
            harness_digest,
            profile_digest,
            tools_digests,
            codec_digest,
            policy: _,
            policies,
            policy_end,
            sampling,
            sandbox,
            image_digest,
            warm: _,
            retries: _,
            reward_source,
            verifier_digest,
        } = self;
        [
            ("espalier", espalier.is_empty()),
            ("gateway", gateway.is_empty()),
            ("task_digest", task_digest.is_empty()),
            ("harness_version", harness_version.is_empty()),
            ("harness_digest", harness_digest.is_empty()),
            ("profile_digest", profile_digest.is_empty()),
            ("tools_digests", tools_digests.is_empty()),
            ("codec_digest", codec_digest.is_empty()),
            ("policies", policies.is_empty()),
            ("policy_end", policy_end.is_none()),
            ("sampling", sampling.is_none()),
            ("sandbox", sandbox.is_empty()),
            ("image_digest", image_digest.is_empty()),
            ("reward_source", reward_source.is_empty()),
            ("verifier_digest", verifier_digest.is_empty()),
        ]
        .into_iter()
        .filter_map(|(name, missing)| missing.then_some(name))
        .collect()
    }

    /// Notes which weights drew the tokens of these calls.
    pub fn note_policies(&mut self, calls: &[Call]) {
        let spans = calls.iter().filter_map(|call| call.generation.as_ref());
        let versions = spans.flat_map(|generation| &generation.policy);
        self.policies = versions.map(|span| span.version).collect();
        self.policies.sort_unstable();
        self.policies.dedup();
    }
}
