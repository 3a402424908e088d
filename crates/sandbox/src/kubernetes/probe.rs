//! Pods that run once: does the network policy hold, can nodes pull an image and run the guest
//! in it.
//!
//! A policy proves nothing by being there: a cluster without somebody who enforces it takes it
//! all the same. So two pods try to reach the same address, one under the policy and one not.
//! Only when the second succeeds does the failure of the first mean anything.

use std::collections::BTreeMap;

use super::{
    Maker,
    manifest::{PodPlan, Role},
    pod::Guarded,
    status::Ended,
};
use crate::{Degraded, Limits, SandboxError, Spec};

/// How often the policy may be too late: it is enforced some time after a pod began.
const TRIES: u32 = 2;
/// What pods know their cluster's API server by; the cluster puts the values in.
const API_SERVER: &str = "$(KUBERNETES_SERVICE_HOST):$(KUBERNETES_SERVICE_PORT)";

/// What is known about ways out.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Egress {
    /// Proven: without the policy it is open, with it it is not.
    Blocked,
    /// A pod under the policy got out.
    Open(String),
    /// Nobody got anywhere, which proves nothing.
    Unproven(String),
    /// No policy was asked for.
    NoPolicy,
}

impl Egress {
    /// The degraded mode, if it is one.
    pub(super) fn degraded(&self) -> Option<Degraded> {
        let (name, found, costs) = match self {
            Self::Blocked => return None,
            Self::Open(found) => (
                "egress-open",
                found.clone(),
                "sandboxes reach the network: install a network plugin that enforces \
                 NetworkPolicy (Calico, Cilium), or do not run what must not get out",
            ),
            Self::Unproven(found) => (
                "egress-unproven",
                found.clone(),
                "nobody knows whether sandboxes reach the network: set `egress_target` to an \
                 address that pods of this cluster reach",
            ),
            Self::NoPolicy => (
                "egress-policy-off",
                "network_policy = false".to_owned(),
                "sandboxes reach what any pod of the namespace reaches",
            ),
        };
        Some(Degraded {
            name: name.to_owned(),
            found,
            costs: costs.to_owned(),
        })
    }
}

/// What the two tries mean.
fn judge(target: &str, inside: &Ended, outside: &Ended) -> Egress {
    match (inside.code, outside.code) {
        (Some(0), _) => Egress::Open(format!("a pod under the NetworkPolicy reached {target}")),
        (Some(_), Some(0)) => Egress::Blocked,
        _ => Egress::Unproven(format!(
            "a pod without the NetworkPolicy did not reach {target} either: {}",
            outside.reason
        )),
    }
}

/// A small pod that has nothing to do with a task.
fn spec(name: &str) -> Spec {
    Spec {
        name: name.to_owned(),
        limits: Limits {
            memory_bytes: 64 << 20,
            pids: 16,
            cpu_cores: 0.25,
            disk_bytes: 4 << 20,
            deadline_s: 60,
        },
        // In no image: nothing is copied.
        workspace: "/espalier/none".into(),
        home: "/espalier/nobody".into(),
        env: BTreeMap::new(),
        ..Spec::default()
    }
}

impl Maker {
    /// Runs a pod to its end.
    async fn run_once(&self, image: &str, role: Role) -> Result<Ended, SandboxError> {
        let spec = spec(match role {
            Role::Prepull => "prepull",
            _ => "probe",
        });
        let name = self.next_name();
        let pod = Guarded::new(&name, &self.cluster, &self.reaper, None);
        let plan = PodPlan {
            config: &self.cluster.config,
            run: &self.cluster.run,
            spec: &spec,
            image,
            name: &name,
            role,
            parts: self.cluster.parts,
        };
        self.order(&plan).await?;
        let ended = self.ended(&spec.name, &pod).await?;
        drop(pod);
        Ok(ended)
    }

    /// Finds out whether sandboxes have a way out.
    pub(super) async fn try_egress(&self, image: &str) -> Result<Egress, SandboxError> {
        let config = &self.cluster.config;
        if !config.network_policy {
            return Ok(Egress::NoPolicy);
        }
        let target = config.egress_target.as_deref().unwrap_or(API_SERVER);
        let words = config.egress_target.as_deref();
        let words = words.unwrap_or("the cluster's API server");
        let mut found = Egress::Unproven("not tried".to_owned());
        for _ in 0..TRIES {
            let (inside, outside) = tokio::try_join!(
                self.run_once(image, Role::Probe(target.to_owned())),
                self.run_once(image, Role::Control(target.to_owned())),
            )?;
            found = judge(words, &inside, &outside);
            if !matches!(found, Egress::Open(_)) {
                break;
            }
        }
        Ok(found)
    }

    /// Has nodes pull an image, and tries the guest in it.
    pub(super) async fn prepull(&self, image: &str) -> Result<(), SandboxError> {
        let pods = (0..self.cluster.config.prepull_nodes.max(1))
            .map(|_| self.run_once(image, Role::Prepull));
        for ended in futures::future::try_join_all(pods).await? {
            if ended.code != Some(0) {
                return Err(SandboxError::Create {
                    name: "prepull".to_owned(),
                    reason: format!("trying image {image}: {}", ended.reason),
                });
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_difference_proves_anything() {
        let end = |code: Option<i32>| Ended {
            reason: "timed out".to_owned(),
            code,
            certain: true,
            trouble: None,
        };
        let judge = |inside, outside| judge("x:1", &end(inside), &end(outside));
        assert_eq!(judge(Some(1), Some(0)), Egress::Blocked);
        assert!(matches!(judge(Some(0), Some(0)), Egress::Open(_)));
        assert!(matches!(judge(Some(0), Some(1)), Egress::Open(_)));
        for (inside, outside) in [(Some(1), Some(1)), (None, Some(0)), (Some(1), None)] {
            let found = judge(inside, outside);
            assert!(
                matches!(found, Egress::Unproven(_)),
                "{inside:?} {outside:?}: {found:?}"
            );
            let degraded = found.degraded().unwrap();
            assert_eq!(degraded.name, "egress-unproven");
        }
        assert_eq!(Egress::Blocked.degraded(), None);
    }
}
