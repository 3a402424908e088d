//! Where a rollout comes from: what is known before it starts, and what only its calls tell.

use record::{Call, Lineage, PolicyVersion, Sampling};
use sha2::{Digest, Sha256};
use task::{Mix, Task};

use crate::{job::Job, settings::Settings};

/// Everything but what sandbox and calls tell.
pub(crate) fn at_start(job: &Job, settings: &Settings, policy: PolicyVersion) -> Lineage {
    // A profile holds text, numbers and lists: it always has a JSON form.
    let profile = serde_json::to_vec(&job.installed.profile).unwrap_or_default();
    Lineage {
        espalier: settings.espalier.clone(),
        gateway: gateway::VERSION.to_owned(),
        task_digest: job.task.digest.clone(),
        harness_version: job.installed.version(),
        harness_digest: job.installed.digest.clone(),
        profile_digest: hex::encode(Sha256::digest(&profile)),
        codec_digest: settings.codec_digest.clone(),
        policy,
        sampling: Some(Sampling {
            seed: job.spec.seed,
            ..job.sampling.clone()
        }),
        reward_source: reward_source(&job.task).to_owned(),
        verifier_digest: task::verifier_digest(&job.task),
        ..Lineage::default()
    }
}

/// Adds what only the calls tell.
pub(crate) fn at_end(lineage: &mut Lineage, calls: &[Call]) {
    lineage.tools_digests = wire::digest::tools_of_calls(calls);
    lineage.note_policies(calls);
}

fn reward_source(task: &Task) -> &'static str {
    match task.grading.mix {
        Mix::Code => "code",
        Mix::Judge => "judge",
        Mix::Weighted { .. } | Mix::Gated { .. } => "code+judge",
    }
}
